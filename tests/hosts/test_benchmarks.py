"""The arithmetic and the checks of the benchmark, without measurements."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import comfy.sd
import pytest
import torch
from common import relative_error
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import __main__ as command
from benchmarks.speed import checks, figures, plots
from benchmarks.forecast import UNLISTED, affordable, forecast, parabola
from benchmarks.speed.measure import Launches, PeakMemory, Subject
from benchmarks.speed.methods import HostMethod, methods
from benchmarks.rounds import interleaved
from benchmarks.slope import log_log_slope
from tome_nodes.merging.plan import SlotPlan
from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.strategies.window import WindowStrategy

pytestmark = pytest.mark.newest_only

CPU = torch.device("cpu")


def row(family, *seconds, ideal=None, error=0.1, **more):
    return {
        "family": family,
        "ideal": ideal,
        "seconds": list(seconds),
        "error": error,
        "peak_bytes": 10**6,
    } | more


def run(**rows):
    """A comparison with hand-made rows; underscores in their names become spaces."""
    return {
        "model": "sd15",
        "note": "",
        "size": 512,
        "batch": 2,
        "dtype": "float32",
        "repeats": 2,
        "forecast": {"ideal block": 1.5},
        "refused": {},
        "methods": {name.replace("_", " "): each for name, each in rows.items()},
    }


def result(*runs):
    return {
        "name": "hand",
        "date": "2026-01-01",
        "command": "none",
        "ratio": 0.5,
        "machine": {"description": "paper", "torch": "2"},
        "slopes": {"window": 1.02, "cluster": 1.7},
        "matching_seconds": {},
        "runs": list(runs),
        "left_out": [],
    }


SLOW = run(
    unpatched=row("unpatched", 10.0, 20.0),
    ideal_attn=row("ideal", 9.0, 18.0, ideal="ideal attn"),
    ideal_block=row("ideal", 5.0, 10.0, ideal="ideal block"),
    core_TomePatchModel=row("peer", 8.0, 16.0),
    tomesd_attn=row("peer", 7.5, 15.0, ideal="ideal attn"),
    tomesd_all=row("peer", 12.0, 24.0),
    ours_window_attn=row("ours", 9.2, 18.4, ideal="ideal attn", launches_per_block=3.0),
    ours_window_block=row("ours", 6.0, 12.0, ideal="ideal block", launches_per_block=2.0),
    ours_pool_attn=row("ours", 1.0, 2.0),
)
NO_GAIN = run(
    unpatched=row("unpatched", 1.0, 1.0),
    ideal_block=row("ideal", 0.96, 0.96, ideal="ideal block"),
    ours_window_block=row("ours", 1.25, 1.25, ideal="ideal block", launches_per_block=9.0),
)


def test_shares_are_taken_within_a_round():
    rounds = run(
        unpatched=row("unpatched", 1.0, 10.0, 1.0), ours=row("ours", 0.5, 5.0, 0.8, ideal=None)
    )
    assert figures.share_of_time(rounds, "ours") == 0.5
    assert figures.speed_up(rounds, "ours") == 2


def test_efficiency_is_the_share_of_the_ideal_saving():
    assert figures.efficiency(SLOW, "ours window block") == pytest.approx(0.8)
    assert figures.efficiency(SLOW, "ours window attn") == pytest.approx(0.8)
    assert figures.efficiency(SLOW, "core TomePatchModel") is None
    assert figures.efficiency(NO_GAIN, "ours window block") is None


def test_the_summary_is_the_worst_run_with_the_best_scope_in_each():
    assert figures.summary(result(SLOW)) == (
        "summary: efficiency=0.80 slope=1.02 vs_unpatched=1.67 vs_tomesd=1.25 vs_core=1.33 "
        "launches=2.0"
    )
    assert figures.summary(result(SLOW, NO_GAIN)) == (
        "summary: efficiency=0.80 slope=1.02 vs_unpatched=0.80 vs_tomesd=1.25 vs_core=1.33 "
        "launches=9.0"
    )
    assert figures.summary(result()) == (
        "summary: efficiency=none slope=1.02 vs_unpatched=none vs_tomesd=none vs_core=none "
        "launches=none"
    )


def test_a_results_file_shows_everything():
    shown = result(SLOW | {"refused": {"tomesd stack": "it is wrong"}})
    shown["left_out"] = ["2048x2048: too long"]
    text = figures.markdown(shown, "hand.webp")
    for part in (
        "| ours window block   |",
        "1.67",
        "Not timed: tomesd stack: it is wrong",
        "Left out: 2048x2048: too long",
        "(hand.webp)",
        figures.summary(shown),
    ):
        assert part in text
    lines = figures.table(SLOW).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_plots_are_drawn_for_one_size_and_for_several(tmp_path):
    larger = SLOW | {"size": 1024}
    for runs in ([SLOW], [SLOW, larger]):
        path = tmp_path / f"{len(runs)}.webp"
        plots.draw(result(*runs), path)
        assert path.read_bytes()[8:12] == b"WEBP"


def test_the_front_is_what_no_other_point_beats_in_both():
    points = {"a": (0.0, 1.0), "b": (0.1, 1.5), "c": (0.2, 1.4), "d": (0.3, 2.0), "e": (0.1, 1.2)}
    assert plots.pareto(points) == ["a", "b", "d"]


def test_labels_do_not_overlap_and_stay_near_their_points():
    assert plots.spaced([1, 5, 9], 2) == [1, 5, 9]
    assert plots.spaced([4, 4, 4, 20], 2) == pytest.approx([2, 4, 6, 20])
    assert plots.spaced([0, 9, 9, 10], 1) == pytest.approx([0, 28 / 3 - 1, 28 / 3, 28 / 3 + 1])


@pytest.mark.parametrize("power", [0, 1, 2, 1.5])
def test_the_slope_is_the_exponent_of_growth(power):
    assert log_log_slope({n: 3e-5 * n**power for n in (1024, 4096, 16384)}) == pytest.approx(power)


def test_three_points_determine_a_parabola():
    value = parabola({x: 7 + 3 * x + 0.5 * x * x for x in (4, 9, 25)})
    assert value(1000) == pytest.approx(7 + 3000 + 500_000)


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (None, ("all", 3)),
        (80, ("all", 3)),
        (79, ("headline", 3)),
        (39, ("headline", 1)),
        (19, None),
    ],
)
def test_the_available_time_decides_what_runs(available, expected):
    assert affordable(1, {"all": 20, "headline": 10}, 3, available) == expected


def test_every_other_round_is_reversed():
    order = []
    runs = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert interleaved(runs, 2) == {"a": [1, 4], "b": [2, 3]}
    assert order == ["a", "b", "b", "a"]


@pytest.fixture(scope="module")
def model(checkpoints):
    return comfy.sd.load_diffusion_model(str(checkpoints("sd15", levels=1)))


@pytest.fixture(scope="module")
def subject(model):
    return Subject(model, 768, 64, 1)


@pytest.fixture(scope="module")
def expected(subject):
    return checks.unpatched_output(subject)


def test_methods_come_after_the_ideal_they_are_compared_with():
    seen = set()
    for method in methods(0.5, "auto"):
        seen.add(method.name)
        assert method.ideal is None or method.ideal in seen


@pytest.mark.parametrize("method", methods(0.5, "auto"), ids=lambda method: method.name)
def test_every_method_passes_its_checks(method, subject, expected):
    checks.check_wiring(method, subject, expected)
    if isinstance(method, HostMethod):
        checks.check_plan(method, CPU, torch.float32)
    (output,) = subject.run(method.patch(subject.model), torch.no_grad())
    assert 0 <= relative_error(output, expected) < 1


def wrong(strategy, **settings):
    config = ToMeConfig(strategy="window", **settings)
    return HostMethod(name="wrong", family="ours", config=config, make_strategy=strategy)


class OffByOne(WindowStrategy):
    """Takes the mean of the tokens next to the right ones."""

    def plans(self, features, grid, ratios):
        tokens = features.shape[0] * grid.tokens
        plans = super().plans(features, grid, ratios)
        return [replace(plan, order=(plan.order + 1) % tokens) for plan in plans]


class TooMany(WindowStrategy):
    """Merges more tokens than it is asked to."""

    def plans(self, features, grid, ratios):
        return super().plans(features, grid, [0.7 for _ in ratios])


class EmptySlot(WindowStrategy):
    """Has a slot without a token."""

    def plans(self, features, grid, ratios):
        plans = super().plans(features, grid, ratios)
        return [SlotPlan.from_slots(plan.slots(), plan.slot_count + 1) for plan in plans]


class Nothing(WindowStrategy):
    """Merges no map of a model."""

    def plans(self, features, grid, ratios):
        plans = super().plans(features, grid, ratios)
        return plans if features.shape[2] < 64 else [None for _ in plans]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (OffByOne, "differ from the means"),
        (TooMany, "ratio=0.6 asks 615"),
        (EmptySlot, "hold a token"),
        (Nothing, "no plan"),
    ],
)
def test_a_wrong_plan_is_refused(strategy, message):
    with pytest.raises(checks.WrongOutput, match=message):
        checks.check_plan(wrong(strategy), CPU, torch.float32)


def test_a_method_that_merges_nothing_is_refused(subject, expected):
    with pytest.raises(checks.WrongOutput, match="merged no block"):
        checks.check_wiring(wrong(Nothing), subject, expected)


@pytest.mark.parametrize("scope", ["module", "block", "stack"])
def test_wrong_wiring_is_refused_in_every_scope(scope, subject, expected, monkeypatch):
    merge, merge_inputs = SlotPlan.merge, SlotPlan.merge_inputs
    monkeypatch.setattr(SlotPlan, "merge", lambda self, x: merge(self, x) * 1.01)
    monkeypatch.setattr(
        SlotPlan, "merge_inputs", lambda self, x: [y * 1.01 for y in merge_inputs(self, x)]
    )
    with pytest.raises(checks.WrongOutput, match="lossless plans"):
        checks.check_wiring(wrong(WindowStrategy, scope=scope), subject, expected)


def test_outputs_that_are_not_finite_or_too_far_away_are_refused():
    plain = torch.ones(2, 3)
    assert checks.difference(plain * 1.5, plain) == pytest.approx(0.5)
    with pytest.raises(checks.WrongOutput, match="not finite"):
        checks.difference(plain * float("nan"), plain)
    with pytest.raises(checks.WrongOutput, match=r"\(3, 2\), not \(2, 3\)"):
        checks.difference(plain.mT, plain)
    checks.check_distance(0.29, 0.2)
    with pytest.raises(checks.WrongOutput, match=r"allowed: 0\.300"):
        checks.check_distance(0.31, 0.2)
    with pytest.raises(checks.WrongOutput, match=r"allowed: 1\.000"):
        checks.check_distance(1.1, None)


def test_variants_measure_each_scope_of_ours_again():
    names = [each.name for each in methods(0.5, 1, {"": {}, " in cells of 4": {"sx": 4}})]
    assert len(names) == len(set(names))
    for scope in ("attn", "all", "block", "stack"):
        assert f"ours window {scope}" in names
        assert f"ours window {scope} in cells of 4" in names


@pytest.fixture(scope="module")
def ideal():
    return next(each for each in methods(0.5, "auto") if each.name == "ideal block")


@pytest.fixture(scope="module")
def foretold(model, ideal):
    return forecast(lambda size: Subject(model, 768, size, 1), [ideal])


def test_flops_at_three_sizes_predict_those_at_a_fourth(model, ideal, foretold):
    other = Subject(model, 768, 96, 1)
    flops = []
    for patched in (other.model, ideal.patch(other.model)):
        counter = FlopCounterMode(display=False, custom_mapping=UNLISTED)
        other.run(patched, counter)
        flops.append(counter.get_total_flops())
    assert foretold.unpatched(96) == pytest.approx(flops[0])
    assert foretold.speed_ups(96) == {"ideal block": pytest.approx(flops[0] / flops[1])}


def test_the_flops_of_attention_grow_with_the_square_of_its_tokens(foretold):
    attention = 6 * 2 * 4 * 320  # blocks, samples, two products, channels
    tokens = [(size // 8) ** 2 for size in (512, 1024, 2048)]
    small, middle, large = (foretold.unpatched(size) for size in (512, 1024, 2048))
    bend = (large - middle) / (tokens[2] - tokens[1]) - (middle - small) / (tokens[1] - tokens[0])
    assert bend / (tokens[2] - tokens[0]) == pytest.approx(attention, rel=1e-6)


def test_peak_memory_counts_what_is_held_at_one_time():
    meter = PeakMemory(CPU)
    with meter:
        first = torch.empty(10**6)
        del first
        second, third = torch.empty(10**6), torch.empty(2 * 10**6)
        del second
        fourth = torch.empty(10**5)
    assert meter.bytes == pytest.approx(12e6, rel=1e-3)
    assert third.shape != fourth.shape


def test_launches_are_operators_except_views():
    x = torch.randn(4, 4)
    counter = Launches(CPU)
    with counter:
        ((x + 1).t() @ x).softmax(1)
    assert counter.count == 3


@pytest.mark.parametrize(
    "options", [*({"scope": each} for each in OPTIONS["scope"].choices), {"kv_ratio": 0.7}]
)
def test_stages_are_timed_separately(subject, options):
    seconds = subject.stages(wrong(WindowStrategy, **options).always().recorded(subject.model))
    assert list(seconds) == ["matching", "merging", "unmerging", "model"]
    assert min(seconds.values()) > 0


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A run of the benchmark that writes to another folder."""
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["bench", "--quick", "--name", "here"])
    return command.Bench(command._arguments())


