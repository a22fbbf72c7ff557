"""The four commands for a GPU go through their motions on the CPU, and stop where they have to."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from multiprocessing.pool import ThreadPool
from xml.etree import ElementTree

import pytest

from benchmarks.speed import compiled, report, suite, transformers, unets
from benchmarks.speed.record import Record
from tools.environment import ROOT

pytestmark = pytest.mark.newest_only


def dry_record(number, folder, minutes=8.5):
    return Record(f"gpu-{number}", "gpu", folder, minutes, "cpu", is_dry=True)


def written(folder, number):
    return json.loads((folder / f"gpu-{number}.json").read_text())


def run_command(*command, **environment):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def dry_run(number, folder):
    """The lines and the result of a command, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = ["-m", "benchmarks.speed", str(number), "--dry", "--out", str(folder)]
    ended = run_command(*command, **clean)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if number == 1:
        return None
    result = written(folder, number)
    assert ended.stdout.splitlines()[-1] == result["summary"]
    assert (result["failed"], result["left_out"]) == ({}, [])
    return result


def test_the_tests_run(tmp_path):
    assert all((ROOT / file).is_file() for file in suite.FILES)
    dry_run(1, tmp_path)
    (suites,) = ElementTree.parse(tmp_path / "gpu-1.xml").getroot()
    counts = {name: suites.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "1", "failures": "0", "errors": "0", "skipped": "0"}


def test_tests_are_cut_off_at_the_limit(capsys):
    assert suite.run(None, 0, is_dry=True) == 1
    assert capsys.readouterr().out == "cut off after 0 minutes\n"


def test_unets_are_measured(tmp_path):
    record = dry_record(2, tmp_path)
    unets.run(record, unets.DRY_CASES)
    assert record.finish() == 0
    result = written(tmp_path, 2)
    (comparison,) = result["comparisons"]
    rows = comparison["rows"]
    names = ["unpatched", "balanced", "fast", "core TomePatchModel", "tomesd", "ToDo", "HyperTile"]
    assert [*rows] == names
    for row in rows.values():
        assert row["seconds"][0] > 0 and row["launches"] > 0
    assert rows["tomesd"]["merged"] == "6/6"
    assert "### reduced sd15, 128x128\n\n| method " in report.page([result])
    assert "reduced_sd15_128x128_balanced=" in result["summary"]


def test_transformers_are_measured(tmp_path):
    result = dry_run(3, tmp_path)
    (comparison,) = result["comparisons"]
    assert [*comparison["rows"]] == ["unpatched", "balanced", "keys 0.6", "keys 0.75", "6 steps"]
    assert comparison["case"] == "tiny Z-Image, 320x256, 3 blocks, 8 steps"


def test_compiled_unets_are_measured(tmp_path, monkeypatch, fresh_compiler):
    # In the process of the tests, which has ComfyUI already.
    monkeypatch.setattr(compiled, "process_on", lambda device: ThreadPool(1))
    (dry,) = compiled.DRY_CASES
    record = dry_record(4, tmp_path)
    compiled.run(record, [replace(dry, size=128)])
    assert record.finish() == 0
    result = written(tmp_path, 4)
    (comparison,) = result["comparisons"]
    assert comparison["case"] == "reduced sd15, 128x128, compiled"
    modes = itertools.product(("unpatched", "balanced"), ("eager", "compiled"))
    assert [*comparison["rows"]] == [", ".join(mode) for mode in modes]
    assert comparison["rows"]["balanced, compiled"]["merged"] == "6/6"
    for name, row in comparison["rows"].items():
        assert row["seconds"][0] > 0 and row["launches"] > 0 and row["error"] < 1e-5
        # In one process, the counters are those of both models.
        assert ("eager" in name) or (row["graphs"] >= 1 and row["breaks"] == 0)


def test_what_fails_in_another_process_is_said(tmp_path):
    (dry,) = compiled.DRY_CASES
    record = dry_record(4, tmp_path, minutes=2)
    compiled.run(record, [replace(dry, methods=("slow",))])
    assert record.finish() == 1
    (name, why), *others = written(tmp_path, 4)["failed"].items()
    assert (name, others) == ("reduced sd15, 224x224, compiled: slow, compiled", [])
    assert "OptionError: preset='slow' is not allowed" in why


def test_without_a_gpu_there_is_a_message(tmp_path):
    command = ("-m", "benchmarks.speed", "2", "--out", str(tmp_path))
    ended = run_command(*command, **os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert (ended.returncode, ended.stderr) == (2, "")
    assert "--dry" in ended.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("run", "number"),
    [
        (partial(unets.run, cases=unets.CASES), 2),
        (partial(transformers.run, runs=transformers.RUNS), 3),
    ],
    ids=["unets", "transformers"],
)
def test_nothing_begins_after_the_limit(run, number, tmp_path):
    late = dry_record(number, tmp_path, minutes=0)
    run(late)
    assert late.finish() == 0
    result = written(tmp_path, number)
    assert result["left_out"] and not result["failed"]
    assert f"left_out={len(result['left_out'])}" in result["summary"]
    assert f"No time for: {result['left_out'][0]}" in report.page([result])


def test_a_failure_is_kept_and_the_others_go_on(tmp_path):
    record = dry_record(2, tmp_path)

    def fails():
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    record.compare("broken", 1.0, fails)
    record.compare("whole", 1.0, lambda: {"balanced": {"seconds": [1.0]}})
    assert record.finish() == 1
    result = written(tmp_path, 2)
    assert result["failed"] == {"broken": "RuntimeError: CUDA error: an illegal memory access"}
    assert [comparison["case"] for comparison in result["comparisons"]] == ["whole"]
    assert result["summary"] == "summary: failed=1 left_out=0"
