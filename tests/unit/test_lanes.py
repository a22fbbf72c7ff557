"""A command line sets up no more than its tests need."""

import pytest

from tools.environment import NEWEST, RELEASES, ROOT, pinned_comfyui
from tools.lanes import chosen_paths, lane_of, needs_browser, needs_comfyui


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


@pytest.mark.parametrize(
    "command", ["tests/unit", "tests/hosts tests/soak", "tests/unit/test_plan.py -x"]
)
def test_only_tests_of_the_editor_need_a_browser(command):
    assert not needs_browser(command.split())


@pytest.mark.parametrize("command", ["", "-x", "tests", "tests/editor", "tests/hosts/../editor"])
def test_tests_of_the_editor_need_a_browser(command):
    assert needs_browser(command.split())


@pytest.mark.parametrize("version", RELEASES)
def test_an_earlier_comfyui_runs_the_tests_of_the_hosts(version):
    lane = lane_of(pinned_comfyui(version))
    assert needs_comfyui(lane)
    assert needs_browser(lane) == (version == NEWEST)
    assert lane[0] == ("tests" if version == NEWEST else "tests/hosts")


def test_all_tests_run_on_a_comfyui_of_choice(tmp_path):
    assert lane_of(tmp_path) == ["tests"]
