"""Which lane of the tests a command line needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tools.environment import ROOT

TESTS = ROOT / "tests"
UNIT_TESTS = TESTS / "unit"

# The next argument is the option's, and may look like a test's path.
TAKES_A_VALUE = ("-k", "-m", "--deselect", "--ignore", "--ignore-glob")


def chosen_paths(pytest_arguments: Sequence[str]) -> list[Path]:
    """The files and folders of tests that pytest is told to run; none means all."""
    paths = []
    for before, argument in zip(["", *pytest_arguments], pytest_arguments, strict=False):
        path = Path(os.path.normpath(ROOT / argument.partition("::")[0]))
        if before not in TAKES_A_VALUE and path.is_relative_to(TESTS):
            paths.append(path)
    return paths


def needs_comfyui(pytest_arguments: Sequence[str]) -> bool:
    """Whether any test would run that is not in `tests/unit`, whose tests need only PyTorch."""
    paths = chosen_paths(pytest_arguments)
    return not paths or not all(path.is_relative_to(UNIT_TESTS) for path in paths)
