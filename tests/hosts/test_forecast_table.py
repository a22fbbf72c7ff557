"""The table of forecasts against fewer steps says what happened, and covers what it claims to."""

import logging
import sys
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
import torch
from comfyui_version import __version__
from common import relative_error

from tools.environment import NEWEST, is_earlier

if is_earlier(__version__, NEWEST):
    pytest.skip(f"ComfyUI {__version__} lacks some of the nodes", allow_module_level=True)

from comfy.ldm.minimax import model as minimax

from benchmarks.forecasts import __main__ as command
from benchmarks.forecasts import cells, denoiser, sound
from benchmarks.forecasts.cells import ASIDE, FORECAST, NONE, WRONG, Cell, Graph
from benchmarks.forecasts.situations import SITUATIONS, Situation
from benchmarks.forecasts.subjects import TRAINED_FLOW

PLAIN = Graph("euler", 8, 3.0, True, "plain", "simple", 3.0)

ALIKE = {"plain", "split sampling", "batch that splits and joins", "PAG"}
"""Situations whose first picture is that of the plain graph, but for the order of sums. PAG
replaces attention as only UNets have it."""


def missing(axes, rows, apart=()):
    """The pairs of values that do not occur."""
    return {
        (one, a, other, b)
        for one, other in combinations(axes, 2)
        if not {one, other} <= set(apart)
        for a, b in product(axes[one], axes[other])
        if not any(row[one] == a and row[other] == b for row in rows)
    }


def test_the_table_has_each_pair_and_each_of_the_hosts_samplers_and_schedulers():
    named = {"sampler", "steps", "guidance", "negative", "situation", "schedule"}
    assert set(command.AXES) == named
    rows = [
        {name: getattr(graph, name) for name in named - {"schedule"}}
        | {"schedule": (graph.scheduler, graph.shift)}
        for graph in command.graphs(is_quick=True)
    ]
    assert not missing(command.AXES, rows, apart=command.LONG_AXES)
    samplers = {
        graph.sampler for graph in command.graphs(is_quick=True) if ", " not in graph.sampler
    }
    assert samplers == set(command.comfy.samplers.SAMPLER_NAMES)


@pytest.mark.parametrize("power", [2.0, 2.5])
def test_the_denoiser_gives_the_mean_of_the_pictures_that_a_latent_may_hold(power):
    """Against the posterior mean of a normal vector, by solving with its covariance."""
    high, wide, noise, variance = 4, 6, 0.6, 0.8
    random = torch.Generator().manual_seed(0)
    latent, centre = torch.randn(2, 1, 1, high, wide, generator=random)
    size = high * wide
    waves = torch.fft.fft2(torch.eye(size, dtype=torch.complex128).reshape(size, high, wide))
    waves = waves.reshape(size, size) / size**0.5
    spectrum = variance * denoiser._spectrum(high, wide, power).double().flatten()
    covariance = (waves.conj() * spectrum @ waves.T).real
    share = 1 - noise
    of_latent = share**2 * covariance + noise**2 * torch.eye(size)
    off = (latent - share * centre).double().flatten()
    expected = centre.flatten() + share * covariance @ torch.linalg.solve(of_latent, off)
    actual = denoiser.denoised(latent, centre, noise, variance, power)
    torch.testing.assert_close(actual.flatten().double(), expected, atol=1e-5, rtol=1e-5)


def test_the_denoiser_weighs_means_by_how_likely_they_are():
    """Against the densities of the latent, by the covariance of each."""
    high, wide, noise, variance = 4, 6, 0.6, 0.8
    latent, *centres = torch.randn(4, 1, 1, high, wide, generator=torch.Generator().manual_seed(0))
    waves = torch.fft.fft2(torch.eye(high * wide, dtype=torch.complex128).reshape(-1, high, wide))
    waves = waves.reshape(high * wide, -1) / (high * wide) ** 0.5
    spectrum = variance * denoiser._spectrum(high, wide, 1.0).double().flatten()
    covariance = (waves.conj() * ((1 - noise) ** 2 * spectrum + noise**2) @ waves.T).real
    densities = [
        torch.distributions.MultivariateNormal((1 - noise) * each.double().flatten(), covariance)
        for each in centres
    ]
    weights = torch.stack([each.log_prob(latent.double().flatten()) for each in densities]).softmax(
        0
    )
    guesses = [denoiser.denoised(latent, each, noise, variance, 1.0) for each in centres]
    expected = sum(weight * guess for weight, guess in zip(weights, guesses, strict=True))
    actual = denoiser.denoised_one_of(latent, centres, noise, variance, 1.0)
    assert weights.max() < 0.9
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("noise", [0.02, 0.5, 0.98])
def test_the_sound_of_minimax_h3_has_the_noise_that_the_host_gives_it(noise):
    """Its answer leads along the host's slope, and carried four times as loud the same way."""
    tensor = torch.tensor(noise)
    own = float(minimax.time_shift_sigma(tensor, 12.0, 3.0))
    slope = float(minimax.time_shift_slope(tensor, 12.0, 3.0))
    clean, added = torch.randn(2, 1, 32, 2, 4, generator=torch.Generator().manual_seed(0))
    latent = own * added + (1 - own) * clean
    seen = []

    def denoise(latent, noise):
        seen.append((latent, noise))
        return clean

    answer = sound._as_in_030(latent, denoise, noise)
    torch.testing.assert_close(answer, slope * (added - clean), atol=1e-4, rtol=1e-4)
    carried = noise * added + (1 - noise) * 4 * clean
    torch.testing.assert_close(
        sound._as_in_031(carried, denoise, noise), added - 4 * clean, atol=1e-4, rtol=1e-4
    )
    for given, level in seen:
        torch.testing.assert_close(given, latent, atol=1e-4, rtol=1e-4)
        assert level == pytest.approx(own)


