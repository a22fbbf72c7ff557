"""The pack in ComfyUI's real front end, in a headless browser."""

import json
import re
from contextlib import ExitStack
from io import BytesIO
from itertools import count

import pytest
from PIL import Image
from playwright.sync_api import TimeoutError, expect

from tome_nodes.comfyui.node_texts import CAPTIONS
from tome_nodes.comfyui.node_texts import PATCH as CAPTION
from tome_nodes.settings.presets import FREE
from tools.editor import (
    HAS_NODES,
    PATIENCE_MS,
    TWO_FRAMES,
    WORKFLOWS,
    graph_of,
    open_browser,
    open_editor,
    workflow_files,
)
from tools.environment import ROOT
from tools.workflow import PATCH as PATCH_TYPE

PATCH, REMOVE = "ToMe Patch Model", "ToMe Remove Patch"
REMOVE_TYPE, REPORT_TYPE, TUNE_TYPE = "ToMeRemovePatch", "ToMeReport", "ToMeTune"
CLASSIC = {}
NODES_2 = {"Comfy.VueNodes.Enabled": True}
UNFOLDED = NODES_2 | {"Comfy.Node.AlwaysShowAdvancedWidgets": True}

# Where the graph without our node has room for it, and the corner to look at it from.
ROOM, CORNER = (520, 15), (-20, -90)

# Of a graph that it has run before, the server runs nothing again.
sampler_seeds = count()

WATCH_RUN = """() => {
    window.hasRun = false
    app.api.addEventListener('execution_success', () => { window.hasRun = true }, { once: true })
}"""
# Pictures of an earlier graph can be shown late, in a node of the same number.
IMAGE_OF_RUN = """() => {
    const node = nodeOf('SaveImage')
    const shown = node.imgs?.[0]
    const saved = app.nodeOutputs[node.id]?.images?.[0].filename
    return window.hasRun && shown?.src.includes(saved) && shown.naturalWidth
}"""
REPORT = "key => widgetOf(key, 'report').element.textContent"
PICTURE_IS_SHOWN = "key => widgetOf(key, 'report').element.querySelector('img')"
MOVE_AND_UNDO = """async () => {
    const node = nodeOf('ToMeReport')
    const tracker = app.extensionManager.workflow.activeWorkflow.changeTracker
    node.isTheOldOne = true
    tracker.checkState()
    node.pos = [node.pos[0] + 10, node.pos[1]]
    tracker.checkState()
    await tracker.undo()
}"""
IS_SHOWN_AGAIN = f"() => !nodeOf('ToMeReport').isTheOldOne && ({PICTURE_IS_SHOWN})('ToMeReport')"

CHOOSE = """preset => {
    const node = nodeOf('ToMePatchModel')
    widgetOf(node.id, 'preset').setValue(preset, { e: {}, node, canvas: app.canvas })
}"""
# The newest front end shows an input with a link without its value.
VISIBLE = """key => {
    const node = nodeOf(key)
    const isVisible = node.isWidgetRowVisible ?? node.isWidgetVisible
    return node.widgets.filter(widget => isVisible.call(node, widget)).map(widget => widget.name)
}"""
PATCHES = """() => app.rootGraph.nodes
    .filter(node => node.type === 'ToMePatchModel').map(node => node.id)"""
