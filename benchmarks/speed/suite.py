"""The tests of kernels, hosts and transformers, each file in a process of its own.

A kernel that writes outside its memory breaks everything after it in the same process.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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
_OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
"""What pytest's report calls outcomes other than passing, and what they are called here."""


def run(record: Record) -> int:
    """Run the files side by side until the limit."""
    result = record.result
    result |= {"files": [], "outcomes": dict.fromkeys(("passed", "failed", "skipped"), 0)}
    suites = DRY_SUITES if record.is_dry else SUITES
    at_once = 1 if record.is_dry else max(1, min(8, (os.cpu_count() or 2) // 2))
    threads = ThreadPoolExecutor(at_once)
    try:
        for each in as_completed([threads.submit(_run, suite, record) for suite in suites]):
            name, ran = each.result()
            if ran is None:
                result["left_out"].append(name)
            else:
                _keep(record, name, *ran)
    finally:
        threads.shutdown(cancel_futures=True)
    return record.finish({**result["outcomes"], "files": len(result["files"])})


def _run(suite: Sequence[str], record: Record) -> tuple[str, tuple[Any, ...] | None]:
    """Run a file; its name and, if there was time, its row, its failures and its output."""
    name = " ".join(suite)
    if record.left < _LEAST_SECONDS:
        return name, None
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=short"]
    began, code = time.monotonic(), None
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        with log.open("wb") as output, suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                [*command, "--show-capture=no", f"--junitxml={report}", *suite],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=record.left,
            ).returncode
        tests = [*ElementTree.parse(report).iter("testcase")] if report.exists() else []
        text = log.read_text(encoding="utf-8", errors="replace")
    row: dict[str, Any] = {"file": name, "seconds": time.monotonic() - began, "exit_code": code}
    row |= dict.fromkeys(record.result["outcomes"], 0)
    failures = {}
    for test in tests:
        said = {_OUTCOMES[part.tag]: part.text for part in test if part.tag in _OUTCOMES}
        row[next(iter(said), "passed")] += 1
        if "failed" in said:
            failures[f"{test.get('classname')}::{test.get('name')}"] = said["failed"]
    if code != 0 and not failures:
        failures[name] = f"{'cut off' if code is None else f'exit code {code}'}\n{text[-2000:]}"
    return name, (row, failures, text)


def _keep(
    record: Record, name: str, row: dict[str, Any], failures: Mapping[str, str], log: str
) -> None:
    """Add a file to the result."""
    record.result["files"].append(row)
    record.result["failed"] |= failures
    for outcome in record.result["outcomes"]:
        record.result["outcomes"][outcome] += row[outcome]
    record.log(f"== {name}\n{log}\n")
    record.write()
    say(f"{row}; {record.left:.0f} s left")