def test_a_wrong_method_is_named_and_the_others_continue(bench, subject, capsys):
    (good,) = [each for each in methods(0.5, "auto") if each.name == "ours window block"]
    right, refused, launches = bench.check(subject, [wrong(OffByOne), good])
    assert right == [good]
    assert list(refused) == ["wrong"] and "differ from the means" in refused["wrong"]
    assert list(launches) == ["ours window block"]
    assert 0 < launches["ours window block"] < 100
    assert "ERROR: wrong is not timed: its plan merges" in capsys.readouterr().out
    assert bench.finish() == 1


def test_a_comparison_is_written_as_soon_as_it_is_made(bench, model, tmp_path, capsys):
    subject = Subject(model, 768, 128, 1)
    names = ("ideal block", "core TomePatchModel", "tomesd all", "ours window block")
    chosen = [each for each in methods(0.5, "auto") if each.name in names]
    run = bench.compare(subject, chosen, 2)
    assert list(run["methods"]) == ["unpatched", *names]
    assert all(len(row["seconds"]) == 2 for row in run["methods"].values())
    assert all(row["peak_bytes"] > 0 for row in run["methods"].values())
    assert run["methods"]["ours window block"]["merged"] == "6/6"
    assert 0 < run["methods"]["ours window block"]["error"] < 1
    details = {"model": "sd15", "note": "", "size": 128, "batch": 2, "dtype": "float32"}
    bench.keep(run | details | {"forecast": {}})
    assert json.loads((tmp_path / "here.json").read_text())["runs"] == bench.result["runs"]
    assert figures.table(bench.result["runs"][0]) in (tmp_path / "here.md").read_text()
    assert bench.finish() == 0
    assert capsys.readouterr().out.splitlines()[-1] == figures.summary(bench.result)
    assert bench.device == CPU