BOX = """key => {
    const node = nodeOf(key)
    return { size: [...node.size], least: [...node.computeSize()] }
}"""
STRETCH = """([across, down]) => {
    const node = nodeOf('ToMePatchModel')
    node.setSize([node.size[0] + across, node.size[1] + down])
    app.extensionManager.workflow.activeWorkflow.changeTracker.checkState()
}"""
LINK = """([kind, name, target]) => {
    const source = LiteGraph.createNode(kind)
    app.rootGraph.add(source)
    source.connect(0, nodeOf(target), slotOf(target, 'inputs', name))
}"""
UNLINK = "([name, key]) => nodeOf(key).disconnectInput(slotOf(key, 'inputs', name))"
TITLE = """key => {
    const { pos, size } = nodeOf(key)
    return [pos[0] + size[0] / 2, pos[1] - 15]
}"""
BOXES = """key => {
    const node = nodeOf(key)
    const report = widgetOf(key, 'report').element
    // In the classic design, a node is no element.
    const element = document.querySelector(`[data-node-id="${node.id}"]`)
    const [left, top] = app.canvas.ds.convertOffsetToCanvas(node.pos)
    const canvas = app.canvas.canvas.getBoundingClientRect()
    const { scale } = app.canvas.ds
    return {
        node: element?.getBoundingClientRect()
            ?? new DOMRect(canvas.x + left, canvas.y + top, ...node.size.map(side => side * scale)),
        report: report.getBoundingClientRect(),
        picture: report.querySelector('img')?.getBoundingClientRect(),
        isCut: report.scrollHeight > report.clientHeight + 1,
    }
}"""
CUT = """page => {
    const edge = page.getBoundingClientRect().right
    return [...page.querySelectorAll('td, li')]
        .filter(part => part.getBoundingClientRect().right > edge + 1)
        .map(part => part.textContent)
}"""
WIDEN = """([key, width]) => {
    const node = nodeOf(key)
    node.setSize([width, node.computeSize()[1]])
    app.canvas.setDirty(true, true)
}"""

ALL = [option.name for option in CAPTION.options]
FEW = ["preset", *FREE]
ROW = 24

every_workflow = pytest.mark.parametrize("file", workflow_files(), ids=lambda file: file.stem)

# A test runs in the front end that ComfyUI requires; one whose subject the newest changes, in both.
in_both_front_ends = pytest.mark.parametrize(
    "front_end",
    [
        pytest.param("server", id="required"),
        pytest.param("newest_server", id="newest", marks=pytest.mark.xdist_group("newest_server")),
    ],
    indirect=True,
)


def in_designs(editor, **settings):
    """Run a test in editors with these settings, by name; the fixture is of this name."""
    return pytest.mark.parametrize(editor, settings.values(), ids=settings, indirect=True)


in_both_designs = in_designs("editor", classic=CLASSIC, nodes_2=NODES_2)
# The classic design has no advanced inputs.
in_both_designs_unfolded = in_designs("editor", classic=CLASSIC, nodes_2=UNFOLDED)
in_nodes_2 = in_designs("editor", nodes_2=NODES_2)
fresh_in_both_designs = in_designs("fresh_editor", classic=CLASSIC, nodes_2=NODES_2)
fresh_in_nodes_2 = in_designs("fresh_editor", nodes_2=NODES_2)


@pytest.fixture(scope="module", params=["server"], ids=["required"])
def front_end(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def browser():
    expect.set_options(timeout=PATIENCE_MS)
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def open_one(browser):
    """Returns the editor of a server in a design, opened anew if another one is open.

    A page takes seconds to load, and an idle one draws on.
    """
    opened = {}
    with ExitStack() as open_editor_of:

        def one(front_end, design):
            key = front_end, *design.items()
            if key not in opened:
                open_editor_of.close()
                opened.clear()
                editor = open_editor(browser, front_end, design)
                opened[key] = open_editor_of.enter_context(editor)
            return opened[key]

        yield one


@pytest.fixture(params=[CLASSIC], ids=["classic"])
def editor(request, open_one, front_end):
    """An editor in the classic design unless a test asks for another.

    Tests share it: a test opens a graph, and leaves no dialog, panel or notice.
    """
    return open_one(front_end, request.param)


@pytest.fixture
def fresh_editor(request, browser, front_end):
    """An editor for one test, in a fresh profile."""
    with open_editor(browser, front_end, getattr(request, "param", CLASSIC)) as editor:
        yield editor


@pytest.fixture
def picture(pytestconfig):
    """Take the picture of this name of an editor's page; kept only on request.

    `box` is its left and upper edge, its width and its height.
    """

    def take(editor, name, box):
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True))
        data = editor.page.screenshot(type="jpeg", quality=85, clip=clip)
        with Image.open(BytesIO(data)) as image:
            assert image.getcolors(100) is None, f"there is nothing to see in {name}"
        if pytestconfig.getoption("pictures"):
            (ROOT / "web" / "docs" / f"{name}.jpg").write_bytes(data)

    return take


def node_of(graph, kind):
    (node,) = (node for node in graph["nodes"] if node["type"] == kind)
    return node


