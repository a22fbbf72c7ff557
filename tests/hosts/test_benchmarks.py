"""The arithmetic and the checks of the benchmark, without measurements."""

import json
from dataclasses import replace

import pytest
import torch
from common import relative_error

from benchmarks.rounds import interleaved
from benchmarks.speed import __main__ as command
from benchmarks.speed import checks, figures, report, unets
from benchmarks.speed.measure import Operators, PeakMemory, Subject
from benchmarks.speed.methods import HostMethod, methods
from benchmarks.speed.record import Record
from tome_nodes.merging.plan import SlotPlan
from tome_nodes.settings.config import ToMeConfig
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
        "attention": "flash",
        "compiled": False,
        "refused": {},
        "methods": {name.replace("_", " "): each for name, each in rows.items()},
    }


SLOW = run(
    unpatched=row("unpatched", 10.0, 20.0),
    ideal_attn=row("ideal", 9.0, 18.0, ideal="ideal attn"),
    ideal_stack=row("ideal", 5.0, 10.0, ideal="ideal stack"),
    core_TomePatchModel=row("peer", 8.0, 16.0),
    tomesd_attn=row("peer", 7.5, 15.0, ideal="ideal attn"),
    tomesd_all=row("peer", 12.0, 24.0),
    ours_window_attn=row("ours", 9.2, 18.4, ideal="ideal attn", launches_per_block=3.0),
    ours_window_stack=row("ours", 6.0, 12.0, ideal="ideal stack", launches_per_block=2.0),
    ours_other_attn=row("ours", 1.0, 2.0),
)
NO_GAIN = run(
    unpatched=row("unpatched", 1.0, 1.0),
    ideal_stack=row("ideal", 0.96, 0.96, ideal="ideal stack"),
    ours_window_stack=row("ours", 1.25, 1.25, ideal="ideal stack", launches_per_block=9.0),
)


def test_shares_are_taken_within_a_round():
    rounds = run(
        unpatched=row("unpatched", 1.0, 10.0, 1.0), ours=row("ours", 0.5, 5.0, 0.8, ideal=None)
    )
    assert figures.share_of_time(rounds, "ours") == 0.5
    assert figures.speed_up(rounds, "ours") == 2


def test_the_worst_case_is_that_of_the_best_scope_in_each_run():
    found = {"efficiency": 0.8, "vs_unpatched": 10 / 6, "vs_tomesd": 1.25, "vs_core": 4 / 3}
    assert figures.worst_case([SLOW]) == pytest.approx(found | {"launches": 2.0})
    found["vs_unpatched"] = 0.8
    assert figures.worst_case([SLOW, NO_GAIN]) == pytest.approx(found | {"launches": 9.0})
    assert figures.worst_case([]) == {}


def test_a_page_shows_everything(tmp_path):
    record = Record("hand", "none", tmp_path, 1, "cpu")
    record.result |= {
        "runs": [SLOW | {"refused": {"tomesd stack": "it is wrong"}}],
        "left_out": ["2048x2048"],
        "failed": {"sdxl": "no memory"},
    }
    text = figures.joined(report.section(record.result))
    for part in (
        "| ours window stack   |",
        "1.67",
        "Not timed: tomesd stack: it is wrong",
        "No time for: 2048x2048",
        "Failed: sdxl: no memory",
        figures.table(SLOW),
    ):
        assert part in text
    assert len({len(line) for line in figures.table(SLOW).splitlines()}) == 1


def test_every_other_round_is_reversed():
    order = []
    runs = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert interleaved(runs, 2) == {"a": [1, 4], "b": [2, 3]}
    assert order == ["a", "b", "b", "a"]


@pytest.fixture(scope="module")
def subject(sd15_of):
    return Subject(sd15_of(1), 32, 64)


@pytest.fixture(scope="module")
def expected(subject):
    return checks.unpatched_output(subject)


@pytest.mark.parametrize("method", methods(0.5, "auto", CPU), ids=lambda method: method.name)
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

    def plan(self, features, grid, ratio):
        plan = super().plan(features, grid, ratio)
        return replace(plan, order=(plan.order + 1) % (features.shape[0] * grid.tokens))


class TooMany(WindowStrategy):
    """Merges more tokens than it is asked to."""

    def plan(self, features, grid, ratio):
        return super().plan(features, grid, 0.7)


class EmptySlot(WindowStrategy):
    """Has a slot without a token."""

    def plan(self, features, grid, ratio):
        plan = super().plan(features, grid, ratio)
        return SlotPlan.from_slots(plan.slots(), plan.slot_count + 1)


class Nothing(WindowStrategy):
    """Merges no map of a model."""

    def plan(self, features, grid, ratio):
        return super().plan(features, grid, ratio) if features.shape[2] < 32 else None


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (OffByOne, "differ from the means"),
        (TooMany, "ratio=0.6 asks for 615"),
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


@pytest.mark.parametrize("scope", ["module", "stack"])
def test_wrong_wiring_is_refused_in_every_scope(scope, subject, expected, monkeypatch):
    merge, merge_inputs = SlotPlan.merge, SlotPlan.merge_inputs
    monkeypatch.setattr(SlotPlan, "merge", lambda self, x: merge(self, x) * 1.01)
    monkeypatch.setattr(
        SlotPlan, "merge_inputs", lambda self, x: [y * 1.01 for y in merge_inputs(self, x)]
    )
    with pytest.raises(checks.WrongOutput, match="lossless plans"):
        checks.check_wiring(wrong(WindowStrategy, scope=scope), subject, expected)


def test_outputs_that_are_not_finite_are_refused():
    plain = torch.ones(2, 3)
    assert checks.difference(plain * 1.5, plain) == pytest.approx(0.5)
    with pytest.raises(checks.WrongOutput, match="not finite"):
        checks.difference(plain * float("nan"), plain)
    with pytest.raises(checks.WrongOutput, match=r"\(3, 2\), not \(2, 3\)"):
        checks.difference(plain.mT, plain)


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
    counter = Operators()
    with counter:
        ((x + 1).t() @ x).softmax(1)
    assert counter.count == 3


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Runs the command line in another folder, and returns its exit code and its files."""
    monkeypatch.setattr(command, "RESULTS", tmp_path)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["bench", *arguments, "--name", "here"])
        code = command.main()
        files = {each.suffix: each.read_text() for each in tmp_path.glob("here.*")}
        return code, json.loads(files[".json"]), files[".md"]

    return run


def test_a_comparison_is_timed_and_written(written, capsys, monkeypatch):
    monkeypatch.setattr(unets, "ROUNDS", (1, 1))
    names = ("ideal stack", "core TomePatchModel", "tomesd attn", "ours window stack")
    cases = [replace(case, methods=names) for case in unets.QUICK_CASES]
    monkeypatch.setattr(unets, "QUICK_CASES", cases)
    code, result, page = written("--quick", "--model", "sd15", "--size", "128")
    (run,) = result["runs"]
    assert list(run["methods"]) == ["unpatched", *names]
    for row in run["methods"].values():
        assert len(row["seconds"]) == 1 and row["peak_bytes"] > 0
    assert run["methods"]["ours window stack"]["merged"] == "6/6"
    assert 0 < run["methods"]["ours window stack"]["launches_per_block"] < 100
    assert 0 < run["methods"]["ours window stack"]["error"] < 1
    assert figures.table(run) in page
    assert capsys.readouterr().out.splitlines()[-1] == result["summary"]
    assert code == 0
