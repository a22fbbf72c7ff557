import { app } from "../../../scripts/app.js";

const NODE = "ToMePatchModel";
// As tome_nodes/presets.py has them: the preset that decides nothing, and the inputs that none
// decides.
let custom, free;

app.registerExtension({
  name: "ToMeNodes.Preset",

  beforeRegisterNodeDef(_, definition) {
    if (definition.name !== NODE) return;
    ({ custom, free } = definition.input.optional.preset[1]);
  },

  nodeCreated(node) {
    if (node.comfyClass !== NODE) return;
    const preset = node.widgets.find((widget) => widget.name === "preset");
    const others = node.widgets.filter(({ name }) => name !== "preset" && !free.includes(name));
    // A preset that comes over a link is not known here.
    const isLinked = () => node.inputs.some(({ name, link }) => name === "preset" && link != null);
    const decides = () => preset.value !== custom && !isLinked();

    // The queue refuses what does not count. The saved workflow keeps it for the next change.
    for (const widget of others)
      widget.serializeValue = () => (decides() ? undefined : widget.value);

    const show = () => {
      for (const widget of others) widget.disabled = decides();
    };
    const after = (owner, name) => {
      const before = owner[name];
      owner[name] = function (...values) {
        before?.apply(this, values);
        show();
      };
    };
    after(preset, "callback");
    after(node, "onConfigure");
    after(node, "onConnectionsChange");
    show();
  },
});