def sample_graph(name="tome_txt2img", **settings):
    """This sample workflow, the text to image one by default, with these values in our node."""
    graph = graph_of(WORKFLOWS / f"{name}.json")
    for name, value in settings.items():
        node_of(graph, PATCH_TYPE)["widgets_values"][ALL.index(name)] = value
    return graph


def small_graph(name="tome_txt2img", side=64, **settings):
    """The same for a small checkpoint, to be run."""
    graph = sample_graph(name, **settings)
    for node in graph["nodes"]:
        values = node["widgets_values"]
        if node["type"] == "CheckpointLoaderSimple":
            values[:] = ["sd15.ckpt"]
        elif node["type"] == "EmptyLatentImage":
            values[:2] = [side, side]
        elif node["type"] == "KSampler":
            values[0], values[2] = next(sampler_seeds), 2
    return graph


def exported(editor):
    """The graph in API format. The newest front end adds which pack a node is from."""
    graph = json.loads(editor.save_for_api())
    for node in graph.values():
        node["_meta"].pop("cnr_id", None)
    return graph


def inputs_of_patches(editor):
    """What would be queued for each of our nodes."""
    nodes = exported(editor).values()
    return [node["inputs"] for node in nodes if node["class_type"] == PATCH_TYPE]


def patch_inputs(editor):
    (inputs,) = inputs_of_patches(editor)
    return inputs


def run_to_image(editor, side):
    """Run the graph without a warning, until it shows a saved image of so many pixels."""
    editor.page.evaluate(WATCH_RUN)
    editor.run()
    try:
        assert editor.page.wait_for_function(IMAGE_OF_RUN).json_value() == side
    except TimeoutError as error:
        raise AssertionError([*editor.warnings(), *editor.errors]) from error
    assert editor.warnings() == editor.errors == []


def behind_the_sampler(editor):
    """The types of the nodes that the model of the sampler comes through."""
    graph = exported(editor)
    (node,) = (node for node in graph.values() if node["class_type"] == "KSampler")
    types = []
    while "model" in node["inputs"]:
        node = graph[node["inputs"]["model"][0]]
        types.append(node["class_type"])
    return types


def reopen(editor):
    saved = json.loads(editor.save())
    editor.clear()
    editor.open(saved)


def visible(editor, key=PATCH_TYPE):
    """The names of the inputs that a node shows in an editor that folds none."""
    editor.page.evaluate(TWO_FRAMES)
    names = editor.page.evaluate(VISIBLE, key)
    shown = editor.node(key)
    if shown.count():
        rows = shown.get_by_test_id("node-widgets").locator("> div")
        starts = [re.compile(rf"^{name}\b") for name in names]
        expect(rows).to_have_text(starts, use_inner_text=True)
    return names


def box(editor, key=PATCH_TYPE):
    editor.page.evaluate(TWO_FRAMES)
    return editor.page.evaluate(BOX, key)


def test_editor_offers_to_download_a_model_that_is_missing(fresh_editor):
    """It warns, too; else the absence of warnings elsewhere would say nothing."""
    text = json.dumps(sample_graph()).replace("v1-5-pruned-emaonly-fp16", "not_here")
    fresh_editor.open(json.loads(text))
    expect(fresh_editor.notices).to_contain_text("not_here.safetensors is missing")
    fresh_editor.page.get_by_role("button", name="View details").click()
    button = fresh_editor.page.get_by_role("button", name="Download not_here.safetensors")
    expect(button).to_be_visible()


@in_both_front_ends
@every_workflow
def test_export_for_the_api_is_the_file(editor, file):
    editor.open(graph_of(file))
    assert exported(editor) == graph_of(WORKFLOWS / "api" / file.name)


@every_workflow
def test_workflow_opens_without_a_warning_and_is_saved_as_it_was(editor, file):
    before = graph_of(file)
    editor.open(before)
    assert editor.warnings() == editor.errors == []
    saved = json.loads(editor.save())
    # The view and the version of the editor are not part of the graph.
    del saved["extra"], before["extra"]
    assert saved == before