def test_a_run_with_sound_is_compared_with_as_many_fewer_steps():
    """LTX-2 in 8 steps, with one seed twice: the sound is not that of the picture's error."""
    asked = sound.Run("LTX-2", "any sound", 8, 3.0)
    errors = sound.errors_of(asked, (1, 1))
    assert errors.evaluated == [6, 6] and errors.ours[0] == errors.ours[1]
    plain, six = asked.sampled(1)[0], replace(asked, steps=6).sampled(1)[0]
    expected = [relative_error(one, other) for one, other in zip(six, plain, strict=True)]
    assert errors.fewer[0] == pytest.approx(expected, rel=1e-3)
    assert all(ours < fewer for ours, fewer in zip(errors.ours[0], errors.fewer[0], strict=True))
    assert errors.in_words().startswith("6 | 0.0")


@pytest.fixture(scope="module")
def latent_of():
    """Returns the result of a graph without ours, which is made once."""
    return cache(lambda graph: cells.run(graph, 1).latent[:1])


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_situation_changes_the_result_without_ours(name, latent_of):
    plain = "windows standard_static" if SITUATIONS[name].is_video else "plain"
    graph = replace(PLAIN, situation=name, steps=12)
    expected = latent_of(replace(graph, situation=plain))
    result = cells.run(graph, 1)
    assert result.latent.isfinite().all()
    difference = graph.subject.difference(result.latent[:1], expected)
    if name in (*ALIKE, "windows standard_static"):
        assert difference < 1e-4
    else:
        assert difference > 0.001


@pytest.mark.parametrize("name", SITUATIONS)
def test_no_situation_is_changed_more_than_by_fewer_steps(name):
    cell = cells.cell(replace(PLAIN, situation=name, steps=20))
    left_alone = "APG with momentum", "DifferentialDiffusion", "windows standard_uniform"
    is_left_alone = name.startswith((*left_alone, "windows looped", "EasyCache", "LazyCache"))
    assert cell.verdict == (ASIDE if is_left_alone else FORECAST)
    assert cell.ratio <= 1


@pytest.mark.parametrize(
    "graph",
    [
        Graph("euler", 10, 3.0, False, "CFGZeroStar", "karras", 3.0),
        Graph("res_multistep", 8, 7.0, True, "CFGZeroStar", "simple", 12.0),
        Graph("sa_solver", 8, 7.0, True, "CFGNorm", "exponential", 12.0),
        Graph("dpmpp_2m", 10, 3.0, False, "CFGNorm before guidance", "kl_optimal", 3.0),
        Graph("ddim", 8, 3.0, True, "TCFG", "beta", 3.0),
        Graph("res_multistep", 30, 3.0, False, "CFGOverride 0.2 to 0.8 after ours", "beta", 3.0),
    ],
    ids=Graph.in_words,
)
def test_guidance_that_is_no_scale_or_ends_is_changed_less_than_by_fewer_steps(graph):
    cell = cells.cell(graph)
    assert cell.verdict == FORECAST and cell.ratio <= 1


@pytest.mark.parametrize(
    ("shift", "scheduler", "steps", "verdict"),
    [
        *((11.0, "simple", 30, FORECAST), (11.0, "beta", 17, FORECAST)),
        *((6.0, "normal", 8, FORECAST), (1.0, "linear_quadratic", 8, ASIDE)),
    ],
)
def test_uneven_noise_levels_do_no_harm(shift, scheduler, steps, verdict):
    """Levels may be so close, or so far from each other, that a line leads far away."""
    cell = cells.cell(replace(PLAIN, shift=shift, scheduler=scheduler, steps=steps))
    assert cell.verdict == verdict and cell.ratio <= 1


