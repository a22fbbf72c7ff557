"""Runs of UNets that merge tokens and forecast steps."""

import re

import comfy.model_management
import pytest
import torch
from comfy_extras.nodes_apg import APG
from common import Shuffle, relative_error, stopped
from host import fast, overridden, preset
from models.comfyui import KINDS, TINY, UNETS, sample
from test_forecast_runs import seen

from tome_nodes import reasons
from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.forecasting import forecasts
from tome_nodes.patching import model as patched_model
from tome_nodes.report.pages import in_words
from tome_nodes.settings.config import ToMeConfig

SIZE = 32, 32
BOTH = (
    r"\[ToMe\] merged \d/\d blocks \(.*\), \d+/\d+ steps, forecast (\d+)/(\d+) steps \(.*\), ratio"
)


def second_pass(model, steps=8, **options):
    """A run whose picture is there from the start."""
    options = {"picture": 2.0, "start_step": 4 * steps, "cfg": 1.0, **options}
    return sample(model, UNETS["sd15"], SIZE, steps=5 * steps, **options)


def from_noise(model, steps=20, **options):
    return sample(model, UNETS["sd15"], SIZE, steps=steps, **{"cfg": 1.0, **options})


@pytest.mark.parametrize("run", [second_pass, from_noise])
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m"])
def test_fast_merges_and_forecasts_in_one_run(sd15, log_messages, run, sampler):
    patched, evaluations = seen(attach(sd15, fast()))
    result = run(patched, sampler=sampler)
    forecast, total = map(int, re.match(BOTH, log_messages()[-1]).groups())
    assert len(evaluations) == total - forecast < total
    assert result.isfinite().all()
    assert overridden(sd15) == []
    assert torch.equal(run(patched, sampler=sampler), result)


@pytest.mark.parametrize("run", [second_pass, from_noise])
def test_a_lossless_plan_leaves_what_forecasts_alone_make(sd15, monkeypatch, run):
    merged = run(attach(sd15, fast(), Shuffle))
    # Where it would save too little, nothing merges, and steps are forecast all the same.
    monkeypatch.setattr(patched_model, "LEAST_SAVED", 1.0)
    patched = attach(sd15, fast())
    alone = run(patched)
    assert not last_run(patched).counts.merged
    assert relative_error(merged, alone) < 0.01 * relative_error(alone, run(sd15))


def test_balanced_leaves_short_runs_to_merging(sd15, log_messages):
    short = second_pass(attach(sd15, preset("balanced")))
    assert "forecast" not in log_messages()[-1]
    assert torch.equal(short, second_pass(attach(sd15, preset("balanced", forecast=False))))
    from_noise(attach(sd15, preset("balanced")))
    assert re.match(BOTH, log_messages()[-1])


def test_a_short_run_from_noise_is_left_to_merging_and_the_log_says_why(
    sd15, log_messages, monkeypatch
):
    # Answers of random weights hardly differ.
    monkeypatch.setattr(forecasts, "_SETTLED", 0.0)
    result = from_noise(attach(sd15, fast()), steps=8)
    assert torch.equal(result, from_noise(attach(sd15, preset("fast", forecast=False)), steps=8))
    assert re.match(r"\[ToMe\] merged .*; nothing was forecast: .*", log_messages()[-2])


def test_a_sampler_that_is_left_alone_is_named(sd15, log_messages):
    from_noise(attach(sd15, fast()), sampler="dpmpp_3m_sde")
    assert "; nothing was forecast: under the sampler dpmpp_3m_sde" in log_messages()[-1]


@pytest.mark.parametrize("forecast", [True, False])
def test_custom_switches_forecasts_beside_merging(sd15, forecast):
    config = ToMeConfig(ratio=0.5, min_tokens=1, forecast=forecast)
    patched, evaluations = seen(attach(sd15, config))
    from_noise(patched)
    counts = last_run(patched).counts
    assert counts.merged and bool(counts.forecast_steps) == forecast
    assert (len(evaluations) < 20) == forecast


@pytest.mark.parametrize(
    ("name", "run"), [("fast", second_pass), ("fast", from_noise), ("balanced", from_noise)]
)
def test_more_ratio_is_less_work_one_step_at_a_time(sd15, name, run):
    done = []
    for ratio in (0.0, 0.1, 0.5, 0.9):
        patched, evaluations = seen(attach(sd15, preset(name, ratio=ratio)))
        run(patched)
        done.append(len(evaluations))
    assert done == sorted(done, reverse=True)


def test_every_step_is_shown_once(sd15):
    lines = []
    from_noise(attach(sd15, fast(), on_step=lines.append))
    assert [int(line.partition("step ")[2].partition("/")[0]) for line in lines] == [*range(1, 21)]
    forecast = [line for line in lines if line.startswith("forecast, step")]
    assert 0 < len(forecast) < 20
    assert all(" blocks, " in line for line in lines if line not in forecast)


def test_the_report_says_both(sd15):
    patched = attach(sd15, fast(), wants_details=lambda: True)
    second_pass(patched)
    lines = in_words(last_run(patched))
    assert re.fullmatch(r"Done: merged \d of \d blocks, forecast \d of 8 steps", lines[0])
    assert re.search(r"a step took .* with the model, .* forecast; expected", lines[1])


@pytest.mark.parametrize("kind", ["flux", "sd15"])
def test_an_error_in_what_is_shown_of_a_forecast_loses_no_picture(models, log_messages, kind):
    def broken(text):
        raise ValueError("no room on the screen")

    model, tiny = models(kind), KINDS[kind]
    runs = [
        sample(attach(model, fast(), on_step=on_step), tiny, SIZE, steps=16, cfg=1.0)
        for on_step in (None, broken)
    ]
    assert torch.equal(*runs)
    assert any("no room on the screen" in message for message in log_messages())


def test_an_error_in_the_record_of_a_forecast_loses_no_picture(models, log_messages, monkeypatch):
    flux, expected = models("flux"), None
    expected = sample(attach(flux, fast()), TINY["flux"], steps=8)
    from tome_nodes.report import run_record

    def broken(*args, **kwargs):
        raise ValueError("no ink")

    monkeypatch.setattr(run_record, "gain_of", broken)
    assert torch.equal(sample(attach(flux, fast()), TINY["flux"], steps=8), expected)
    assert log_messages()[-1] == "[ToMe] the report of this run is missing: ValueError: no ink"


ERRORS = [RuntimeError, comfy.model_management.InterruptProcessingException, KeyboardInterrupt]


def test_an_error_in_the_middle_leaves_nothing(sd15):
    patched = attach(sd15, fast())
    plain, expected = from_noise(sd15), from_noise(patched)
    for error in ERRORS:
        with stopped(sd15.model.diffusion_model.middle_block[1], error):
            from_noise(patched)
        assert overridden(sd15) == []
        assert torch.equal(from_noise(patched), expected), error
    assert torch.equal(from_noise(sd15), plain)


@pytest.mark.parametrize(("sampler", "is_forecast"), [("euler", True), ("dpmpp_2m", False)])
def test_beside_a_node_that_changes_answers_before_they_guide_a_sampler_must_not_look_back(
    sd15, log_messages, sampler, is_forecast
):
    """As APG does; more than one answer is changed only where there is guidance."""
    patched = APG.execute(attach(sd15, fast()), 1.0, 5.0, 0.0).args[0]
    from_noise(patched, sampler=sampler, cfg=4.0)
    (line,) = log_messages()
    assert (reasons.CHANGED_GUIDANCE in line) != is_forecast
    assert ("forecast " in line.split(";")[0]) == is_forecast