@in_both_front_ends
@in_both_designs_unfolded
def test_only_what_counts_under_a_preset_is_shown(editor):
    editor.open(sample_graph())
    assert visible(editor) == FEW
    editor.page.evaluate(CHOOSE, "custom")
    assert visible(editor) == ALL
    editor.page.evaluate(CHOOSE, "fast")
    assert visible(editor) == FEW
    before = box(editor)
    # A value that counts but cannot be seen would be worse than one too many.
    editor.page.evaluate(LINK, ["PrimitiveInt", "sx", PATCH_TYPE])
    assert visible(editor) == [*FEW, "sx"]
    assert box(editor)["least"][1] == before["least"][1] + ROW
    editor.page.evaluate(UNLINK, ["sx", PATCH_TYPE])
    assert visible(editor) == FEW
    assert box(editor) == before
    editor.page.evaluate(LINK, ["PrimitiveNode", "preset", PATCH_TYPE])
    assert visible(editor) == ALL
    editor.page.evaluate(UNLINK, ["preset", PATCH_TYPE])
    assert visible(editor) == FEW
    assert editor.errors == []


def test_node_is_as_high_as_what_it_shows_and_keeps_the_size_it_was_given(editor):
    editor.open(sample_graph())
    before = box(editor)
    assert before["size"][1] == before["least"][1]
    editor.page.evaluate(STRETCH, [50, 30])
    width, height = box(editor)["size"]
    editor.page.evaluate(CHOOSE, "custom")
    assert box(editor)["size"] == [width, height + ROW * (len(ALL) - len(FEW))]
    editor.page.evaluate(CHOOSE, "fast")
    assert box(editor)["size"] == [width, height]
    reopen(editor)
    assert box(editor)["size"] == [width, height]


@in_nodes_2
def test_node_of_nodes_2_has_no_empty_half(editor):
    editor.clear()
    editor.search("token merging").filter(has_text=PATCH).click()
    editor.place(*ROOM)
    node = editor.node(PATCH_TYPE)
    # It keeps its number when it is opened again.
    widgets = node.get_by_test_id("node-widgets")

    def left_free():
        editor.page.evaluate(TWO_FRAMES)
        around, inside = node.bounding_box(), widgets.bounding_box()
        return around["y"] + around["height"] - inside["y"] - inside["height"]

    free = left_free()
    assert free < 100
    editor.page.evaluate(CHOOSE, "custom")
    reopen(editor)
    assert left_free() == pytest.approx(free, abs=0.01)
    node.get_by_text("Show advanced inputs").click()
    labels = node.get_by_test_id("widget-layout-field-label")
    for preset, names in ("custom", ALL), ("balanced", FEW):
        editor.page.evaluate(CHOOSE, preset)
        expect(labels).to_have_text(names)
        assert left_free() == pytest.approx(free, abs=0.01)


def expect_refusal(editor, sentence):
    """Run the graph; one input is marked, the model, and says why."""
    editor.run()
    editor.page.get_by_role("button", name="View details").click()
    infos = editor.page.get_by_role("button", name=f"Info for {PATCH} - ")
    expect(infos).to_have_count(1)
    editor.page.get_by_role("button", name=f"Info for {PATCH} - model").click()
    expect(editor.page.get_by_text(sentence)).to_be_visible()


@in_both_designs_unfolded
def test_undo_and_copies_show_what_counts(editor):
    editor.open(sample_graph())
    height = box(editor)["size"][1]
    editor.page.evaluate(CHOOSE, "custom")
    editor.page.evaluate(STRETCH, [0, 0])
    editor.click(*editor.page.evaluate(TITLE, PATCH_TYPE))
    editor.page.keyboard.press("Control+c")
    editor.click(-15, 700)
    editor.page.keyboard.press("Control+v")
    editor.page.wait_for_function(f"() => ({PATCHES})().length === 2")
    first, second = editor.page.evaluate(PATCHES)
    assert visible(editor, first) == visible(editor, second) == ALL
    editor.page.keyboard.press("Control+z")
    editor.page.wait_for_function(f"() => ({PATCHES})().length === 1")
    editor.page.keyboard.press("Control+z")
    editor.page.wait_for_function(f"() => ({VISIBLE})('{PATCH_TYPE}').length === {len(FEW)}")
    assert visible(editor) == FEW
    assert box(editor)["size"][1] == pytest.approx(height)


