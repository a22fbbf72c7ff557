"""A pytest plugin that writes each outcome to a file as it comes, and the GPU memory used.

The file is named by the environment variable :data:`FILE`.
"""

import json
import os
from pathlib import Path
from typing import Any

FILE = "TOME_NODES_OUTCOMES"
MOST_CHARACTERS = 3000
"""The longest traceback of a failure that is kept; its end says most."""


class Outcomes:
    """Writes lines of JSON."""

    def __init__(self, config: Any):
        # If tests run side by side, only the process that collects the reports has no input.
        self._writes_reports = not hasattr(config, "workerinput")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the outcome of a test, and of its set-up and tear-down if they fail or skip."""
        if self._writes_reports and (report.when == "call" or not report.passed):
            why = "" if report.passed else str(report.longrepr)[-MOST_CHARACTERS:]
            self._write(
                test=report.nodeid, outcome=report.outcome, seconds=report.duration, why=why
            )

    def pytest_sessionfinish(self) -> None:
        """Write the most bytes that this process had on the GPU."""
        import torch

        is_there = torch.cuda.is_available()
        self._write(gpu_bytes=torch.cuda.max_memory_allocated() if is_there else 0)

    def _write(self, **line: object) -> None:
        with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config: Any) -> None:
    """Take part."""
    config.pluginmanager.register(Outcomes(config))
