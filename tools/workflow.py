"""Read and change graphs in ComfyUI's API format: node ids to their class and inputs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.errors import ToolError

Graph = dict[str, dict[str, Any]]
"""A graph in the API format, which the server's queue accepts."""

SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced")
LOADERS = ("CheckpointLoaderSimple", "ImageOnlyCheckpointLoader")
PATCH = "ToMePatchModel"
PAINTER = "DemoPainter"
"""The node in `tools/demo_nodes` that stands in for a loader."""


def load_graph(path: Path) -> Graph:
    """Read a workflow file in the API format.

    Raises:
        ToolError: the file cannot be used.
    """
    try:
        graph = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ToolError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ToolError(f"{path} is not a JSON file: {error}.") from error
    if isinstance(graph, dict) and isinstance(graph.get("nodes"), list):
        raise ToolError(
            f"{path} is in the editor's format, which the server's queue does not accept. Open it "
            "in ComfyUI, choose Workflow > Export (API) in the menu, and use the saved file."
        )
    nodes = graph.values() if isinstance(graph, dict) else ()
    if not nodes or not all(isinstance(node, dict) and "class_type" in node for node in nodes):
        raise ToolError(
            f"{path} is not a workflow in the API format: a node id with its class_type and inputs "
            "for each node."
        )
    return graph


def checkpoint_names(graph: Graph) -> list[str]:
    """The checkpoints of its loaders."""
    return [inputs["ckpt_name"] for _, inputs in _of_class(graph, *LOADERS)]


def with_checkpoint(graph: Graph, name: str) -> Graph:
    """The graph with `name` in all of its checkpoint loaders."""
    return _with_input(graph, "ckpt_name", name, *LOADERS)


def painted(graph: Graph, prompt: str) -> Graph:
    """The graph with the demo's own model in all of its checkpoint loaders, and with a prompt."""
    changed = copy.deepcopy(graph)
    for node in graph.values():
        positive = node["inputs"].get("positive")
        if isinstance(positive, list) and "text" in changed[positive[0]]["inputs"]:
            changed[positive[0]]["inputs"]["text"] = prompt
    for node in changed.values():
        if node["class_type"] in LOADERS:
            node["class_type"], node["inputs"] = PAINTER, {}
    return changed


def without_merging(graph: Graph) -> Graph:
    """The graph with ratio 0 in all of its ToMe nodes, so that nothing merges."""
    return _with_input(graph, "ratio", 0.0, PATCH)


def merges(graph: Graph) -> bool:
    """Whether the graph has a ToMe node that merges."""
    return any(inputs.get("ratio") != 0 for _, inputs in _of_class(graph, PATCH))


def with_steps(graph: Graph, most: int) -> Graph:
    """The graph with at most `most` steps in nodes that have steps."""
    changed = copy.deepcopy(graph)
    for node in changed.values():
        inputs = node["inputs"]
        if isinstance(inputs.get("steps"), int) and inputs["steps"] > most:
            shrink = most / inputs["steps"]
            inputs["steps"] = most
            for limit in ("start_at_step", "end_at_step"):
                if isinstance(inputs.get(limit), int):
                    inputs[limit] = min(most, round(inputs[limit] * shrink))
    return changed


def with_scale(graph: Graph, factor: float) -> Graph:
    """The graph with `factor` times each width and height, in whole multiples of 64 pixels."""
    changed = copy.deepcopy(graph)
    for node in changed.values():
        for side in ("width", "height"):
            if isinstance(node["inputs"].get(side), int):
                node["inputs"][side] = max(1, round(node["inputs"][side] * factor / 64)) * 64
    return changed


def as_new_run(graph: Graph, run: int) -> Graph:
    """The graph with the same results, but with samplers that are not in the server's cache.

    The server ignores inputs that a node does not have, but its cache does not.
    """
    return _with_input(graph, "tome_run", run, *SAMPLERS)


def titles(graph: Graph) -> dict[str, str]:
    """The titles of the samplers of the graph, by their node ids."""
    return {
        node: graph[node].get("_meta", {}).get("title") or f"{graph[node]['class_type']} {node}"
        for node, _ in _of_class(graph, *SAMPLERS)
    }


def _with_input(graph: Graph, name: str, value: Any, *classes: str) -> Graph:
    changed = copy.deepcopy(graph)
    for _, inputs in _of_class(changed, *classes):
        inputs[name] = value
    return changed


def _of_class(graph: Graph, *classes: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, node in graph.items():
        if node["class_type"] in classes:
            yield name, node["inputs"]