@pytest.mark.parametrize(
    ("sampler", "steps", "scheduler", "shift", "share", "scale"),
    [
        # The answer that makes up for forecasts is the first with the new scale.
        ("euler", 12, "normal", 3.0, 0.5, 7.0),
        # The step in which it begins would have been forecast.
        ("euler", 12, "simple", 3.0, 0.6, 5.0),
        # The next step would have been forecast.
        ("dpmpp_2m", 8, "simple", None, 0.3, 5.0),
    ],
)
def test_guidance_that_begins_within_a_run_does_no_harm(
    monkeypatch, sampler, steps, scheduler, shift, share, scale
):
    """By a node that says nothing of it."""

    def guide(parts):
        now = scale if 1 - float(parts["sigma"].max()) >= share else 1.0
        return parts["uncond"] + now * (parts["cond"] - parts["uncond"])

    def patch(model):
        model = model.clone()
        model.set_model_sampler_cfg_function(guide, disable_cfg1_optimization=True)
        return model

    monkeypatch.setitem(SITUATIONS, "jump", Situation("jump", patch))
    cell = cells.cell(Graph(sampler, steps, 5.0, True, "jump", scheduler, shift))
    assert cell.verdict == FORECAST and cell.change < 0.2 * cell.change_by_fewer


def test_a_cell_that_forecasts_has_as_many_fewer_steps():
    cell = cells.cell(replace(PLAIN, guidance=1.0))
    assert (cell.verdict, cell.evaluated, cell.why) == (FORECAST, 8, "")
    assert cell.ours == cell.fewer < 8
    fewer = cells.run(replace(PLAIN, guidance=1.0), 1, steps=cell.fewer)
    assert fewer.evaluated == cell.fewer
    plain = cells.run(replace(PLAIN, guidance=1.0), 1).latent
    assert cell.change_by_fewer == pytest.approx(
        float((fewer.latent - plain).norm() / plain.norm())
    )
    assert cell.ratio == pytest.approx(cell.change / max(1.15 * cell.change_by_fewer, 0.005))


def test_a_cell_that_steps_aside_says_why_and_is_equal():
    cell = cells.cell(replace(PLAIN, sampler="heun"))
    assert (cell.verdict, cell.evaluated, cell.ours, cell.ratio) == (ASIDE, 15, 15, 0)
    assert "heun" in cell.why


@pytest.mark.parametrize(("difference", "line"), [(1e-6, True), (0.0, False)])
def test_a_cell_that_steps_aside_but_differs_or_is_silent_is_wrong(monkeypatch, difference, line):
    def run(graph, seed, with_ours=False, steps=None):
        if with_ours and line:
            logging.getLogger("tome_nodes").warning("[ToMe] nothing was forecast: it may not")
        return cells.Result(torch.ones(1) + difference * with_ours, 8)

    monkeypatch.setattr(cells, "run", run)
    cell = cells.cell(PLAIN)
    assert cell.verdict == WRONG
    assert cell.ratio == float("inf")


def test_a_graph_that_cannot_run_is_not_held_against_ours():
    cell = cells.cell(replace(PLAIN, sampler="euler_ancestral", situation="restart schedule"))
    assert cell.verdict == NONE
    assert "finite" in cell.why
    assert cell.ratio == 0


def test_the_command_keeps_a_page_and_fails_for_a_cell_over_the_limit(
    monkeypatch, tmp_path, capsys
):
    # The command is a process of its own; here, what it tells loggers is taken back.
    for name, attribute in (("tome_nodes", "propagate"), (None, "level")):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
    over = Cell(FORECAST, 8, 6, 6, change=0.3, change_by_fewer=0.2)
    under = Cell(FORECAST, 8, 6, 6, change=0.1, change_by_fewer=0.2)
    graphs = {PLAIN: under, replace(PLAIN, steps=10): Cell(ASIDE, 10, 10, why="it may not")}
    trained = {replace(PLAIN, steps=20, on=TRAINED_FLOW): over}
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "graphs", lambda is_quick: [*graphs])
    monkeypatch.setattr(command, "trained_graphs", lambda is_quick: [*trained])
    monkeypatch.setattr(command, "cell", (graphs | trained).get)
    monkeypatch.setattr(sys, "argv", ["forecasts"])
    assert command.main() == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("summary: cells=3 forecast=2 aside=1 not_possible=0 over=1 worst=1.30 (")
    assert "20 steps" in last
    text = (tmp_path / "forecasts.md").read_text(encoding="utf-8")
    assert last in text
    assert "it may not" in text
    monkeypatch.setattr(command, "trained_graphs", lambda is_quick: [])
    assert command.main() == 0
