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
    (row,) = (row for settings, row in ROWS[name][kind].items() if setting in settings)
    return Cell(*row)


def test_the_table_has_every_node_on_every_kind_of_model():
    assert list(ROWS) == list(BY_NAME)
    for name, row in ROWS.items():
        assert list(row) == list(COLUMNS)
        for kind in COLUMNS:
            for setting in settings_on(kind, BY_NAME[name]):
                assert in_table(name, kind, setting).verdict != table.WRONG
    page = (table.RESULTS / "compatibility.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert rows[2:] == list(ROWS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(node.name, marks=() if node.name in THOROUGHLY else pytest.mark.newest_only)
        for node in ALL
        if not node.is_slow
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
    assert not any(forward.__module__.startswith("tome_nodes") for forward in forwards)


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
    result = cell(kind, Neighbour(why, "nodes.py", patch), "fast")
    assert result == Cell(table.WRONG, why)
    assert table.shown({"fast": result}, {}) == "wrong [1]"
