"""Run the steps of the set-up: quiet on success, with the output on failure."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.errors import ToolError

ADVICE = """\
The reason is above. If it is the network, a proxy or a full disk, mend that and run this again. \
If a package does not support this Python on this system, delete .venv and run this with another, \
3.10 or later."""


class SetupError(ToolError):
    """The set-up could not be completed; the message says why and what to do.

    Attributes:
        status: the exit status of the step that failed, negative if it was killed.
    """

    status = 0


def run(
    step: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
) -> None:
    """Run `command` as a step of the set-up; its output is shown only if it fails."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        with timed(step):
            status = subprocess.run(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            ).returncode
        if status == 0:
            return
        log.seek(0)
        output = log.read().strip()
    error = SetupError(f"{output}\n\n{step}: failed with exit code {status}. {ADVICE}")
    error.status = status
    raise error


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Print a step and, at its end, its duration."""
    start = time.monotonic()
    print(f"{step} ...", end="", flush=True)
    try:
        yield
    finally:
        print(f" {time.monotonic() - start:.1f} s", flush=True)


def succeeds(command: Sequence[str | Path]) -> bool:
    """Whether `command` can be run and exits with 0."""
    try:
        result = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0
