import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { addPanel } from "./panel.js";

// The nodes that show what a run gives back, and how much room each is born with for it.
const ROOM = { ToMeReport: 670, ToMeTune: 550 };
const WIDTH = 560;
// The host's own widgets for a picture and a line, which ours replace.
const HOSTS_PICTURE = "$$canvas-image-preview";
const HOSTS_LINE = "$$node-text-preview";

// The node whose line says what each step merges.
const LIVE = "ToMePatchModel";

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

// What stands where the report comes.
function placeholder() {
  const element = document.createElement("div");
  element.textContent = "The report comes here when the workflow has run.";
  Object.assign(element.style, {
    flex: "1",
    display: "flex",
    alignItems: "center",
    justifyContent: "center",
    textAlign: "center",
    border: "1px dashed currentColor",
    borderRadius: "8px",
    opacity: "0.8",
  });
  return element;
}

// How to show an output on each of our nodes.
const shows = new WeakMap();

const rootGraph = () => app.rootGraph ?? app.graph;

// The key of a node among the host's outputs.
const keyOf = (node) =>
  node.graph === rootGraph() ? `${node.id}` : `${node.graph.id}:${node.id}`;

// After an undo or in another tab, nodes are new ones, and the host has their outputs still.
function restore(outputs) {
  for (const graph of [rootGraph(), ...(rootGraph().subgraphs?.values() ?? [])]) {
    for (const node of graph.nodes) {
      const output = outputs[keyOf(node)];
      if (output?.text) shows.get(node)?.(output);
    }
  }
}

// The node of an id such as 3, or 7:3 in the subgraph that node 7 holds.
function nodeOf(id) {
  const [own, ...holders] = id.split(":").reverse();
  const inside = (graph, holder) => graph?.getNodeById(holder)?.subgraph;
  return holders.reduceRight(inside, rootGraph())?.getNodeById(own);
}

function removeHosts(node, name) {
  const widget = node.widgets.find((widget) => widget.name === name);
  if (widget) node.removeWidget(widget);
}

// The newest front end takes its own line away when the run ends, and none keeps it over an undo.
function showLine({ detail: { nodeId, text } }) {
  const node = nodeOf(`${nodeId}`);
  if (node?.comfyClass !== LIVE) return;
  removeHosts(node, HOSTS_LINE);
  const output = { text: [text] };
  app.nodeOutputs[keyOf(node)] = output;
  shows.get(node)(output);
}

function showsLines(node) {
  let panel;
  shows.set(node, ({ text }) => {
    panel ??= addPanel(node);
    const line = document.createElement("div");
    line.style.whiteSpace = "pre-line";
    line.textContent = text[0];
    panel.show(line);
  });
}

function showsReports(node) {
  const panel = addPanel(node);
  panel.put(placeholder());

  let latest;
  const showOutput = async (output) => {
    latest = output;
    // From now on, this shows the picture instead of the host.
    node.hideOutputImages = true;
    node.onDrawBackground = () => {};
    removeHosts(node, HOSTS_PICTURE);

    const text = document.createElement("div");
    text.append(...linesOf(output.text[0]));
    panel.show(text);
    // The host deletes its temporary pictures when it starts.
    const picture = await loaded(output.images[0]).catch(() => null);
    if (!picture || latest !== output) return;
    // The host's menu of a node saves and copies these.
    node.imgs = [picture];
    panel.show(text, picture);
  };
  shows.set(node, showOutput);

  const before = node.onExecuted;
  node.onExecuted = function (output) {
    before?.call(this, output);
    return showOutput(output);
  };

  const [width, least] = node.computeSize();
  node.setSize([Math.max(width, WIDTH), least + ROOM[node.comfyClass]]);
}

app.registerExtension({
  name: "tomenodes.Report",

  setup() {
    api.addEventListener("progress_text", showLine);
  },

  onNodeOutputsUpdated: restore,

  afterConfigureGraph() {
    restore(app.nodeOutputs);
  },

  nodeCreated(node) {
    if (node.comfyClass === LIVE) showsLines(node);
    else if (node.comfyClass in ROOM) showsReports(node);
  },
});
