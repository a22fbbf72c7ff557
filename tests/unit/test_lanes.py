"""A command line sets up no more than its tests need."""

import pytest

from tools.environment import NEWEST, RELEASES, ROOT, pinned_comfyui
from tools.lanes import lane_of, needs_browser, needs_comfyui


@pytest.mark.parametrize(
    ("command", "comfyui", "browser"),
    [
        ("tests/unit", False, False),
        ("tests/unit/", False, False),
        ("./tests/unit", False, False),
        (f"{ROOT}/tests/unit/test_plan.py", False, False),
        ("tests/unit/test_plan.py::test_merge -x", False, False),
        ("-x -k window tests/unit/test_plan.py tests/unit/test_config.py tests.ini", False, False),
        ("tests/unit --deselect tests/hosts/test_presets.py", False, False),
        ("tests/unit --ignore=tests/hosts -k tests/editor", False, False),
        ("tests/hosts tests/soak", True, False),
        ("tests/units", True, False),
        ("tests/hosts/test_presets.py", True, False),
        ("tests/editor", True, True),
        ("tests/hosts/../editor", True, True),
        ("tests/unit tests/editor/test_editor.py::test_search", True, True),
        ("tests", True, True),
        ("tests/unit/..", True, True),
        ("", True, True),
        ("-x -k plan", True, True),
        # None of these selects tests, so all run.
        ("-k tests/unit", True, True),
        ("--ignore tests/unit/test_kernels.py", True, True),
        ("--deselect tests/unit/test_plan.py::test_merge", True, True),
    ],
)
def test_what_the_tests_of_a_command_need(command, comfyui, browser):
    assert needs_comfyui(command.split()) == comfyui
    assert needs_browser(command.split()) == browser


@pytest.mark.parametrize("version", RELEASES)
def test_an_earlier_comfyui_runs_the_tests_of_the_hosts(version):
    lane = lane_of(pinned_comfyui(version))
    assert needs_comfyui(lane)
    assert needs_browser(lane) == (version == NEWEST)
    assert lane[0] == ("tests" if version == NEWEST else "tests/hosts")


def test_all_tests_run_on_a_comfyui_of_choice(tmp_path):
    assert lane_of(tmp_path) == ["tests"]
