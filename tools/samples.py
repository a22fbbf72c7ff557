"""Sample workflows as nodes in columns, and how they become files of the editor.

What the samples are is in `tools/sample_workflows.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from tome_nodes.comfyui.node_texts import PATCH
from tome_nodes.settings.presets import CUSTOM, FREE, PRESET

HUGGING_FACE = "https://huggingface.co"

GAP, COLUMN_GAP, TITLE_BAR, GROUP_MARGIN, GROUP_TITLE = 35, 55, 30, 15, 40
SLOT, WIDGET, MARGIN, TEXT, PICTURE = 20, 24, 14, 120, 220
NOTE_SIZE = (930, 250)
OUR_COLOURS = {"color": "#232", "bgcolor": "#353"}
GROUP_COLOUR, OUR_GROUP_COLOUR = "#8AA", "#8A8"
SIMPLE = {"INT", "FLOAT", "FLOAT,INT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"}

Schema = Mapping[str, Any]
"""What the server tells of a class of nodes under `/object_info`."""

Link = tuple[str, int]
"""An output: the name of a node in its sample, and the place of the output."""


@dataclass(frozen=True)
class Node:
    """A node of a sample.

    Attributes:
        kind: its class.
        values: of its widgets; all others have their defaults.
        links: what its inputs are connected to.
        title: on the node; empty for that of its class.
        models: the folder of each file that it loads, and its path on Hugging Face.
    """

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    title: str = ""
    models: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Column:
    """Nodes by name, below each other, in a group with this title."""

    title: str
    width: int
    nodes: Mapping[str, Node]


@dataclass(frozen=True)
class Sample:
    """A workflow: its columns from left to right, and its note below them."""

    title: str
    note: str
    columns: Sequence[Column]


@dataclass(frozen=True)
class _Input:
    """An input of a class, as its schema has it."""

    name: str
    kind: Any
    options: Mapping[str, Any]
    is_optional: bool

    @property
    def is_widget(self) -> bool:
        is_simple = isinstance(self.kind, list) or self.kind in SIMPLE
        return is_simple and not self.options.get("forceInput")

    @property
    def default(self) -> Any:
        """As in the editor: that of the schema, else the first choice."""
        if "default" in self.options:
            return self.options["default"]
        choices = self.kind if isinstance(self.kind, list) else self.options.get("options", [""])
        first = choices[0] if choices else ""
        return first["key"] if isinstance(first, dict) else first

    @property
    def companions(self) -> list[str]:
        """The values of the widgets that the editor adds below this one."""
        is_seed = self.options.get("control_after_generate", self.name in ("seed", "noise_seed"))
        is_picture = self.options.get("image_upload")
        return [*(["fixed"] if is_seed else []), *(["image"] if is_picture else [])]


def editor_graph(sample: Sample, info: Mapping[str, Schema]) -> dict[str, Any]:
    """The sample in the editor's format.

    Args:
        sample: what to make.
        info: the schema of each class.

    Raises:
        ValueError: a node has values or links for inputs that its class does not have.
    """
    named = {name: node for column in sample.columns for name, node in column.nodes.items()}
    numbers = {name: number for number, name in enumerate(named, 1)}
    links = [*_links(named, numbers, info)]
    nodes: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    left = lowest = 0
    for number, column in enumerate(sample.columns, 1):
        top = 0
        for name, node in column.nodes.items():
            height = _height(node, info[node.kind])
            place = {"pos": [left, top], "size": [column.width, height]}
            nodes.append(_node(numbers[name], node, info[node.kind], links) | place)
            top += height + TITLE_BAR + GAP
        bottom = top - TITLE_BAR - GAP
        groups.append(_group(number, column, left, bottom))
        left += column.width + COLUMN_GAP
        lowest = max(lowest, bottom)
    nodes.append(_note(len(nodes) + 1, sample, lowest + 2 * GROUP_TITLE))
    return {
        "id": str(uuid5(NAMESPACE_URL, sample.title)),
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": groups,
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def model_files(samples: Iterable[Sample]) -> list[str]:
    """The files that samples load, each once, as `folder/name`."""
    files = {
        f"{folder}/{path.rpartition('/')[2]}": None
        for sample in samples
        for column in sample.columns
        for node in column.nodes.values()
        for folder, path in node.models
    }
    return [*files]


def _inputs(schema: Schema) -> Iterator[_Input]:
    for group in ("required", "optional"):
        for name in schema["input_order"].get(group, ()):
            kind, options = [*schema["input"][group][name], {}][:2]
            yield _Input(name, kind, options, group == "optional")


def _slots(schema: Schema) -> list[_Input]:
    return [each for each in _inputs(schema) if not each.is_widget]


def _links(
    named: Mapping[str, Node], numbers: Mapping[str, int], info: Mapping[str, Schema]
) -> Iterator[list[Any]]:
    """Each link: its number, the node and place where it starts and where it ends, and its type."""
    number = 0
    for name, node in named.items():
        schema = info[node.kind]
        known = {each.name for each in _inputs(schema)}
        if unknown := {*node.values, *node.links} - known:
            raise ValueError(f"{node.kind} has no input {', '.join(sorted(unknown))}")
        for place, slot in enumerate(_slots(schema)):
            if slot.name in node.links:
                source, output = node.links[slot.name]
                number += 1
                yield [number, numbers[source], output, numbers[name], place, slot.kind]


def _node(number: int, node: Node, schema: Schema, links: list[list[Any]]) -> dict[str, Any]:
    """A node without its place and size."""
    incoming = {link[4]: link[0] for link in links if link[3] == number}
    inputs = [
        {"name": slot.name, "type": slot.kind, "link": incoming.get(place)}
        | ({"shape": 7} if slot.is_optional else {})
        for place, slot in enumerate(_slots(schema))
    ]
    outputs = [
        {
            "name": name,
            "type": kind,
            "links": [link[0] for link in links if link[1:3] == [number, place]] or None,
        }
        for place, (name, kind) in enumerate(
            zip(schema["output_name"], schema["output"], strict=True)
        )
    ]
    values = [
        value
        for each in _inputs(schema)
        if each.is_widget
        for value in (node.values.get(each.name, each.default), *each.companions)
    ]
    properties: dict[str, Any] = {"Node name for S&R": node.kind}
    if node.models:
        properties["models"] = [
            {
                "name": path.rpartition("/")[2],
                "url": f"{HUGGING_FACE}/{path}",
                "directory": folder,
            }
            for folder, path in node.models
        ]
    return {
        "id": number,
        "type": node.kind,
        "flags": {},
        "order": number,
        "mode": 0,
        "inputs": inputs,
        "outputs": outputs,
        **({"title": node.title} if node.title else {}),
        "properties": properties,
        "widgets_values": values,
        **(OUR_COLOURS if node.kind == PATCH.id else {}),
    }


def _height(node: Node, schema: Schema) -> int:
    """At least what the editor gives a node."""
    is_preset = node.kind == PATCH.id and node.values.get(PRESET.name) != CUSTOM
    shown = [
        each
        for each in _inputs(schema)
        if each.is_widget and not (is_preset and each.name not in (PRESET.name, *FREE))
    ]
    rows = max(len(_slots(schema)), len(schema["output"])) * SLOT
    widgets = sum(1 + len(each.companions) for each in shown) * WIDGET
    text = TEXT * any(each.options.get("multiline") for each in shown)
    picture = PICTURE * any(each.options.get("image_upload") for each in shown)
    return rows + widgets + text + picture + MARGIN


def _group(number: int, column: Column, left: int, bottom: int) -> dict[str, Any]:
    top = -TITLE_BAR - GROUP_TITLE - GROUP_MARGIN
    is_ours = any(node.kind == PATCH.id for node in column.nodes.values())
    return {
        "id": number,
        "title": column.title,
        "bounding": [
            left - GROUP_MARGIN,
            top,
            column.width + 2 * GROUP_MARGIN,
            bottom + GROUP_MARGIN - top,
        ],
        "color": OUR_GROUP_COLOUR if is_ours else GROUP_COLOUR,
        "flags": {},
    }


def _note(number: int, sample: Sample, top: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "MarkdownNote",
        "pos": [0, top],
        "size": [*NOTE_SIZE],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": [],
        "outputs": [],
        "title": sample.title,
        "properties": {},
        "widgets_values": [sample.note],
    }
