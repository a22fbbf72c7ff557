"""Which tests a command line selects, and whether they need a ComfyUI and a browser."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tools.environment import NEWEST, RELEASES, ROOT, pinned_comfyui

TESTS = ROOT / "tests"
UNIT_TESTS = TESTS / "unit"
EDITOR_TESTS = TESTS / "editor"
ON_COMFYUI = ("tests/hosts", "tests/compatibility", "tests/soak")

# The next argument belongs to the option, and may look like the path of a test.
TAKES_A_VALUE = ("-k", "-m", "--deselect", "--ignore", "--ignore-glob")


def chosen_paths(pytest_arguments: Sequence[str]) -> list[Path]:
    """The files and folders of tests that the arguments select; none means all."""
    paths = []
    for before, argument in zip(["", *pytest_arguments], pytest_arguments, strict=False):
        path = Path(os.path.normpath(ROOT / argument.partition("::")[0]))
        if before not in TAKES_A_VALUE and path.is_relative_to(TESTS):
            paths.append(path)
    return paths


def needs_comfyui(pytest_arguments: Sequence[str]) -> bool:
    """Whether any test outside `tests/unit` would run; tests in that folder need only PyTorch."""
    paths = chosen_paths(pytest_arguments)
    return not paths or not all(path.is_relative_to(UNIT_TESTS) for path in paths)


def needs_browser(pytest_arguments: Sequence[str]) -> bool:
    """Whether any test of the editor would run."""
    paths = chosen_paths(pytest_arguments) or [TESTS]
    return any(path in (TESTS, EDITOR_TESTS) or EDITOR_TESTS in path.parents for path in paths)


def lane_of(comfyui: Path) -> list[str]:
    """The tests to run on a ComfyUI: all, unless it is an earlier one that is pinned.

    Tests of the editor need the front end of the newest.
    """
    earlier = [pinned_comfyui(version) for version in RELEASES if version != NEWEST]
    return [*ON_COMFYUI] if comfyui in earlier else ["tests"]
