"""Beside other nodes: a part of the table of compatibility is run again, and more is tried."""

import json

import pytest
import torch
from common import EVERYTHING, relative_error
from host import merging, overridden
from models.comfyui import TINY, build, sample

from tome_nodes.comfyui.attachment import attach, detach, is_attached
from tome_nodes.settings.config import ToMeConfig

from . import table
from .neighbours import ALL, BY_NAME, Neighbour
from .table import COLUMNS, Cell, cell, meetings, model_of, run

TABLE = json.loads((table.RESULTS / "compatibility.json").read_text(encoding="utf-8"))

# Those that reach deepest into a model meet all settings, on a kind of model that they change.
THOROUGHLY = {
    "HyperTile": "sd15",
    "PatchModelAddDownscale": "sdxl",
    "TomePatchModel": "sd15",
    "PerturbedAttentionGuidance": "sdxl",
    "SelfAttentionGuidance": "sd15",
    "SkipLayerGuidanceDiT": "flux",
    "EasyCache": "wan21",
    "LazyCache": "lumina2",
    "ContextWindowsManual": "wan21",
    "Patch Sage Attention KJ": "flux",
    "ApplyFBCacheOnModel": "ltxv",
    "TeaCache": "flux",
    "SpectrumSDXL": "qwen_image",
}
CELLS = [
    pytest.param(each.name, marks=() if each.name in THOROUGHLY else pytest.mark.newest_only)
    for each in ALL
    if not each.is_slow
]


def in_table(name, kind, setting, order):
    """A cell as it is in the committed table."""
    groups = TABLE["rows"][name][kind]
    found = [cell for meetings, cell in groups.items() if f"{setting}, {order}" in meetings]
    return Cell(**(found or [groups["all"]])[0])


def ours_in(model):
    """Names of the modules whose forward is one of ours; other nodes may leave theirs."""
    modules = dict(model.model.named_modules())
    return [
        name
        for name in overridden(model)
        if modules[name].forward.__module__.startswith("tome_nodes")
    ]


def test_the_table_has_every_node_on_every_kind_of_model():
    assert list(TABLE["rows"]) == [each.name for each in ALL]
    for row in TABLE["rows"].values():
        assert list(row) == list(COLUMNS)
        assert all(cell["verdict"] != "wrong" for cells in row.values() for cell in cells.values())
    page = (table.RESULTS / "compatibility.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert rows[2:] == list(TABLE["rows"])


@pytest.mark.parametrize("name", CELLS)
def test_cells_of_the_table_are_still_so(name):
    neighbour = BY_NAME[name]
    if name in THOROUGHLY:
        kind, tried = THOROUGHLY[name], meetings(neighbour)
    else:
        cells = {kind: in_table(name, kind, "fast", "ours first") for kind in COLUMNS}
        kinds = [kind for kind in COLUMNS if cells[kind].verdict != table.NONE]
        kind = kinds[len(name) % len(kinds)]
        met = meetings(neighbour)
        tried = [met[ALL.index(neighbour) % len(met)]]
    for setting, order in tried:
        found = cell(kind, neighbour, setting, order)
        assert found == in_table(name, kind, setting, order), (setting, order)
        assert found.verdict != table.NONE
    assert ours_in(model_of(kind)) == []


def another_result(model, kind):
    """A model that gives another result if it merges tokens."""
    clone = model.clone()
    clone.set_model_sampler_post_cfg_function(
        lambda arguments: (1.1 + 0.1 * is_attached(model)) * arguments["denoised"]
    )
    return clone


def an_error(model, kind):
    if is_attached(model):
        raise RuntimeError("two\nlines")
    return another_result(model, kind)


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        (another_result, "the result is another one"),
        (an_error, "RuntimeError: two"),
        (
            lambda model, kind: another_result(detach(model), kind),
            "RuntimeError: the other node has removed merging from the model",
        ),
    ],
)
def test_what_is_wrong_is_found(patch, why):
    neighbour = Neighbour(why, "nodes.py", patch)
    found = cell("flux", neighbour, "balanced", "ours first")
    assert found == Cell(table.WRONG, why)
    assert table._shown({"balanced, ours first": found}, {}) == "wrong [1]"


def test_what_differs_by_setting_is_said_once():
    partly = Cell(table.PARTLY, "no room")
    cells = {
        f"{setting}, {order}": partly if setting == "fast" else Cell(table.RIGHT)
        for setting, order in meetings(ALL[0])
    }
    notes = {"another": 1}
    assert table._shown(cells, notes) == "partly [2]"
    assert notes == {"another": 1, "fast: no room": 2}
    assert table._shown({"fast, ours first": partly}, notes) == "partly [3]"
    short = table.in_short({"a node": {"flux": cells}})["a node"]["flux"]
    assert short["fast, ours first, fast, theirs first"] == {"verdict": "partly", "why": "no room"}


@pytest.mark.parametrize("name", ["HyperTile", "PatchModelAddDownscale", "SelfAttentionGuidance"])
def test_merging_next_to_another_node_changes_the_result_reproducibly(log_messages, name):
    neighbour = BY_NAME[name]
    theirs = neighbour.patch(model_of("sd15"), "sd15")
    config = ToMeConfig(ratio=0.5, **EVERYTHING)
    expected, merged, again = (
        run(neighbour, each, "sd15")
        for each in (theirs, attach(theirs, config), attach(theirs, config))
    )
    assert 1e-3 < relative_error(merged, expected) < 1
    assert torch.equal(again, merged)
    assert log_messages()[-1].startswith("[ToMe] merged 7/7 blocks (")


def test_a_partly_loaded_model():
    tiny = TINY["flux"]
    model = build(tiny)
    size = tiny.size(8, 10)
    config = merging(strategy="window", attn_tokens="k,v")
    expected = sample(attach(model, config), tiny, size)
    partly = build(tiny)
    partly.load(torch.device("cpu"), lowvram_model_memory=1)
    assert relative_error(sample(attach(partly, config), tiny, size), expected) < 1e-6
