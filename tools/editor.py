"""ComfyUI's editor in a headless browser: open workflow files, save them, take their pictures.

    python -m tools.editor

opens each file of `workflows/` and `subgraphs/` in the editor and saves it again. For a
workflow it also saves the API format, in `workflows/api/`, and a thumbnail with the title
of its note. Run it after you change the nodes' inputs or, in any ComfyUI, a workflow.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, sync_playwright

from tools.browser import PLAYWRIGHT, system_browser
from tools.environment import ROOT
from tools.server import HOST, ComfyServer

WORKFLOWS = ROOT / "workflows"
BLUEPRINTS = ROOT / "subgraphs"

# Every new ComfyUI has a file of this name in its input folder; here it is a picture of our own.
INPUT = "input/example.png"

# No news, no prompt for a file name, no mini map, no side panel, text at every zoom, and a graph
# that stays in place while a link is dragged near an edge. A new user who follows a link to a
# template sees only that; others also get a default workflow with its warnings. The server keeps
# settings across profiles, so every setting that any of them changes is here.
SETTINGS = {
    "Comfy.Locale": "en",
    "Comfy.VueNodes.Enabled": False,
    "Comfy.Node.AlwaysShowAdvancedWidgets": False,
    "Comfy.RightSidePanel.IsOpen": False,
    "Comfy.TutorialCompleted": False,
    "Comfy.Notification.ShowVersionUpdates": False,
    "Comfy.PromptFilename": False,
    "Comfy.Minimap.Visible": False,
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,
    "Comfy.Graph.AutoPanSpeed": 0,
}

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {HOST}",
]
PATIENCE_MS = 120_000
VIEWPORT = {"width": 1600, "height": 1000}
THUMBNAIL_SIZE = (800, 500)
THUMBNAIL_SCALE = 1.3
TITLE_HEIGHT, TITLE_FONT, TITLE_COLOUR = 120, 48, "#233323"

# The result that a workflow shows: a box in the picture of a help page.
HELP = ROOT / "web" / "docs"
RESULTS = {
    "tome_compare.json": ("ToMeReport.jpg", (42, 376, 558, 885)),
    "tome_tune.json": ("ToMeTune.jpg", (32, 280, 568, 571)),
}
RESULT_SIZE = (360, 360)

# Away from the editor's bars, which cover parts of the canvas.
THUMBNAIL_CORNER = {"x": 100, "y": 110}

# The front end itself sometimes raises this when it replaces one view with another.
HOSTS_OWN_ERROR = "Failed to execute 'removeChild' on 'Node'"

IS_READY = "() => window.app?.vueAppReady && !window.app.extensionManager.spinner"
LOOK = """([x, y, scale]) => {
    app.canvas.ds.scale = scale
    app.canvas.ds.offset = [x, y]
    app.canvas.draw(true, true)
}"""
TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
OPEN = """([name, graph]) => app.handleFile(
    new File([JSON.stringify(graph)], `${name}.json`, { type: 'application/json' }))"""
AT = """([x, y]) => {
    const [left, top] = app.canvas.ds.convertOffsetToCanvas([x, y])
    const canvas = app.canvas.canvas.getBoundingClientRect()
    return [left + canvas.x, top + canvas.y]
}"""
FUNCTIONS = """
window.nodeOf = key => app.rootGraph.nodes.find(node => node.type === key || node.id === key)
window.widgetOf = (key, name) => nodeOf(key).widgets.find(widget => widget.name === name)
window.slotOf = (key, side, name) => nodeOf(key)[side].findIndex(slot => slot.name === name)
"""
"""Functions for scripts of the page. A node's key is its id, or its type if it is the first."""

SLOT = """([key, side, name]) => {
    const node = nodeOf(key)
    const index = slotOf(key, side, name)
    const isInput = side === 'inputs'
    return {
        key: `${node.id}-${isInput ? 'in' : 'out'}-${index}`,
        at: [...(isInput ? node.getInputPos(index) : node.getOutputPos(index))],
        isElement: app.extensionManager.setting.get('Comfy.VueNodes.Enabled'),
    }
}"""
IS_LINKED = """([source, output, target, name]) => {
    const { link } = nodeOf(target).inputs[slotOf(target, 'inputs', name)]
    const { origin_id, origin_slot } = app.rootGraph.links.get(link) ?? {}
    // Not the first of its type any more, as a click moves a node to the end.
    const origin = nodeOf(origin_id)
    return origin?.type === source && origin.outputs[origin_slot].name === output
}"""
WIDGET = """([key, name]) => {
    const { pos, size } = nodeOf(key)
    return [pos[0] + size[0] - 25, pos[1] + widgetOf(key, name).y + 10]
}"""
HAS_NODES = "() => app.rootGraph.nodes.length > 0 && !app.extensionManager.spinner"
BLANK = {"version": 0.4, "nodes": [], "links": []}
TITLE_AND_PLACE = """() => {
    const ours = app.rootGraph.nodes.find(node => node.type.startsWith('ToMe'))
    return [nodeOf('MarkdownNote').title, ...ours.pos]
}"""


