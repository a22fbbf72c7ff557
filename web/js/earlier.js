import { app } from "../../../scripts/app.js";

const NODE = "ToMePatchModel";
// As tome_nodes/settings/removed.py has them: the presets that are gone, and as which each is read;
// and the inputs that are gone. Workflow files hold the values of inputs by place. Each of these
// inputs, a number, once stood in front of a switch. A file with it cannot be told by its number of
// values: the host takes one of them for that of an input without a value, and further inputs may
// come at the end.
let readAs, gone;

function warn(name, value, why) {
  app.extensionManager.toast.add({
    severity: "warn",
    summary: "ToMe Patch Model",
    detail: `This workflow has ${name}=${value}, which is ignored now: ${why}.`,
  });
}

// What a file has of a node, as this version has it. The names are those of its values.
function current(saved, names) {
  if (!Array.isArray(saved.widgets_values)) return saved;
  const values = [...saved.widgets_values];
  const preset = values[names.indexOf("preset")];
  if (preset in readAs) values[names.indexOf("preset")] = readAs[preset];
  for (const { name, followed_by: next, default: unset, why } of gone) {
    const place = names.indexOf(next);
    if (typeof values[place] !== "number") continue;
    const [value] = values.splice(place, 1);
    if (preset === "custom" && value !== unset) warn(name, value, why);
  }
  const isGone = (name) => gone.some((input) => input.name === name);
  const inputs = saved.inputs?.filter(({ name, link }) => !isGone(name) || link != null);
  return { ...saved, inputs, widgets_values: values };
}

app.registerExtension({
  name: "tomenodes.Earlier",

  beforeRegisterNodeDef(kind, definition) {
    if (definition.name !== NODE) return;
    ({ read_as: readAs, gone } = definition.input.optional.preset[1]);
    const { configure } = kind.prototype;
    kind.prototype.configure = function (saved) {
      configure.call(this, current(saved, this.widgets.map(({ name }) => name)));
    };
  },
});
