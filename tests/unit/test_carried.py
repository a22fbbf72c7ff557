"""What a machine without a network gets: ComfyUI's code and wheels."""

import pytest

from tools import carried
from tools.errors import ToolError

NAMES = carried.NEEDED + carried.PURE


def test_a_folder_without_comfyui_is_refused(tmp_path):
    with pytest.raises(ToolError, match=r"dev\.py gpu pack"):
        carried.unpack(tmp_path, tmp_path / "there")


def test_too_much_is_refused_with_the_largest(tmp_path, monkeypatch):
    comfyui = tmp_path / "here"
    comfyui.mkdir()
    (comfyui / "main.py").write_text("x = 1\n")
    monkeypatch.setattr(carried, "comfyui_directory", lambda: comfyui)
    carried.pack(tmp_path / "carried", NAMES)
    monkeypatch.setattr(carried, "MOST_BYTES", 10)
    with pytest.raises(ToolError, match=r"--has. The largest: comfyui\.tar\.gz"):
        carried.pack(tmp_path / "carried", [name.replace("-", "_").upper() for name in NAMES])


def test_every_package_has_one_version():
    pinned = carried._pinned()
    assert [name for name in NAMES if name not in pinned] == []
    assert len(set(NAMES)) == len(NAMES)