class Editor:
    """ComfyUI's front end in a browser page.

    Attributes:
        page: the page, for everything that has no method here.
        errors: errors that the page logged to the console or threw since the last open.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self._search_box = page.get_by_role("combobox", name="Add a node")
        page.on("console", self._note_logged)
        page.on("pageerror", lambda error: self._note(str(error)))

    def open(self, graph: dict[str, Any], name: str = "graph") -> None:
        """Open a workflow in the editor's format, as File > Open does with a file of this name."""
        self.errors.clear()
        self.page.evaluate(OPEN, [name, graph])
        self.page.evaluate(TWO_FRAMES)

    def clear(self) -> None:
        """Open an empty workflow."""
        self.open(BLANK)

    def look_at(self, left: float, top: float, scale: float = 1) -> None:
        """Scroll this point of the graph to the upper left corner of the free part of the page."""
        x, y = THUMBNAIL_CORNER["x"] / scale, THUMBNAIL_CORNER["y"] / scale
        self.page.evaluate(LOOK, [x - left, y - top, scale])
        self.page.evaluate(TWO_FRAMES)

    def click(self, x: float, y: float) -> None:
        """Click this point of the graph."""
        at = self.page.evaluate(AT, [x, y])
        self.page.mouse.move(*at)
        self.page.evaluate(TWO_FRAMES)
        self.page.mouse.click(*at)
        self.page.evaluate(TWO_FRAMES)

    def search(self, text: str) -> Locator:
        """Search the nodes for this text; returns the results."""
        # A double click on the canvas also opens it, but only after 300 ms.
        self.execute("Workspace.SearchBox.Toggle")
        self._search_box.fill(text)
        return self.page.get_by_test_id("result-item")

    def place(self, x: float, y: float) -> None:
        """Place the node chosen in the search, which follows the mouse, at this point."""
        self._search_box.wait_for(state="detached")
        self.page.wait_for_function("() => app.canvas.state.ghostNodeId !== null")
        self.click(x, y)
        self.page.wait_for_function("() => app.canvas.state.ghostNodeId === null")

    def connect(self, source: str, output: str, target: str, name: str) -> None:
        """Drag a link from an output to an input of the first nodes of these types."""
        self._move_to_slot(source, "outputs", output)
        self.page.mouse.down()
        self._move_to_slot(target, "inputs", name)
        self.page.mouse.up()
        self.page.wait_for_function(IS_LINKED, arg=[source, output, target, name])

    def step_up(self, kind: str, name: str) -> None:
        """Click the right end of a widget: a number grows, a choice moves on, a switch flips."""
        self.click(*self.page.evaluate(WIDGET, [kind, name]))

    def node(self, key: str | int) -> Locator:
        """The node of an id, or the first of a type, in Nodes 2.0, where nodes are elements."""
        number = self.page.evaluate("key => nodeOf(key).id", key)
        return self.page.locator(f"[data-node-id='{number}']")

    def run(self) -> None:
        """Press the button that queues the graph."""
        self.page.get_by_test_id("queue-button").click()

    def go_to(self, address: str) -> None:
        """Load this page of the server, and wait until the editor is ready."""
        self.page.goto(address)
        self.page.wait_for_function(IS_READY)
        self.page.evaluate(TWO_FRAMES)

    def warnings(self) -> list[str]:
        """The texts of the errors and notices that the editor shows over the graph."""
        return self.notices.all_inner_texts()

    @property
    def notices(self) -> Locator:
        """The boxes of `warnings`; the editor may show them some time after a graph is opened."""
        boxes = "[data-testid=error-overlay], [data-testid=error-dialog], .p-toast-message"
        return self.page.locator(boxes)

    def save(self) -> str:
        """The text of the open workflow's file, as File > Export writes it."""
        return self._export("workflow")

    def save_for_api(self) -> str:
        """The text of the open workflow in API format, as File > Export (API) writes it."""
        return self._export("output")

    def picture(self, name: str) -> bytes:
        """A JPEG: the title of the workflow's note, and below it the first of our nodes.

        The list of templates shows it small, with only the file's name beside it. Where a help page
        has a picture of the workflow's result, a part of that picture is beside the node.
        """
        title, left, top = self.page.evaluate(TITLE_AND_PLACE)
        self.look_at(left - 40, top - 60, THUMBNAIL_SCALE)
        width, height = THUMBNAIL_SIZE
        clip = {**THUMBNAIL_CORNER, "width": width, "height": height - TITLE_HEIGHT}
        graph = Image.open(BytesIO(self.page.screenshot(clip=clip)))
        card = Image.new("RGB", THUMBNAIL_SIZE, TITLE_COLOUR)
        card.paste(graph, (0, TITLE_HEIGHT))
        font = ImageFont.load_default(TITLE_FONT)
        ImageDraw.Draw(card).text((30, TITLE_HEIGHT // 2), title, "white", font, "lm")
        if name in RESULTS:
            file, box = RESULTS[name]
            with Image.open(HELP / file) as shown:
                result = ImageOps.contain(shown.crop(box), RESULT_SIZE)
            down = TITLE_HEIGHT + (height - TITLE_HEIGHT - result.height) // 2
            card.paste(result, (width - result.width - 10, down))
        data = BytesIO()
        card.save(data, "JPEG", quality=80)
        return data.getvalue()

    def execute(self, command: str) -> None:
        """Execute a command of the editor's menus, by its id."""
        self.page.evaluate("id => app.extensionManager.command.execute(id)", command)

    def _move_to_slot(self, kind: str, side: str, name: str) -> None:
        slot = self.page.evaluate(SLOT, [kind, side, name])
        if slot["isElement"]:
            dot = self.page.locator(f"[data-slot-key='{slot['key']}']")
            self.page.get_by_test_id("slot-connection-dot").filter(has=dot).hover()
        else:
            self.page.mouse.move(*self.page.evaluate(AT, slot["at"]), steps=5)

    def _export(self, part: str) -> str:
        # The command would download a file, and the browser stops a page's downloads after ten.
        return self.page.evaluate(
            "async part => JSON.stringify((await app.graphToPrompt())[part], null, 2)", part
        )

    def _note_logged(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._note(f"{message.text} ({message.location['url']})")

    def _note(self, error: str) -> None:
        if HOSTS_OWN_ERROR not in error:
            self.errors.append(error)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser that can reach only this machine."""
    os.environ.update(PLAYWRIGHT)
    with sync_playwright() as playwright:
        # Without a path, it is Playwright's own.
        browser = playwright.chromium.launch(executable_path=system_browser(), args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def open_editor(
    browser: Browser, server: ComfyServer, settings: dict[str, Any] | None = None
) -> Iterator[Editor]:
    """The editor of a running server in a fresh profile, with these additional settings."""
    with browser.new_context(viewport=VIEWPORT) as context:
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script(FUNCTIONS)
        context.request.post(f"{server.url}/settings", data=SETTINGS | (settings or {}))
        editor = Editor(context.new_page())
        editor.go_to(f"{server.url}/?template=tome_txt2img&source=tome-nodes")
        yield editor


def workflow_files() -> list[Path]:
    """The sample workflows in the editor's format."""
    return sorted(WORKFLOWS.glob("*.json"))


def blueprint_files() -> list[Path]:
    """The subgraph blueprints."""
    return sorted(BLUEPRINTS.glob("*.json"))


def graph_of(file: Path) -> dict[str, Any]:
    """The graph of a workflow file."""
    return json.loads(file.read_text(encoding="utf-8"))


def models_of(workflow: dict[str, Any]) -> list[dict[str, str]]:
    """The models that a workflow loads: the `name`, `url` and `directory` of each file."""
    nodes = workflow["nodes"]
    return [model for node in nodes for model in node["properties"].get("models", ())]


def offer_files(server: ComfyServer) -> None:
    """Make the server list the workflows' models, as empty files, and their input picture."""
    for workflow in workflow_files():
        for model in models_of(graph_of(workflow)):
            file = server.base / "models" / model["directory"] / model["name"]
            file.parent.mkdir(exist_ok=True)
            file.touch()
    Image.open(Path(__file__).with_name("example.webp")).save(server.base / INPUT)


def main() -> None:
    """Save all sample workflows and blueprints again."""
    with tempfile.TemporaryDirectory() as base, ComfyServer(base) as server:
        offer_files(server)
        with open_browser() as browser, open_editor(browser, server) as editor:
            for file in [*workflow_files(), *blueprint_files()]:
                editor.open(graph_of(file))
                if problems := editor.warnings() + editor.errors:
                    raise RuntimeError(f"{file.name}: {'; '.join(problems)}")
                file.write_text(editor.save(), encoding="utf-8")
                print(f"saved {file.relative_to(ROOT)}")
                if file.parent == WORKFLOWS:
                    for_api = WORKFLOWS / "api" / file.name
                    for_api.write_text(editor.save_for_api(), encoding="utf-8")
                    file.with_suffix(".jpg").write_bytes(editor.picture(file.name))


if __name__ == "__main__":
    main()