@in_both_designs
def test_hidden_inputs_are_saved_but_not_queued_also_of_a_version_that_showed_them(editor):
    graph = sample_graph(preset="balanced", sx=3)
    node_of(graph, PATCH_TYPE)["size"] = [300, 586]
    editor.open(graph)
    width, height = box(editor)["size"]
    assert width == 300 and height < 300
    editor.page.evaluate(CHOOSE, "custom")
    assert patch_inputs(editor)["sx"] == 3
    editor.page.evaluate(CHOOSE, "balanced")
    assert patch_inputs(editor).keys() == {"model", *FEW}
    reopen(editor)
    assert patch_inputs(editor).keys() == {"model", *FEW}
    editor.page.evaluate(CHOOSE, "custom")
    assert patch_inputs(editor)["sx"] == 3


def test_node_is_the_first_that_is_found_by_what_people_type(editor):
    editor.clear()
    # The editor puts its own Seed before "speed", which is spelt alike.
    expect(editor.search("speed").filter(has_text="ToMe").first).to_contain_text(PATCH)
    for text in (
        *("faster", "speed up", "speedup", "tomesd", "merge tokens", "accelerate", "acceleration"),
        *("optimize", "performance", "too slow", "token merging"),
    ):
        editor.page.keyboard.press("Escape")
        results = editor.search(text)
        expect(results.first).to_contain_text(PATCH)
    expect(results.filter(has_text=REMOVE)).to_be_visible()
    editor.page.keyboard.press("Escape")


@in_both_front_ends
@in_both_designs
def test_node_is_dropped_wired_with_the_mouse_and_run(editor, front_end):
    editor.open(small_graph())
    editor.page.evaluate("key => app.rootGraph.remove(nodeOf(key))", PATCH_TYPE)
    editor.look_at(*CORNER)
    editor.search("token merging").filter(has_text=PATCH).click()
    editor.place(*ROOM)
    editor.connect("CheckpointLoaderSimple", "MODEL", PATCH_TYPE, "model")
    editor.connect(PATCH_TYPE, "MODEL", "KSampler", "model")
    assert behind_the_sampler(editor) == [PATCH_TYPE, "CheckpointLoaderSimple"]

    read = len(front_end.log)
    run_to_image(editor, 64)
    assert re.search(r"\[ToMe\] .*2/2 steps|\[ToMe\] .*nothing merged", front_end.log[read:])
    assert "step 2/2" in editor.page.evaluate(REPORT, PATCH_TYPE)


def test_widgets_change_with_the_mouse(editor):
    editor.open(sample_graph(preset="custom"))
    editor.look_at(*CORNER)
    before = patch_inputs(editor)
    for name in "ratio", "max_downsample", "merge_mlp", "sx", "strategy", "proportional_attn":
        editor.step_up(PATCH_TYPE, name)
    changed = {"ratio": 0.65, "max_downsample": "1", "merge_mlp": True, "sx": 3}
    changed |= {"strategy": "window", "proportional_attn": False}
    assert patch_inputs(editor) == before | changed


@in_nodes_2
def test_widgets_change_with_the_mouse_in_nodes_2(editor):
    editor.open(sample_graph(preset="custom"))
    before = patch_inputs(editor)
    node, label = editor.node(PATCH_TYPE), editor.page.get_by_label("ratio", exact=True)
    ratio = node.get_by_test_id("node-widget").filter(has=label)
    ratio.get_by_test_id("increment").click()
    node.get_by_text("Show advanced inputs").click()
    node.get_by_label("merge_mlp").click()
    node.get_by_label("max_downsample").click()
    editor.page.get_by_role("option", name="1", exact=True).click()
    changed = {"ratio": 0.65, "max_downsample": "1", "merge_mlp": True}
    assert patch_inputs(editor) == before | changed


@in_nodes_2
def test_advanced_inputs_fold(editor, picture):
    editor.open(sample_graph())
    plain = [option.name for option in CAPTION.options if not option.advanced]
    node = editor.node(PATCH_TYPE)
    names = node.get_by_test_id("widget-layout-field-label")
    expect(names).to_have_text(plain)
    node.get_by_text("Show advanced inputs").click()
    expect(names).to_have_text(FEW)
    editor.look_at(*CORNER)
    picture(editor, "ToMePatchModel", (100, 60, 1080, 840))
    node.get_by_text("Hide advanced inputs").click()
    expect(names).to_have_text(plain)


