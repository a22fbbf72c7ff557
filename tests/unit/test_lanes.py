"""A command line sets up no more than its tests need."""

import pytest

from tools.environment import ROOT
from tools.lanes import chosen_paths, needs_comfyui


@pytest.mark.parametrize(
    "command",
    [
        "tests/unit",
        "tests/unit/",
        "./tests/unit",
        f"{ROOT}/tests/unit/test_plan.py",
        "tests/unit/test_plan.py::test_merge -x",
        "-x -k window tests/unit/test_plan.py tests/unit/test_config.py",
        "tests/unit --deselect tests/hosts/test_presets.py",
        "tests/unit --ignore=tests/hosts -k tests/editor",
    ],
)
def test_unit_tests_need_no_comfyui(command):
    assert not needs_comfyui(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "",
        "-x -k plan",
        "tests",
        "tests/unit/..",
        "tests/units",
        "tests/hosts/test_presets.py",
        "tests/unit tests/editor/test_editor.py::test_search",
        # None of these selects tests, so all run.
        "-k tests/unit",
        "--ignore tests/unit/test_kernels.py",
        "--deselect tests/unit/test_plan.py::test_merge",
    ],
)
def test_all_other_tests_need_comfyui(command):
    assert needs_comfyui(command.split())


def test_paths_are_distinguished_from_options_and_their_values():
    command = "-k tests/unit tests/hosts -x tests/unit/test_plan.py::test_merge tests.ini"
    assert chosen_paths(command.split()) == [ROOT / "tests/hosts", ROOT / "tests/unit/test_plan.py"]
