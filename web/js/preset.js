import { app } from "../../../scripts/app.js";

const NODE = "ToMePatchModel";
// As tome_nodes/settings/presets.py has them: the preset that decides nothing, and the inputs that
// none decides.
let custom, free;

const ROW = LiteGraph.NODE_WIDGET_HEIGHT + 4;
const TITLE = -LiteGraph.NODE_TITLE_HEIGHT + 5;

app.registerExtension({
  name: "tomenodes.Preset",

  beforeRegisterNodeDef(_, definition) {
    if (definition.name !== NODE) return;
    ({ custom, free } = definition.input.optional.preset[1]);
  },

  nodeCreated(node) {
    if (node.comfyClass !== NODE) return;
    const preset = node.widgets.find((widget) => widget.name === "preset");
    const others = node.widgets.filter(({ name }) => name !== "preset" && !free.includes(name));
    const isLinked = (name) => node.inputs.some((slot) => slot.name === name && slot.link != null);
    // A preset that comes over a link is not known here.
    const decides = () => preset.value !== custom && !isLinked("preset");

    // The queue refuses what does not count. The saved workflow keeps it for the next change.
    for (const widget of others)
      widget.serializeValue = () => (decides() ? undefined : widget.value);

    // Show what counts, and what has a link; return how many more rows that makes. (The host may
    // call a widget with a link hidden, although it has a row.)
    let hidden = new Set();
    const show = () => {
      const before = hidden.size;
      hidden = new Set(others.filter(({ name }) => decides() && !isLinked(name)));
      for (const widget of others) {
        widget.hidden = widget.options.hidden = hidden.has(widget);
        // While a link is dragged, its slot is drawn even so: behind the title, not where it was.
        if (hidden.has(widget)) widget.y = TITLE;
      }
      // Nodes 2.0 reads the options of widgets when their list changes.
      node.widgets.push(node.widgets.pop());
      return before - hidden.size;
    };
    // The host counts inputs that Nodes 2.0 folds away.
    const { computeSize } = node;
    const isFolded = (widget) =>
      widget.options.advanced && !hidden.has(widget) && !isLinked(widget.name);
    node.computeSize = function (...values) {
      const size = computeSize.apply(this, values);
      if (LiteGraph.vueNodesMode && !this.showAdvanced)
        size[1] -= ROW * this.widgets.filter(isFolded).length;
      return size;
    };
    const resize = (rows) => {
      if (rows === 0) return;
      const [width, height] = node.size;
      const least = node.computeSize()[1];
      // Nodes 2.0 itself makes a node higher where it must be.
      const fitting = LiteGraph.vueNodesMode
        ? Math.min(height, least)
        : Math.max(height + rows * ROW, least);
      node.setSize([width, fitting]);
    };
    const after = (name, then, owner = node) => {
      const before = owner[name];
      owner[name] = function (...values) {
        before?.apply(this, values);
        then(...values);
      };
    };
    after("callback", () => resize(show()), preset);
    after("onConnectionsChange", () => resize(show()));
    after("onConfigure", ({ size }) => {
      show();
      if (!size) return;
      node.setSize([...size]);
      // A file may be of a version that only greyed out what it now hides.
      if (size[1] - node.computeSize()[1] > (hidden.size * ROW) / 2) resize(-hidden.size);
    });
    resize(show());
  },
});