@fresh_in_both_designs
def test_workflow_is_the_same_after_saving_and_loading_the_page_anew(
    fresh_editor, front_end, request
):
    graph = sample_graph(preset="custom", ratio=0.35, strategy="window", sy=4)
    # The server keeps what other profiles have saved.
    fresh_editor.open(graph, request.node.name)
    before = exported(fresh_editor)
    with fresh_editor.page.expect_response("**/api/userdata/**") as saved:
        fresh_editor.page.keyboard.press("Control+s")
        fresh_editor.page.get_by_role("button", name="Confirm").click()
    assert saved.value.ok
    fresh_editor.go_to(front_end.url)
    assert exported(fresh_editor) == before
    assert patch_inputs(fresh_editor)["ratio"] == 0.35


@fresh_in_nodes_2
def test_templates_are_shown_and_open_from_the_template_browser(fresh_editor):
    """Some of them; what is served is tested for all, and so is that they open."""
    editor, page = fresh_editor, fresh_editor.page
    # The list holds only what it has room for, and its search would replace it under a click.
    page.set_viewport_size({"width": 1600, "height": 2400})
    templates = page.get_by_role("dialog")
    for name in "tome_txt2img", "tome_wan_video":
        editor.clear()
        editor.execute("Comfy.BrowseTemplates")
        templates.get_by_text("tome-nodes", exact=True).click()
        for file in workflow_files():
            picture = templates.get_by_test_id(f"template-workflow-{file.stem}").get_by_role("img")
            expect(picture).to_have_js_property("naturalWidth", 800)
        templates.get_by_test_id(f"template-workflow-{name}").click()
        expect(templates).to_have_count(0)
        page.wait_for_function(HAS_NODES)
        assert exported(editor) == graph_of(WORKFLOWS / "api" / f"{name}.json")
        assert editor.warnings() == editor.errors == []


@fresh_in_both_designs
def test_bad_value_marks_one_input_with_our_sentence(fresh_editor, picture):
    fresh_editor.open(sample_graph(preset="custom", sx=1, sy=1))
    sentence = "sx=1 with sy=1 is not allowed: a cell of one token has nothing to merge"
    expect_refusal(fresh_editor, sentence)
    picture(fresh_editor, "refused", (240, 40, 1360, 640))
    with_errors = "() => app.rootGraph.nodes.filter(node => node.has_errors).map(node => node.type)"
    assert fresh_editor.page.evaluate(with_errors) == [PATCH_TYPE]


def test_model_without_the_patch_goes_to_a_sampler(editor, picture):
    graph = sample_graph()
    slots = {
        "inputs": [{"name": "model", "type": "MODEL", "link": None}],
        "outputs": [{"name": "MODEL", "type": "MODEL", "links": []}],
    }
    place = {"id": 20, "type": REMOVE_TYPE, "pos": [720, 340], "size": [260, 46]}
    graph["nodes"].append(place | slots)
    editor.open(graph)
    editor.look_at(*CORNER)
    editor.connect(PATCH_TYPE, "MODEL", REMOVE_TYPE, "model")
    editor.connect(REMOVE_TYPE, "MODEL", "KSampler", "model")
    picture(editor, "ToMeRemovePatch", (100, 60, 1440, 780))
    assert behind_the_sampler(editor)[:2] == [REMOVE_TYPE, PATCH_TYPE]


def graph_with_report(side):
    """A picture painted over a little, so that it stays one, with a report that shows it."""
    graph = small_graph("tome_img2img")
    node_of(graph, "ImageScale")["widgets_values"][1:3] = [side, side]
    node_of(graph, "KSampler")["widgets_values"][6] = 0.2
    sources = [("model", PATCH_TYPE, "MODEL"), ("samples", "KSampler", "LATENT")]
    inputs = []
    for slot, (name, source, kind) in enumerate([*sources, ("image", "ImageScale", "IMAGE")]):
        link, node = 100 + slot, node_of(graph, source)
        inputs.append({"name": name, "type": kind, "link": link})
        node["outputs"][0]["links"].append(link)
        graph["links"].append([link, node["id"], 0, 100, slot, kind])
    place = {"id": 100, "type": REPORT_TYPE, "pos": [2000, 0], "size": [560, 840]}
    graph["nodes"].append(place | {"inputs": inputs, "widgets_values": ["merge map", -1, -1, -1]})
    return graph


