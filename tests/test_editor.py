"""The pack in ComfyUI's real front end, in a headless browser."""

import json

import pytest
from playwright.sync_api import expect

from tools.editor import PATIENCE_MS, WORKFLOWS, list_checkpoints, open_editor, workflow_files

# The widgets that the first version of the patch node had.
FIRST_INPUTS = 11

PATCH, REMOVE = "ToMe Patch Model", "ToMe Remove Patch"

TITLE_BAR = """type => {
    const node = app.rootGraph.nodes.find(node => node.type === type)
    return app.canvas.ds.convertOffsetToCanvas([node.pos[0] + node.size[0] / 2, node.pos[1] - 15])
}"""

every_workflow = pytest.mark.parametrize("file", workflow_files(), ids=lambda file: file.stem)


@pytest.fixture(scope="module")
def editor(server):
    list_checkpoints(server)
    expect.set_options(timeout=PATIENCE_MS)
    with open_editor(server) as editor:
        yield editor


def text_of(file):
    return file.read_text(encoding="utf-8")


@every_workflow
def test_workflow_opens_without_a_warning_or_an_error(editor, file):
    editor.open(file.name, text_of(file))
    assert editor.warnings() == []
    assert editor.errors == []


def test_editor_warns_of_a_node_that_it_does_not_have(editor):
    """Else the absence of warnings above would say nothing."""
    text = text_of(WORKFLOWS / "tome_txt2img.json")
    editor.open("unknown.json", text.replace('"ToMePatchModel"', '"NoSuchNode"'))
    assert editor.warnings() != []


@every_workflow
def test_exports_of_the_opened_workflow_are_the_files(editor, file):
    editor.open(file.name, text_of(file))
    assert editor.save_for_api() == text_of(WORKFLOWS / "api" / file.name)
    saved, before = json.loads(editor.save()), json.loads(text_of(file))
    # The view and the version of the editor are not part of the graph.
    del saved["extra"], before["extra"]
    assert saved == before


@every_workflow
def test_files_saved_before_the_later_inputs_were_added_are_the_same_graph(editor, file):
    graph = json.loads(text_of(file))
    (node,) = (node for node in graph["nodes"] if node["type"] == "ToMePatchModel")
    # The preset came after them, and is the second widget.
    del node["widgets_values"][1]
    del node["widgets_values"][FIRST_INPUTS:], node["inputs"][1:]
    editor.open(file.name, json.dumps(graph))
    assert editor.warnings() == []
    expected = json.loads(text_of(WORKFLOWS / "api" / file.name))
    expected[str(node["id"])]["inputs"]["preset"] = "custom"
    assert json.loads(editor.save_for_api()) == expected


def test_inputs_that_a_preset_decides_are_greyed_out(editor):
    disabled = """preset => {
        const node = app.rootGraph.nodes.find(node => node.type === 'ToMePatchModel')
        const widget = node.widgets.find(widget => widget.name === 'preset')
        if (preset) widget.setValue(preset, { e: {}, node, canvas: app.canvas })
        return node.widgets.filter(widget => widget.disabled).map(widget => widget.name)
    }"""
    editor.open("tome_txt2img.json", text_of(WORKFLOWS / "tome_txt2img.json"))
    page = editor.page
    free = {"ratio", "preset", "seed", "start_percent", "end_percent", "backend"}
    decided = set(page.evaluate(disabled, None))
    assert "scope" in decided and not decided & free
    assert page.evaluate(disabled, "custom") == []
    assert set(page.evaluate(disabled, "fast")) == decided
    assert editor.errors == []


def test_nodes_are_found_by_searching_for_token_merging(editor):
    page = editor.page
    editor.open("blank.json", json.dumps({"version": 0.4, "nodes": [], "links": []}))
    # A double click on the canvas opens it too, but the editor gives that 300 ms to happen.
    editor.execute("Workspace.SearchBox.Toggle")
    page.get_by_role("combobox", name="Add a node").fill("token merging")
    results = page.get_by_test_id("result-item")
    for name in PATCH, REMOVE:
        expect(results.filter(has_text=name)).to_be_visible()
    page.keyboard.press("Escape")
    expect(results).to_have_count(0)


def test_help_page_is_shown(editor):
    page = editor.page
    editor.open("tome_txt2img.json", text_of(WORKFLOWS / "tome_txt2img.json"))
    x, y = page.evaluate(TITLE_BAR, "ToMePatchModel")
    page.mouse.click(x, y)
    page.get_by_test_id("info-button").click()
    shown = page.locator(".node-help-content")
    expect(shown.get_by_role("heading", name=PATCH)).to_be_visible()
    expect(shown.get_by_role("row").filter(has_text="max_downsample").first).to_be_visible()
