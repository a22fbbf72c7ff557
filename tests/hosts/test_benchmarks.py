"""The arithmetic and the checks of the benchmark, without measurements."""

import json
from dataclasses import replace

import pytest
import torch
from common import relative_error

from benchmarks.speed import __main__ as command
from benchmarks.speed import checks, figures, unets
from benchmarks.speed.measure import Subject
from benchmarks.speed.methods import methods, on_host
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies.plan import Plan
from tome_nodes.strategies.window import WindowStrategy

pytestmark = pytest.mark.newest_only

CPU = torch.device("cpu")


def test_efficiency_is_the_share_of_the_ideals_saving():
    seconds = {
        **{"unpatched": [10.0, 20.0], "ideal attn": [9.6, 19.2], "ideal stack": [5.0, 10.0]},
        **{"ours attn": [9.2, 18.4], "ours stack": [6.0, 12.0], "theirs": [8.0, 16.0]},
    }
    ideals = {"ours attn": "ideal attn", "ours stack": "ideal stack"}
    run = {
        "methods": {
            name: {"seconds": each, "ideal": ideals.get(name)} for name, each in seconds.items()
        }
    }
    assert figures.speed_up(run, "theirs") == pytest.approx(1.25)
    assert figures.efficiency(run, "ours stack") == pytest.approx(0.8)
    # There the ideal saves too little.
    assert figures.efficiency(run, "ours attn") is None
    assert figures.efficiency(run, "theirs") is None


@pytest.fixture(scope="module")
def subject(sd15_of):
    return Subject(sd15_of(1), 32, 64)


@pytest.fixture(scope="module")
def expected(subject):
    (output,) = subject.run(subject.model, torch.no_grad())
    return output


@pytest.mark.parametrize("method", methods(0.5, "auto", CPU), ids=lambda method: method.name)
def test_every_method_passes_its_checks(method, subject, expected):
    checks.check_wiring(method, subject, expected)
    checks.check_plan(method, CPU, torch.float32)
    (output,) = subject.run(method.patch(subject.model), torch.no_grad())
    assert 0 <= relative_error(output, expected) < 1


def wrong(strategy, **settings):
    config = ToMeConfig(strategy="window", **settings)
    return on_host("wrong", config, strategy)


class OffByOne(WindowStrategy):
    def plan(self, features, grid, ratio):
        plan = super().plan(features, grid, ratio)
        return replace(plan, order=(plan.order + 1) % (features.shape[0] * grid.tokens))


def test_a_wrong_plan_is_refused():
    with pytest.raises(checks.WrongOutput, match="differ from the means"):
        checks.check_plan(wrong(OffByOne), CPU, torch.float32)


@pytest.mark.parametrize("scope", ["module", "stack"])
def test_wrong_wiring_is_refused_in_every_scope(scope, subject, expected, monkeypatch):
    merge, merge_keys = Plan.merge, Plan.merge_keys
    monkeypatch.setattr(Plan, "merge", lambda self, x: merge(self, x) * 1.01)
    monkeypatch.setattr(Plan, "merge_keys", lambda self, x: [y * 1.01 for y in merge_keys(self, x)])
    with pytest.raises(checks.WrongOutput, match="lossless plans"):
        checks.check_wiring(wrong(WindowStrategy, scope=scope), subject, expected)


def test_a_comparison_is_timed_and_written(tmp_path, capsys, monkeypatch):
    names = ("ideal stack", "core TomePatchModel", "tomesd attn", "ours window stack")
    cases = [replace(case, methods=names) for case in unets.QUICK_CASES]
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(unets, "ROUNDS", (1, 1))
    monkeypatch.setattr(unets, "QUICK_CASES", cases)
    arguments = ["bench", "--quick", "--model", "sd15", "--size", "128", "--name", "here"]
    monkeypatch.setattr("sys.argv", arguments)
    assert command.main() == 0
    result = json.loads((tmp_path / "here.json").read_text())
    (run,) = result["runs"]
    assert list(run["methods"]) == ["unpatched", *names]
    for row in run["methods"].values():
        assert len(row["seconds"]) == 1 and row["peak_bytes"] > 0
    assert run["methods"]["ours window stack"]["merged"] == "6/6"
    assert 0 < run["methods"]["ours window stack"]["launches_per_block"] < 100
    assert 0 < run["methods"]["ours window stack"]["error"] < 1
    assert figures.table(run) in (tmp_path / "here.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == result["summary"]