@in_both_front_ends
@in_both_designs
def test_live_line_and_report_are_shown(editor, picture, pytestconfig):
    # The picture of the help page has more to show.
    side, counts = (384, (2304, 918)) if pytestconfig.getoption("pictures") else (224, (784, 308))
    editor.open(graph_with_report(side), "report")
    run_to_image(editor, side)
    editor.page.wait_for_function(PICTURE_IS_SHOWN, arg=REPORT_TYPE)
    line = "4/4 blocks, {}\N{RIGHTWARDS ARROW}{} tokens, step 2/2".format(*counts)
    assert editor.page.evaluate(REPORT, PATCH_TYPE) == line
    shown = editor.page.evaluate(REPORT, REPORT_TYPE)
    assert shown.startswith("Done: merged 4 of 4 blocks")
    editor.look_at(1980, -60)
    picture(editor, "ToMeReport", (100, 110, 610, 885))
    # Undo makes new nodes, and so does coming back from another tab.
    editor.page.evaluate(MOVE_AND_UNDO)
    editor.page.wait_for_function(IS_SHOWN_AGAIN)
    assert editor.page.evaluate(REPORT, REPORT_TYPE) == shown
    assert editor.page.evaluate(REPORT, PATCH_TYPE) == line
    editor.open(graph_with_report(128), "other")
    assert editor.page.evaluate(REPORT, REPORT_TYPE) != shown
    editor.page.locator(".workflow-tab").filter(has_text="report").click()
    editor.page.wait_for_function(IS_SHOWN_AGAIN)
    assert editor.page.evaluate(REPORT, REPORT_TYPE) == shown
    assert editor.page.evaluate(REPORT, PATCH_TYPE) == line
    assert editor.warnings() == editor.errors == []


@in_both_front_ends
@in_both_designs
def test_node_with_a_picture_is_born_with_room_for_it_and_says_so(editor):
    for name, kind in ("ToMe Report", REPORT_TYPE), ("ToMe Tune", TUNE_TYPE):
        editor.clear()
        editor.look_at(*CORNER)
        editor.search(name).filter(has_text=name).first.click()
        editor.place(*ROOM)
        boxes = editor.page.evaluate(BOXES, kind)
        assert boxes["node"]["width"] >= 500 and boxes["node"]["height"] >= 700
        # In Nodes 2.0, there are the name of the pack and a button below.
        assert 0 <= boxes["node"]["bottom"] - boxes["report"]["bottom"] < 80
        assert "when the workflow has run" in editor.page.evaluate(REPORT, kind)
    assert editor.warnings() == editor.errors == []


@in_both_front_ends
@in_both_designs
def test_all_of_a_report_is_shown_in_a_node_of_any_size(editor):
    graph = graph_with_report(128)
    report = node_of(graph, REPORT_TYPE)
    report["size"] = [210, 150]
    editor.open(graph)
    editor.look_at(report["pos"][0] - 20, report["pos"][1] - 60, scale=0.5)
    editor.run()
    editor.page.wait_for_function(PICTURE_IS_SHOWN, arg=REPORT_TYPE)
    for width in (None, 560, 900):
        if width is not None:
            editor.page.evaluate(WIDEN, [REPORT_TYPE, width])
        for _ in range(3):
            editor.page.evaluate(TWO_FRAMES)
        boxes = editor.page.evaluate(BOXES, REPORT_TYPE)
        node, picture = boxes["node"], boxes["picture"]
        assert not boxes["isCut"]
        assert picture["width"] > 0.85 * node["width"]
        for inside in boxes["report"], picture:
            assert node["left"] <= inside["left"] and node["right"] >= inside["right"]
            assert node["top"] <= inside["top"] and node["bottom"] >= inside["bottom"]
    assert editor.warnings() == editor.errors == []


def place_and_wire(editor, blueprint, models, latent):
    """Link a blueprint from the search to and from a small graph."""
    checkpoint, prompt = "CheckpointLoaderSimple", "CLIPTextEncode"
    editor.open(small_graph())
    # The prompts are above the rest.
    editor.look_at(-20, -440, scale=0.65)
    editor.search(blueprint).filter(has_text=blueprint).first.click()
    editor.place(1200, 560)
    placed = editor.page.evaluate("() => app.rootGraph.nodes.find(node => node.subgraph).type")
    for source, output, name in (
        *((checkpoint, "MODEL", name) for name in models),
        *((prompt, "CONDITIONING", name) for name in ("positive", "negative")),
        *((latent[0], "LATENT", latent[1]), (checkpoint, "VAE", "vae")),
    ):
        editor.connect(source, output, placed, name)
    editor.connect(placed, "IMAGE", "SaveImage", "images")


