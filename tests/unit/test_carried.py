"""What a machine without a network gets: ComfyUI's code and wheels."""

import subprocess
import sys
import tarfile
import zipfile

import pytest

from tools import carried
from tools.errors import ToolError

NAMES = carried.NEEDED + carried.PURE


@pytest.fixture
def comfyui(tmp_path):
    folder = tmp_path / "here"
    for name in ("main.py", "comfy/ops.py", "comfy/__pycache__/ops.pyc", "models/sd.ckpt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x = 1\n")
    (folder / ".git").mkdir()
    return folder


def make_wheel(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("carried_here.py", "VALUE = 7\n")
        about = "carried_here-1.0.dist-info"
        file.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: carried-here\nVersion: 1.0"
        )
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        file.writestr(f"{about}/RECORD", "")


def test_what_is_carried_can_be_imported(comfyui, tmp_path):
    folder, scratch = tmp_path / "carried", tmp_path / "there"
    folder.mkdir()
    carried.pack_comfyui(comfyui, folder / carried.ARCHIVE)
    with tarfile.open(folder / carried.ARCHIVE) as archive:
        files = {member.name for member in archive if member.isfile()}
    assert files == {"main.py", "comfy/ops.py"}
    make_wheel(folder / "carried_here-1.0-py3-none-any.whl")
    settings = carried.unpack(folder, scratch)
    assert settings["COMFYUI_PATH"] == str(scratch / "ComfyUI")
    assert (scratch / "ComfyUI" / "comfy" / "ops.py").is_file()
    script = "import carried_here; print(carried_here.VALUE)"
    ended = subprocess.run(
        [sys.executable, "-c", script], env=settings, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "7\n"


def test_a_folder_without_comfyui_is_refused(tmp_path):
    with pytest.raises(ToolError, match=r"dev\.py gpu pack"):
        carried.unpack(tmp_path, tmp_path / "there")


def test_too_much_is_refused_with_the_largest(comfyui, tmp_path, monkeypatch):
    monkeypatch.setattr(carried, "comfyui_directory", lambda: comfyui)
    carried.pack(tmp_path / "carried", NAMES)
    monkeypatch.setattr(carried, "MOST_BYTES", 10)
    with pytest.raises(ToolError, match=r"--has. The largest: comfyui\.tar\.gz"):
        carried.pack(tmp_path / "carried", [name.replace("-", "_").upper() for name in NAMES])


def test_every_package_has_one_version():
    pinned = carried._pinned()
    assert [name for name in NAMES if name not in pinned] == []
    assert len(set(NAMES)) == len(NAMES)
