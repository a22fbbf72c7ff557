import { app } from "../../../scripts/app.js";

const NODE = "ToMePatchModel";
// As tome_nodes/presets.py has them: all presets, the one that decides nothing, and the inputs that
// none decides.
let presets, custom, free;

function* allNodes(graph) {
  yield* graph?.nodes ?? [];
  for (const subgraph of graph?.definitions?.subgraphs ?? []) yield* subgraph.nodes ?? [];
}

app.registerExtension({
  name: "ToMeNodes.Preset",

  beforeRegisterNodeDef(_, definition) {
    if (definition.name !== NODE) return;
    ({ options: presets, custom, free } = definition.input.optional.preset[1]);
  },

  // Widgets are saved by their place: a file from before there were presets lacks the second.
  beforeConfigureGraph(graph) {
    for (const { type, widgets_values: values } of allNodes(graph)) {
      if (type === NODE && Array.isArray(values) && values.length > 1 && !presets.includes(values[1]))
        values.splice(1, 0, custom);
    }
  },

  nodeCreated(node) {
    if (node.comfyClass !== NODE) return;
    const preset = node.widgets.find((widget) => widget.name === "preset");
    const show = () => {
      for (const widget of node.widgets)
        if (widget !== preset && !free.includes(widget.name))
          widget.disabled = preset.value !== custom;
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
