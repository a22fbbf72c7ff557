"""The benchmark's arithmetic and checks; its commands for a GPU go through their motions here."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from common import relative_error

from benchmarks.rounds import interleaved
from benchmarks.speed import __main__ as command
from benchmarks.speed import checks, figures, report, suite, transformers, unets
from benchmarks.speed.measure import Subject
from benchmarks.speed.methods import HostMethod, methods
from benchmarks.speed.record import Record
from tome_nodes.merging.plan import SlotPlan
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies.window import WindowStrategy
from tools import carried
from tools.environment import ROOT, comfyui_directory

pytestmark = pytest.mark.newest_only

CPU = torch.device("cpu")


def rows_of(**seconds):
    """A comparison by hand, by name: the family, its ideal, launches and seconds of two rounds."""
    return {
        "methods": {
            name.replace("_", " "): {
                **{"family": family, "ideal": ideal, "launches_per_block": launches},
                **{"seconds": [first, 2 * first], "error": 0.1, "peak_bytes": 10**6},
            }
            for name, (family, ideal, launches, first) in seconds.items()
        }
    }


SLOW = rows_of(
    unpatched=("unpatched", None, 0, 10.0),
    ideal_attn=("ideal", "ideal attn", 0, 9.0),
    ideal_stack=("ideal", "ideal stack", 0, 5.0),
    core_TomePatchModel=("peer", None, 0, 8.0),
    tomesd_attn=("peer", "ideal attn", 0, 7.5),
    tomesd_all=("peer", None, 0, 12.0),
    ours_window_attn=("ours", "ideal attn", 3.0, 9.2),
    ours_window_stack=("ours", "ideal stack", 2.0, 6.0),
    ours_other_attn=("ours", None, 0, 1.0),
)
NO_GAIN = rows_of(
    unpatched=("unpatched", None, 0, 1.0),
    ideal_stack=("ideal", "ideal stack", 0, 0.96),
    ours_window_stack=("ours", "ideal stack", 9.0, 1.25),
)


def test_the_worst_case_is_that_of_the_best_scope_in_each_run():
    found = {"efficiency": 0.8, "vs_unpatched": 10 / 6, "vs_tomesd": 1.25, "vs_core": 4 / 3}
    assert figures.worst_case([SLOW]) == pytest.approx(found | {"launches": 2.0})
    found["vs_unpatched"] = 0.8
    assert figures.worst_case([SLOW, NO_GAIN]) == pytest.approx(found | {"launches": 9.0})
    assert figures.worst_case([]) == {}


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
    def plan(self, features, grid, ratio):
        plan = super().plan(features, grid, ratio)
        return replace(plan, order=(plan.order + 1) % (features.shape[0] * grid.tokens))


def test_a_wrong_plan_is_refused():
    with pytest.raises(checks.WrongOutput, match="differ from the means"):
        checks.check_plan(wrong(OffByOne), CPU, torch.float32)


@pytest.mark.parametrize("scope", ["module", "stack"])
def test_wrong_wiring_is_refused_in_every_scope(scope, subject, expected, monkeypatch):
    merge, merge_inputs = SlotPlan.merge, SlotPlan.merge_inputs
    monkeypatch.setattr(SlotPlan, "merge", lambda self, x: merge(self, x) * 1.01)
    monkeypatch.setattr(
        SlotPlan, "merge_inputs", lambda self, x: [y * 1.01 for y in merge_inputs(self, x)]
    )
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


def dry_record(number, folder, minutes=8.5):
    return Record(f"gpu-{number}", "gpu", folder, minutes, "cpu", is_dry=True)


def written(folder, number):
    return json.loads((folder / f"gpu-{number}.json").read_text())


def command_of(*command, **environment):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def dry_run(number, folder, *arguments):
    """The lines and the result of a command, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # dev.py would first bring the environment up to date, unless what it needs is carried.
    command = ["dev.py", "gpu"] if "--carried" in arguments else ["-m", "benchmarks.speed.gpu"]
    command += [str(number), "--dry", "--out", str(folder), *arguments]
    ended = command_of(*command, **clean)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = written(folder, number)
    assert ended.stdout.splitlines()[-1] == result["summary"]
    assert (result["failed"], result["left_out"]) == ({}, [])
    return result


def test_the_tests_run_and_all_can_be_collected(tmp_path):
    result = dry_run(1, tmp_path)
    assert result["outcomes"] == {"passed": 1}
    (row,) = result["files"]
    assert row["exit_code"] == 0
    assert all(each[0] in row["file"] for each in suite.SUITES)
    assert "test_kernels.py" in report.page({1: result})


