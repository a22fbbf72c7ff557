"""Run the steps of the set-up: quiet on success, with the output on failure."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.errors import ToolError

NETWORK_SYMPTOMS = (
    *("NewConnectionError", "ConnectTimeout", "ReadTimeout", "NameResolutionError", "ProxyError"),
    *("Temporary failure in name resolution", "Network is unreachable", "Connection refused"),
    *("Connection reset", "getaddrinfo"),
)

NO_PACKAGE = "No matching distribution found"
DISK_FULL = ("No space left on device", "not enough space on the disk")


class SetupError(ToolError):
    """The set-up could not be completed; the message says why and what to do."""


class FetchError(SetupError):
    """Something could not be fetched; nothing has changed."""


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
    failed_to_fetch = _has(output, (*NETWORK_SYMPTOMS, NO_PACKAGE)) and not _has(output, DISK_FULL)
    failure = FetchError if failed_to_fetch else SetupError
    raise failure(f"{output}\n\n{step}: failed with exit code {status}. {_advice(output)}")


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


def _advice(output: str) -> str:
    if _has(output, DISK_FULL):
        return "The disk is full: free some space and run this again."
    if _has(output, NETWORK_SYMPTOMS):
        return (
            "The network could not be reached: check the connection and the proxy settings, "
            "and run this again."
        )
    if _has(output, (NO_PACKAGE,)):
        version = ".".join(map(str, sys.version_info[:3]))
        return (
            "Either the package index could not be reached, so check the network and pip's "
            f"settings; or the package does not support Python {version} on this system, so "
            "delete .venv and run this with another Python, 3.10 or later."
        )
    return "The reason is above; fix it and run this again."


def _has(output: str, symptoms: Sequence[str]) -> bool:
    return any(symptom in output for symptom in symptoms)