# One in each design: what is wired and run is the same, and so is how.
@pytest.mark.parametrize(
    ("editor", "blueprint", "models", "latent", "side"),
    [
        (CLASSIC, "ToMe hires fix", ["model"], ("KSampler", "samples"), 128),
        # Any model samples in two parts; Wan's are too large to be written here.
        (
            *(NODES_2, "ToMe Wan 2.2 video", ["high_noise_model", "low_noise_model"]),
            *(("EmptyLatentImage", "latent"), 64),
        ),
    ],
    ids=["hires_fix", "wan"],
    indirect=["editor"],
)
def test_blueprint_is_placed_wired_and_run(editor, blueprint, models, latent, side):
    place_and_wire(editor, blueprint, models, latent)
    ratios = [inputs["ratio"] for inputs in inputs_of_patches(editor)]
    assert ratios == [0.6] * (1 + len(models))
    run_to_image(editor, side)


@in_designs("fresh_editor", zh=NODES_2 | {"Comfy.Locale": "zh"})
def test_names_and_tooltips_are_shown_in_the_language_of_the_editor(fresh_editor):
    """One that both the editor and the pack have; what is served is tested for all."""
    texts = graph_of(ROOT / "locales" / "zh" / "nodeDefs.json")[PATCH_TYPE]
    fresh_editor.open(small_graph())
    node = fresh_editor.node(PATCH_TYPE)
    expect(node).to_contain_text(texts["display_name"])
    ratio = texts["inputs"]["ratio"]
    node.get_by_text(ratio["name"], exact=True).hover()
    expect(fresh_editor.page.get_by_role("tooltip")).to_contain_text(ratio["tooltip"])
    assert fresh_editor.warnings() == fresh_editor.errors == []


@in_both_front_ends
def test_help_pages_are_shown_and_nothing_is_cut_in_their_narrow_panel(fresh_editor):
    page = fresh_editor.page
    shown = page.locator(".node-help-content")
    for caption in CAPTIONS:
        fresh_editor.clear()
        page.evaluate("kind => { app.rootGraph.add(LiteGraph.createNode(kind)) }", caption.id)
        fresh_editor.look_at(*CORNER)
        fresh_editor.click(*page.evaluate(TITLE, caption.id))
        if not shown.count():
            page.get_by_test_id("info-button").click()
        expect(shown.get_by_role("heading", name=caption.name)).to_be_visible()
        last = shown.get_by_role("listitem").filter(has_text=caption.names[-1])
        expect(last.first).to_be_visible()
        pictures = shown.get_by_role("img").all()
        assert pictures
        for picture in pictures:
            expect(picture).not_to_have_js_property("naturalWidth", 0)
        assert shown.evaluate(CUT) == []


@in_nodes_2
def test_tune_shows_what_it_found(editor, picture, pytestconfig):
    # The picture of the help page has larger differences to show.
    side, steps = (256, 12) if pytestconfig.getoption("pictures") else (128, 4)
    graph = small_graph("tome_tune", side=side)
    tune = node_of(graph, TUNE_TYPE)
    tune["widgets_values"][3:5] = [1, steps]
    tune["widgets_values"][-1] = True
    editor.open(graph)
    run_to_image(editor, side)
    editor.page.wait_for_function(PICTURE_IS_SHOWN, arg=TUNE_TYPE)
    text = editor.page.evaluate(REPORT, TUNE_TYPE)
    assert re.match("Found: |Not reached: |Unpatched: ", text)
    assert re.search(r"Trials: as long as \d+\.\d sampling runs", text)
    editor.page.evaluate(TWO_FRAMES)
    # What came out is below the inputs.
    editor.look_at(tune["pos"][0] - 20, tune["pos"][1] + 215)
    picture(editor, "ToMeTune", (100, 110, 620, 680))
    assert editor.warnings() == editor.errors == []
