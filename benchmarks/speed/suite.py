"""The tests of kernels, hosts and transformers, each file in a process of its own.

A kernel that writes outside its memory breaks everything after it in the same process.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.speed.outcomes import FILE
from benchmarks.speed.record import Record, say
from tools.environment import ROOT

SUITES: Sequence[Sequence[str]] = (
    ("tests/unit/test_kernels.py", "-n", "4"),
    ("tests/hosts/test_comfyui.py", "-n", "4"),
    ("tests/hosts/test_transformers.py", "-n", "4"),
    ("tests/hosts/test_diffusers.py", "-n", "4"),
    ("tests/hosts/test_diffusers_forecasts.py", "-n", "4"),
    ("tests/hosts/test_kernels_in_models.py",),
    ("tests/hosts/test_attention.py",),
    ("tests/hosts/test_ldm.py",),
    ("tests/hosts/test_faults.py",),
    ("tests/hosts/test_comfyui_neighbours.py",),
    ("tests/hosts/test_presets.py",),
    ("tests/hosts/test_drop_in.py",),
    ("tests/hosts/test_recording.py",),
    ("tests/hosts/test_report.py",),
    ("tests/hosts/test_host_checks.py",),
)
"""Arguments of pytest. What takes longest comes first, since files run side by side."""

DRY_SUITES: Sequence[Sequence[str]] = (
    ("-k", "weighed_attention_launches", *(suite[0] for suite in SUITES)),
)
"""Runs one test and imports all files."""

_LEAST_SECONDS = 20.0


def run(record: Record) -> int:
    """Run the files side by side until the limit. Those that are cut off keep what they have."""
    record.result |= {"files": [], "outcomes": {}}
    suites = DRY_SUITES if record.is_dry else SUITES
    at_once = 1 if record.is_dry else max(1, min(8, (os.cpu_count() or 2) // 2))
    threads = ThreadPoolExecutor(at_once)
    try:
        for each in as_completed([threads.submit(_run, suite, record) for suite in suites]):
            if (ran := each.result()) is not None:
                _keep(record, *ran)
    finally:
        threads.shutdown(cancel_futures=True)
    outcomes = record.result["outcomes"]
    silent = [row["file"] for row in record.result["files"] if not row["gpu_bytes"]]
    return record.finish(
        {
            "passed": outcomes.get("passed", 0),
            "skipped": outcomes.get("skipped", 0),
            "files": len(record.result["files"]),
            "on_cpu": len(silent),
        }
    )


def _run(
    suite: Sequence[str], record: Record
) -> tuple[dict[str, Any], list[dict[str, Any]], str] | None:
    """Run a file and return its row, its tests and its output; None if there is no time."""
    name = " ".join(suite)
    if record.left < _LEAST_SECONDS:
        record.result["left_out"].append(name)
        return None
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.speed.outcomes"]
    command += ["-p", "no:cacheprovider", "-q", "--tb=short", "--show-capture=no", *suite]
    began, code = time.monotonic(), None
    with tempfile.TemporaryDirectory() as folder:
        written, log = Path(folder, "lines"), Path(folder, "log")
        written.touch()
        environment = {**os.environ, FILE: str(written)}
        with log.open("wb") as output, suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=record.left,
            ).returncode
        lines = [json.loads(line) for line in written.read_text().splitlines()]
        text = log.read_text(encoding="utf-8", errors="replace")
    tests = [line for line in lines if "test" in line]
    row = {
        "file": name,
        "seconds": time.monotonic() - began,
        "exit_code": code,
        "gpu_bytes": max((line["gpu_bytes"] for line in lines if "gpu_bytes" in line), default=0),
        **Counter(line["outcome"] for line in tests),
    }
    return row, tests, text


def _keep(record: Record, row: dict[str, Any], tests: list[dict[str, Any]], log: str) -> None:
    """Add the outcomes of a file to the result."""
    result, name, code = record.result, row["file"], row["exit_code"]
    result["files"].append(row)
    for test in tests:
        outcome = test["outcome"]
        result["outcomes"][outcome] = result["outcomes"].get(outcome, 0) + 1
        if outcome == "failed":
            result["failed"][test["test"]] = test["why"]
    if code != 0 and "failed" not in row:
        why = "cut off" if code is None else f"exit code {code}"
        result["failed"][name] = f"{why}\n{log[-2000:]}"
    record.log(f"== {name}\n{log}\n")
    record.write()
    say(f"{row}; {record.left:.0f} s left")