def test_unets_are_measured_in_each_way(tmp_path):
    result = dry_run(2, tmp_path)
    assert set(result["checks"]["sd15"].values()) == {"right"}
    first, second = result["runs"]
    assert (second["attention"], second["compiled"]) == ("cudnn", True)
    assert second["methods"].keys() == {"unpatched", "preset balanced"}
    assert first["methods"].keys() == {"unpatched", *unets.ONE_EVALUATION, "preset fast"}
    for row in first["methods"].values():
        assert row["seconds"][0] > 0 and row["peak_bytes"] > 0 and row["launches"] > 0
    assert first["methods"]["preset balanced"]["merged"] == "6/6"
    page = report.page({2: result})
    assert "| sd15, 128x128 " in page and "cudnn first, compiled" in page


def test_transformers_are_measured_from_a_carried_folder(tmp_path):
    folder = tmp_path / "carried"
    folder.mkdir()
    carried.pack_comfyui(comfyui_directory(), folder / carried.ARCHIVE)
    assert (folder / carried.ARCHIVE).stat().st_size < 16 * 2**20
    result = dry_run(3, tmp_path / "out", "--carried", str(folder))
    (row,) = result["whole_runs"]
    assert {*row["methods"]} == {"unpatched", "the defaults", "keys 0.6", "keys 0.75", "6 steps"}
    page = report.page({3: result})
    assert "A run of tiny Z-Image, 320x256, 8 steps of euler" in page


def test_without_a_gpu_there_is_a_message(tmp_path):
    command = ("-m", "benchmarks.speed.gpu", "2", "--out", str(tmp_path))
    ended = command_of(*command, **os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert (ended.returncode, ended.stderr) == (2, "")
    assert "--dry" in ended.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("run", "number"),
    [
        (suite.run, 1),
        (partial(unets.run, cases=unets.CASES), 2),
        (partial(transformers.run, runs=transformers.RUNS), 3),
    ],
    ids=["tests", "unets", "transformers"],
)
def test_nothing_begins_after_the_limit(run, number, tmp_path):
    late = dry_record(number, tmp_path, minutes=0)
    assert run(late) == 0
    result = written(tmp_path, number)
    assert result["left_out"] and not result["failed"]
    assert f"left_out={len(result['left_out'])}" in result["summary"]
    page = report.page({number: result})
    assert f"No time for: {result['left_out'][0]}" in page


def test_a_failure_is_kept_and_the_others_go_on(tmp_path):
    def fails():
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    record = dry_record(2, tmp_path)
    assert record.attempt("broken", 1.0, fails) is None
    assert record.attempt("whole", 1.0, lambda: 1) == 1
    assert record.finish({"whole": 1}) == 1
    result = written(tmp_path, 2)
    assert result["failed"] == {"broken": "RuntimeError: CUDA error: an illegal memory access"}
    assert result["summary"] == "summary: whole=1 failed=1 left_out=0"


def test_tests_that_fail_are_named(tmp_path, monkeypatch):
    file = tmp_path / "test_it.py"
    file.write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 1 == 2\n"
        "def test_left_out(): pytest.skip('not here')\n"
    )
    broken = tmp_path / "test_broken.py"
    broken.write_text("import nothing_of_this_name\n")
    suites = [(str(file),), (str(broken),)]
    monkeypatch.setattr(suite, "DRY_SUITES", suites)
    record = dry_record(1, tmp_path)
    assert suite.run(record) == 1
    assert record.result["outcomes"] == {"passed": 1, "failed": 1, "skipped": 1}
    wrong, imports = record.result["failed"].items()
    assert wrong[0].endswith("test_it.py::test_wrong") and "assert 1 == 2" in wrong[1]
    assert imports[0] == str(broken) and "nothing_of_this_name" in imports[1]
    assert "test_wrong" in (tmp_path / "gpu-1.log").read_text()


def test_the_page_about_gpus_names_every_command_and_file():
    text = Path(ROOT / "benchmarks" / "GPU.md").read_text(encoding="utf-8")
    for part in ("gpu 1", "gpu 2", "gpu 3", "gpu pack", "bench --report", "gpu.md", "--carried"):
        assert part in text
    results = ROOT / "benchmarks" / "results"
    taken = [*results.glob("gpu-*.json")]
    page = (results / "gpu.md").read_text(encoding="utf-8")
    assert ("No figures from a GPU were taken yet." in page) == (not taken)
