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
from tools import carried
from tools.environment import ROOT, comfyui_directory

pytestmark = pytest.mark.newest_only


def dry_record(number, folder, minutes=8.5):
    return Record(f"gpu-{number}", "gpu", folder, minutes, "cpu", is_dry=True)


def written(folder, number):
    return json.loads((folder / f"gpu-{number}.json").read_text())


def run_command(*command, **environment):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def dry_run(number, folder, *arguments):
    """The lines and the result of a command, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # dev.py would first bring the environment up to date, unless what it needs is carried.
    command = ["dev.py", "gpu"] if "--carried" in arguments else ["-m", "benchmarks.speed.gpu"]
    command += [str(number), "--dry", "--out", str(folder), *arguments]
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
    (dry,) = unets.DRY_CASES
    few = "ideal attn", "HyperTile", "ours window attn", "preset fast"
    assert unets.run(dry_record(2, tmp_path), [replace(dry, methods=few)]) == 0
    result = written(tmp_path, 2)
    assert result["checks"]["sd15"] == dict.fromkeys(few, "right")
    (first,) = result["runs"]
    assert first["methods"].keys() == {"unpatched", *few}
    for row in first["methods"].values():
        assert row["seconds"][0] > 0 and row["peak_bytes"] > 0 and row["launches"] > 0
    assert first["methods"]["ours window attn"]["merged"] == "6/6"
    assert "| sd15, 128x128 " in report.page({2: result})


def test_transformers_are_measured_from_a_carried_folder(tmp_path):
    folder = tmp_path / "carried"
    folder.mkdir()
    carried.pack_comfyui(comfyui_directory(), folder / carried.ARCHIVE)
    assert (folder / carried.ARCHIVE).stat().st_size < 16 * 2**20
    result = dry_run(3, tmp_path / "out", "--carried", str(folder))
    (row,) = result["whole_runs"]
    assert {*row["methods"]} == {"unpatched", "the defaults", "keys 0.6", "keys 0.75", "6 steps"}
    assert "A run of tiny Z-Image, 320x256, 8 steps of euler" in report.page({3: result})


def test_compiled_unets_are_measured(tmp_path, monkeypatch, fresh_compiler):
    # In the process of the tests, which has ComfyUI already.
    monkeypatch.setattr(compiled, "process_on", lambda device: ThreadPool(1))
    (dry,) = compiled.DRY_CASES
    assert compiled.run(dry_record(4, tmp_path), [replace(dry, size=128)]) == 0
    result = written(tmp_path, 4)
    (row,) = result["compiled"]
    modes = itertools.product(("unpatched", "balanced"), ("eager", "compiled"))
    assert [*row["ways"]] == [", ".join(mode) for mode in modes]
    assert row["ways"]["balanced, compiled"]["merged"] == "6/6"
    for name, way in row["ways"].items():
        assert way["seconds"][0] > 0 and way["launches"] > 0 and way["error"] < 1e-5
        # In one process, the counters are those of both models.
        assert ("eager" in name) or (way["graphs"] >= 1 and way["breaks"] == 0)
    assert "### sd15 (first level only), 128x128, compiled" in report.page({4: result})


def test_what_fails_in_another_process_is_said(tmp_path):
    (dry,) = compiled.DRY_CASES
    record = dry_record(4, tmp_path, minutes=2)
    assert compiled.run(record, [replace(dry, methods=("slow",))]) == 1
    (name, why), *others = written(tmp_path, 4)["failed"].items()
    assert (name, others) == ("reduced sd15, 224x224: slow, compiled", [])
    assert why.startswith("OptionError: preset='slow' is not allowed")


def test_without_a_gpu_there_is_a_message(tmp_path):
    command = ("-m", "benchmarks.speed.gpu", "2", "--out", str(tmp_path))
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
    assert run(late) == 0
    result = written(tmp_path, number)
    assert result["left_out"] and not result["failed"]
    assert f"left_out={len(result['left_out'])}" in result["summary"]
    assert f"No time for: {result['left_out'][0]}" in report.page({number: result})


def test_a_failure_is_kept_and_the_others_go_on(tmp_path):
    record = dry_record(2, tmp_path)

    def fails():
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    assert record.attempt("broken", 1.0, fails) is None
    assert record.attempt("whole", 1.0, lambda: 1) == 1
    assert record.finish({"whole": 1}) == 1
    result = written(tmp_path, 2)
    assert result["failed"] == {"broken": "RuntimeError: CUDA error: an illegal memory access"}
    assert result["summary"] == "summary: whole=1 failed=1 left_out=0"