@pytest.mark.parametrize(
    "arguments", [["--size", "500"], ["--ratio", "0.6"], ["--batch", "0"], ["--model", "flux"]]
)
def test_invalid_arguments_are_refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    with pytest.raises(SystemExit):
        command._arguments()
    assert f"{arguments[0]}" in capsys.readouterr().err


def test_methods_are_chosen_by_name_with_their_ideals():
    chosen_methods = command.chosen_methods
    every = methods(0.5, "auto")
    assert chosen_methods(every, ["all"]) == every
    headline = chosen_methods(every, ["headline"])
    assert 0 < len(headline) < len(every) and all(each.headline for each in headline)
    names = [each.name for each in chosen_methods(every, ["ours window k,v", "tomesd all"])]
    assert names == ["ideal all", "tomesd all", "ours window k,v"]
    with pytest.raises(
        SystemExit, match="there is no tomes; it must be all, headline, or some of ideal"
    ):
        chosen_methods(every, ["tomes"])


def test_merging_keys_launches_few_kernels():
    # Triton must not interpret the kernels.
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.host_time", "--quick"],
        cwd=Path(command.__file__).parents[1],
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    launches = float(re.search(r"^summary: host_ms_sd15=\S+ .* launches=(\S+)$", told, re.M)[1])
    # Matching, merging, weighing, and taking the further channels off: one each. One more for all.
    assert launches == 4.2
