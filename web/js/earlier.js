import { app } from "../../../scripts/app.js";

const NODE = "ToMePatchModel";
// Workflow files hold the values of inputs by place. The input st, a number, once stood in front of
// this one, a switch. A file with st cannot be told by its number of values: the host takes one of
// them for that of an input without a value, and further inputs may come at the end.
const AFTER_ST = "use_rand";

// The presets that are gone, and as which each is read.
let readAs;

function warn(st) {
  app.extensionManager.toast.add({
    severity: "warn",
    summary: "ToMe Patch Model",
    detail:
      `This workflow has st=${st}, and there is no st any more: ` +
      "the number of frames decides how many frames a cell spans, as it did with st=0.",
  });
}

// What a file has of a node, as this version has it. The names are those of its values.
function current(saved, names) {
  if (!Array.isArray(saved.widgets_values)) return saved;
  const values = [...saved.widgets_values];
  const place = names.indexOf(AFTER_ST);
  const preset = values[names.indexOf("preset")];
  if (preset in readAs) values[names.indexOf("preset")] = readAs[preset];
  if (typeof values[place] === "number") {
    const [st] = values.splice(place, 1);
    if (preset === "custom" && st !== 0) warn(st);
  }
  const inputs = saved.inputs?.filter(({ name, link }) => name !== "st" || link != null);
  return { ...saved, inputs, widgets_values: values };
}

app.registerExtension({
  name: "tomenodes.Earlier",

  beforeRegisterNodeDef(kind, definition) {
    if (definition.name !== NODE) return;
    readAs = definition.input.optional.preset[1].read_as;
    const { configure } = kind.prototype;
    kind.prototype.configure = function (saved) {
      configure.call(this, current(saved, this.widgets.map(({ name }) => name)));
    };
  },
});
