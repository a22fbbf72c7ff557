import { app } from "../../../scripts/app.js";

const MARGIN = 10;

function heightAt(element, width) {
  const copy = element.cloneNode(true);
  Object.assign(copy.style, { position: "absolute", visibility: "hidden", width: `${width}px` });
  copy.classList.remove("h-full", "w-full");
  app.canvas.canvas.parentElement.append(copy);
  const height = copy.offsetHeight;
  copy.remove();
  return height;
}

// Add a part to a node that shows elements, and return what puts them there. It is as high as they
// are; before there are any, it takes the room that is left. (The host cuts a long text, and draws
// picture as large as the room that happens to be left.)
export function addPanel(node) {
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

  let height;
  let measuredAt;
  // Only the classic design asks.
  const computeSize = () => {
    const width = node.size[0] - 2 * MARGIN;
    if (width !== measuredAt) {
      measuredAt = width;
      height = heightAt(element, width) + 2 * MARGIN;
    }
    return [0, height];
  };

  const put = (...parts) => element.replaceChildren(...parts);
  const show = (...parts) => {
    put(...parts);
    measuredAt = undefined;
    widget.computeSize = computeSize;
    if (!LiteGraph.vueNodesMode) node.expandToFitContent();
    node.setDirtyCanvas(true, true);
  };
  return { put, show };
}
