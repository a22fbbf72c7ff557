"""The tests of kernels, hosts and transformers, each file in a process of its own.

A kernel that writes where it must not breaks all that comes after it in the same process.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed.outcomes import FILE
from benchmarks.speed.record import Record, say
from tools.environment import ROOT

SUITES: Sequence[Sequence[str]] = (
    ("tests/unit/test_kernels.py", "-n", "4"),
    ("tests/hosts/test_kernels_in_models.py",),
    ("tests/hosts/test_attention.py",),
    ("tests/hosts/test_comfyui.py",),
    ("tests/hosts/test_transformers.py", "-n", "2"),
    ("tests/hosts/test_diffusers.py", "-n", "2"),
    ("tests/hosts/test_faults.py",),
    ("tests/hosts/test_comfyui_neighbours.py",),
    ("tests/hosts/test_ldm.py",),
    ("tests/hosts/test_presets.py",),
    ("tests/hosts/test_recording.py",),
    ("tests/hosts/test_report.py",),
    ("tests/hosts/test_host_checks.py",),
    ("tests/hosts/test_drop_in.py",),
)
"""Arguments of pytest, the most important first."""

DRY_SUITES: Sequence[Sequence[str]] = (
    ("-k", "weighed_attention_launches", *(suite[0] for suite in SUITES)),
)
"""One test, and whether all can be imported."""

_LEAST_SECONDS = 20.0
_TURN_SECONDS = 0.2
_GRACE_SECONDS = 10.0


@dataclass
class _Running:
    name: str
    process: subprocess.Popen[bytes]
    lines: Path
    log: Path
    began: float


def run(record: Record) -> int:
    """Run the files side by side until the limit; those that are cut off keep what they have."""
    record.result |= {"files": [], "outcomes": {}}
    waiting = [*(DRY_SUITES if record.is_dry else SUITES)]
    at_once = 1 if record.is_dry else max(1, min(6, (os.cpu_count() or 2) // 2))
    running: list[_Running] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    suite = waiting.pop(0)
                    if record.left < _LEAST_SECONDS:
                        record.result["left_out"].append(" ".join(suite))
                        continue
                    folder = Path(scratch) / str(len(waiting))
                    folder.mkdir()
                    running.append(_start(suite, folder))
                for each in [*running]:
                    if record.left < 0:
                        _stop(each.process)
                    with suppress(subprocess.TimeoutExpired):
                        each.process.wait(_TURN_SECONDS)
                        running.remove(each)
                        _keep(record, each)
        finally:
            for each in running:
                _stop(each.process)
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


def _start(suite: Sequence[str], folder: Path) -> _Running:
    lines, log = folder / "lines", folder / "log"
    lines.touch()
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.speed.outcomes"]
    command += ["-p", "no:cacheprovider", "-q", "--tb=short", "--show-capture=no", *suite]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, FILE: str(lines)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return _Running(" ".join(suite), process, lines, log, time.monotonic())


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that has not ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _keep(record: Record, ran: _Running) -> None:
    """Take over what the tests of a file did."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in ran.lines.read_text().splitlines()]
    tests = [line for line in lines if "test" in line]
    counts = Counter(line["outcome"] for line in tests)
    code = ran.process.returncode
    row = {
        "file": ran.name,
        "seconds": time.monotonic() - ran.began,
        "exit_code": code,
        "gpu_bytes": max((line["gpu_bytes"] for line in lines if "gpu_bytes" in line), default=0),
        **counts,
    }
    record.result["files"].append(row)
    for name, count in counts.items():
        record.result["outcomes"][name] = record.result["outcomes"].get(name, 0) + count
    for line in tests:
        if line["outcome"] == "failed":
            record.result["failed"][line["test"]] = line["why"]
    log = ran.log.read_text(encoding="utf-8", errors="replace")
    if code != 0 and not counts["failed"]:
        record.result["failed"][ran.name] = f"exit code {code}\n{log[-2000:]}"
    with (record.folder / f"{record.name}.log").open("a", encoding="utf-8") as file:
        file.write(f"== {ran.name}\n{log}\n")
    record.write()
    say(f"{row}; {record.left:.0f} s left")
