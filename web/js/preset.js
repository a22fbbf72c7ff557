import { app } from "../../../scripts/app.js";

const NODE = "ToMePatchModel";
const CUSTOM = "custom";
// What counts under every preset; the server's tome_nodes/presets.py decides.
const FREE = new Set(["ratio", "preset", "seed", "start_percent", "end_percent", "backend"]);

let presets = [];

function* allNodes(graph) {
  yield* graph?.nodes ?? [];
  for (const subgraph of graph?.definitions?.subgraphs ?? []) yield* subgraph.nodes ?? [];
}

app.registerExtension({
  name: "ToMeNodes.Preset",

  beforeRegisterNodeDef(_, definition) {
    if (definition.name === NODE) presets = definition.input.optional.preset[1].options;
  },

  // Widgets are saved by their place: a file from before there were presets lacks the second.
  beforeConfigureGraph(graph) {
    for (const { type, widgets_values: values } of allNodes(graph)) {
      if (type === NODE && Array.isArray(values) && values.length > 1 && !presets.includes(values[1]))
        values.splice(1, 0, CUSTOM);
    }
  },

  nodeCreated(node) {
    if (node.comfyClass !== NODE) return;
    const preset = node.widgets.find((widget) => widget.name === "preset");
    const show = () => {
      for (const widget of node.widgets)
        if (!FREE.has(widget.name)) widget.disabled = preset.value !== CUSTOM;
    };
    const { callback } = preset;
    preset.callback = function (...values) {
      callback?.apply(this, values);
      show();
    };
    const { onConfigure } = node;
    node.onConfigure = function (...values) {
      onConfigure?.apply(this, values);
      show();
    };
    show();
  },
});
