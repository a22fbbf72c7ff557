import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

// The nodes, and how much room each is born with for its text and picture.
const ROOM = { ToMeReport: 720, ToMeTune: 600 };
const WIDTH = 560;
const MARGIN = 10;
const HOSTS_PICTURE = "$$canvas-image-preview";

// The elements of a report's lines; the first says what came out.
function linesOf(text) {
  return text.split("\n").map((line, index) => {
    const element = document.createElement("div");
    element.textContent = line;
    if (index === 0) element.style.fontWeight = "bold";
    if (line.startsWith("Hint:")) element.style.color = "#f2a65a";
    return element;
  });
}

async function loaded({ filename, subfolder, type }) {
  const picture = new Image();
  const query = new URLSearchParams({ filename, subfolder, type, rand: Math.random() });
  picture.src = api.apiURL(`/view?${query}`);
  picture.style.width = "100%";
  await picture.decode();
  return picture;
}

function heightAt(element, width) {
  const copy = element.cloneNode(true);
  Object.assign(copy.style, { position: "absolute", visibility: "hidden", width: `${width}px` });
  copy.classList.remove("h-full", "w-full");
  document.body.append(copy);
  const height = copy.offsetHeight;
  copy.remove();
  return height;
}

// How to show an output on each of our nodes.
const shows = new WeakMap();

// After an undo or in another tab, nodes are new ones, and the host has their outputs still.
function restore(outputs) {
  const root = app.rootGraph ?? app.graph;
  for (const graph of [root, ...(root.subgraphs?.values() ?? [])]) {
    for (const node of graph.nodes) {
      const output = outputs[graph === root ? node.id : `${graph.id}:${node.id}`];
      if (output?.text) shows.get(node)?.(output);
    }
  }
}

// The host cuts a long text, and draws a picture as large as the room that happens to be left.
app.registerExtension({
  name: "ToMeNodes.Report",

  onNodeOutputsUpdated: restore,

  afterConfigureGraph() {
    restore(app.nodeOutputs);
  },

  nodeCreated(node) {
    if (!(node.comfyClass in ROOM)) return;
    const element = document.createElement("div");
    Object.assign(element.style, {
      display: "flex",
      flexDirection: "column",
      gap: "8px",
      fontSize: "12px",
      lineHeight: "16px",
      userSelect: "text",
      overflowWrap: "anywhere",
    });
    const widget = node.addDOMWidget("report", "report", element, {
      serialize: false,
      hideInPanel: true,
      hideOnZoom: false,
      margin: MARGIN,
    });
    widget.serialize = false;

    // In the classic design, a widget has to say how high it is. In Nodes 2.0, one that does not
    // say it is as high as what is in it.
    let height = 0;
    let measuredAt;
    widget.computeLayoutSize = undefined;
    widget.computeSize = () => {
      const width = node.size[0] - 2 * MARGIN;
      if (width !== measuredAt) {
        measuredAt = width;
        height = element.hasChildNodes() ? heightAt(element, width) + 2 * MARGIN : 0;
      }
      return [0, height];
    };

    const show = (...parts) => {
      element.replaceChildren(...parts);
      measuredAt = undefined;
      if (!LiteGraph.vueNodesMode) node.expandToFitContent();
      node.setDirtyCanvas(true, true);
    };

    let latest;
    const showOutput = async (output) => {
      latest = output;
      // From now on, this shows the picture instead of the host.
      node.hideOutputImages = true;
      node.onDrawBackground = () => {};
      const hosts = node.widgets.findIndex(({ name }) => name === HOSTS_PICTURE);
      if (hosts >= 0) node.widgets.splice(hosts, 1);

      const text = document.createElement("div");
      text.append(...linesOf(output.text[0]));
      show(text);
      // The host deletes its temporary pictures when it starts.
      const picture = await loaded(output.images[0]).catch(() => null);
      if (!picture || latest !== output) return;
      // The host's menu of a node saves and copies these.
      node.imgs = [picture];
      show(text, picture);
    };
    shows.set(node, showOutput);

    const before = node.onExecuted;
    node.onExecuted = function (output) {
      before?.call(this, output);
      return showOutput(output);
    };

    const [width, least] = node.computeSize();
    node.setSize([Math.max(width, WIDTH), least + ROOM[node.comfyClass]]);
  },
});
