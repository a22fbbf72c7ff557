"""Beside other nodes: a part of the table of compatibility is run again."""

import json

import pytest
from host import overridden

from tome_nodes.comfyui.attachment import detach, is_attached

from . import table
from .neighbours import ALL, BY_NAME, Neighbour
from .table import COLUMNS, Cell, cell, model_of, settings_on

ROWS = json.loads((table.RESULTS / "compatibility.json").read_text(encoding="utf-8"))["rows"]

# Those that reach deepest into a UNet meet all settings, on one that they change.
THOROUGHLY = {
    **dict.fromkeys(("HyperTile", "TomePatchModel", "SelfAttentionGuidance"), "sd15"),
    **dict.fromkeys(("PatchModelAddDownscale", "PerturbedAttentionGuidance"), "sdxl"),
    **{"Patch Sage Attention KJ": "sd15", "EasyCache": "sdxl", "IPAdapter": "sdxl"},
}


def in_table(name, kind, setting):
    """A cell as it is in the committed table."""
    (found,) = (each for settings, each in ROWS[name][kind].items() if setting in settings)
    return Cell(*found)


def test_the_table_has_every_node_on_every_kind_of_model():
    assert list(ROWS) == [each.name for each in ALL]
    for name, row in ROWS.items():
        assert list(row) == list(COLUMNS)
        for kind in COLUMNS:
            cells = [in_table(name, kind, each) for each in settings_on(kind, BY_NAME[name])]
            assert all(each.verdict != table.WRONG for each in cells)
    page = (table.RESULTS / "compatibility.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert rows[2:] == list(ROWS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each.name, marks=() if each.name in THOROUGHLY else pytest.mark.newest_only)
        for each in ALL
        if not each.is_slow
    ],
)
def test_cells_of_the_table_are_still_so(name):
    neighbour = BY_NAME[name]
    kinds = [kind for kind in COLUMNS if in_table(name, kind, "fast").verdict != table.NONE]
    kind = THOROUGHLY.get(name) or kinds[len(name) % len(kinds)]
    tried = settings_on(kind, neighbour)
    for setting in tried if name in THOROUGHLY else tried[ALL.index(neighbour) % len(tried) :][:1]:
        assert cell(kind, neighbour, setting) == in_table(name, kind, setting), setting
    modules = dict(model_of(kind).model.named_modules())
    forwards = (modules[name].forward for name in overridden(model_of(kind)))
    # Other nodes may leave theirs.
    assert not any(each.__module__.startswith("tome_nodes") for each in forwards)


def another_result(model, kind):
    """A model that gives another result if ours is on it, and the more so if it is on it first."""
    clone, share = model.clone(), 1.1 + 0.1 * is_attached(model)
    clone.set_model_sampler_post_cfg_function(lambda arguments: share * arguments["denoised"])
    return clone


def an_error(model, kind):
    if is_attached(model):
        raise RuntimeError("two\nlines")
    return another_result(model, kind)


@pytest.mark.parametrize("kind", ["sd15", "flux"])
@pytest.mark.parametrize(
    ("patch", "why"),
    [
        (another_result, "the result is another one"),
        (an_error, "RuntimeError: two"),
        (
            lambda model, kind: another_result(detach(model), kind),
            "RuntimeError: the other node has removed ours from the model",
        ),
    ],
)
def test_what_is_wrong_is_found(patch, why, kind):
    found = cell(kind, Neighbour(why, "nodes.py", patch), "fast")
    assert found == Cell(table.WRONG, why)
    assert table.shown({"fast": found}, {}) == "wrong [1]"
