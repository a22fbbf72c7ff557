"""What a machine without a network gets: ComfyUI's code and wheels."""

import pytest

from tools import carried
from tools.errors import ToolError

NAMES = carried.NEEDED + carried.PURE


def test_a_folder_without_comfyui_is_refused(tmp_path):
    with pytest.raises(ToolError, match=r"dev\.py gpu pack"):
        carried.unpack(tmp_path, tmp_path / "there")


def test_what_the_other_machine_has_is_not_packed(tmp_path, monkeypatch, capsys):
    comfyui = tmp_path / "here"
    comfyui.mkdir()
    (comfyui / "main.py").write_text("x = 1\n")
    monkeypatch.setattr(carried, "comfyui_directory", lambda: comfyui)
    carried.pack(tmp_path / "carried", [name.replace("-", "_").upper() for name in NAMES])
    assert "1 files" in capsys.readouterr().out
    assert [each.name for each in (tmp_path / "carried").iterdir()] == [carried.ARCHIVE]


def test_every_package_has_one_version():
    pinned = carried._pinned()
    assert [name for name in NAMES if name not in pinned] == []
    assert len(set(NAMES)) == len(NAMES)
