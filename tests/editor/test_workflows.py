"""The sample workflows: complete, in step with their API format, and run by the real server."""

import importlib.util
import re
import struct
from io import BytesIO
from itertools import combinations, product
from operator import ge, le
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tome_nodes.comfyui.node_texts import PATCH as CAPTION
from tools.editor import (
    THUMBNAIL_SIZE,
    TITLE_HEIGHT,
    WORKFLOWS,
    blueprint_files,
    graph_of,
    models_of,
    workflow_files,
)
from tools.server import ExecutionFailed
from tools.workflow import PATCH, with_steps

PACK = "tome-nodes"
NAMES = [
    *("tome_compare", "tome_flux_2", "tome_hires_fix", "tome_img2img", "tome_krea_2"),
    *("tome_minimax_h3", "tome_qwen_image_2_1", "tome_qwen_image_edit", "tome_sdxl", "tome_tune"),
    *("tome_txt2img", "tome_wan_video", "tome_z_image"),
]
ON_UNETS = (
    *("tome_compare", "tome_hires_fix", "tome_img2img", "tome_sdxl", "tome_tune", "tome_txt2img"),
)
TRANSFORMERS = [name for name in NAMES if name not in ON_UNETS]
"""Those whose models are too large to be written here as small ones."""
LATER_FILES = {
    "minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors",
    "minimax_h3_video_vae_int8_convrot.safetensors",
    "qwen_image_2.1_int8_convrot.safetensors",
    "qwen3vl_8b_int8_convrot.safetensors",
    "qwen_image_2.1_vae_bf16.safetensors",
}
"""Models of newer templates than those of the pinned ComfyUI: of 0.1.123, where they were seen."""
SD15 = {"ckpt_name": "sd15.ckpt", "width": 128, "height": 128}
SD15_LARGER = {**SD15, "width": 256, "height": 256}
SDXL = {"ckpt_name": "sdxl.ckpt", "width": 448, "height": 448}
NOTES = {"Note", "MarkdownNote"}
TITLE_BAR = 30

every_workflow = pytest.mark.parametrize("name", NAMES)


def editor_file(name):
    return graph_of(WORKFLOWS / f"{name}.json")


def api_file(name):
    return graph_of(WORKFLOWS / "api" / f"{name}.json")


def box_of(left, top, width, height):
    return left, top, left + width, top + height


def are_apart(a, b):
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


@every_workflow
def test_each_workflow_has_its_api_format_and_a_thumbnail_that_is_a_small_jpeg(name):
    assert [file.stem for file in workflow_files()] == NAMES
    for folder, ending in (WORKFLOWS / "api", "json"), (WORKFLOWS, "jpg"):
        assert sorted(file.stem for file in folder.glob(f"*.{ending}")) == NAMES
    data = (WORKFLOWS / f"{name}.jpg").read_bytes()
    with Image.open(BytesIO(data)) as image:
        assert image.format == "JPEG"
        assert image.size == THUMBNAIL_SIZE
        # The title can be read where the list shows it a third as large.
        letters = np.asarray(image.crop((0, 0, image.width, TITLE_HEIGHT)).convert("L")) > 200
    assert np.ptp(np.flatnonzero(letters.any(1))) >= 30
    assert len(data) < 150_000


def nodes_of(graph):
    inner = graph.get("definitions", {}).get("subgraphs", [])
    return [*graph["nodes"], *(node for subgraph in inner for node in nodes_of(subgraph))]


@pytest.mark.parametrize(
    "file", [*workflow_files(), *blueprint_files()], ids=lambda file: file.stem
)
def test_the_values_of_our_node_are_those_of_its_inputs(file):
    """They are saved by place, so an input that comes or goes shifts them."""
    graph = graph_of(file)
    ours = [node for node in nodes_of(graph) if node["type"] == CAPTION.id]
    assert ours or file.stem == "tome_tune"
    for node in ours:
        for option, value in zip(CAPTION.options, node["widgets_values"], strict=True):
            option.check(float(value) if isinstance(option.default, float) else value)


@every_workflow
def test_nodes_are_from_the_core_or_the_pack_and_settings_are_explained(name, info):
    types = {node["type"] for node in editor_file(name)["nodes"]}
    modules = {info[kind]["python_module"] for kind in types - NOTES}
    assert types & NOTES
    others = {module for module in modules if not module.startswith("comfy_extras.")}
    assert others == {"nodes", f"custom_nodes.{PACK}"}


@every_workflow
def test_nothing_overlaps_or_sticks_out_of_a_group_and_no_link_leads_back(name):
    graph = editor_file(name)
    groups = {group["title"]: box_of(*group["bounding"]) for group in graph["groups"]}
    nodes = {}
    for node in graph["nodes"]:
        left, top, right, bottom = box_of(*node["pos"], *node["size"])
        nodes[node["id"]] = left, top - TITLE_BAR, right, bottom
    for boxes in nodes, groups:
        for (one, a), (other, b) in combinations(boxes.items(), 2):
            assert are_apart(a, b), f"{one} and {other} overlap"
    for (node, box), (title, group) in product(nodes.items(), groups.items()):
        is_inside = all(map(le, group[:2], box[:2])) and all(map(ge, group[2:], box[2:]))
        assert are_apart(box, group) or is_inside, f"node {node} sticks out of {title}"
    for _, source, _, target, *_ in graph["links"]:
        assert nodes[source][0] <= nodes[target][0], f"node {target} is left of node {source}"


def test_models_are_those_of_comfyuis_own_templates_and_can_be_downloaded():
    """The editor offers to download models that are missing."""
    package = importlib.util.find_spec("comfyui_workflow_templates_json")
    (folder,) = package.submodule_search_locations
    texts = [file.read_text(encoding="utf-8") for file in Path(folder).rglob("*.json")]
    for name in NAMES:
        graph = editor_file(name)
        values = [value for node in graph["nodes"] for value in node.get("widgets_values", ())]
        files = [value for value in values if str(value).endswith(".safetensors")]
        assert [model["name"] for model in models_of(graph)] == files, name
        for model in models_of(graph):
            assert model["url"].endswith(f"/{model['name']}")
            is_there = any(model["url"] in text for text in texts)
            assert is_there or model["name"] in LATER_FILES, model["url"]


@pytest.mark.parametrize(
    ("name", "small", "size", "tokens"),
    [
        ("tome_img2img", SD15_LARGER, 256, "1024 -> 408 tokens"),
        ("tome_txt2img", SD15_LARGER, 256, "1024 -> 408 tokens"),
        # 4 windows of 256 tokens, of which 154 merge.
        ("tome_hires_fix", SD15, 256, "1024 -> 408 tokens"),
        # 28 windows of 112 tokens, of which 91 merge, and 4 of 196, of which 118 do.
        ("tome_sdxl", SDXL, 896, "3136 -> 588 tokens x5, 784 -> 312 tokens x12"),
    ],
)
def test_workflow_runs_to_an_image_and_merges_in_the_pass_that_has_the_node(
    server, name, small, size, tokens
):
    graph = with_steps(api_file(name), 1)
    for node in graph.values():
        node["inputs"] |= {key: small[key] for key in small.keys() & node["inputs"].keys()}
    read = len(server.log)
    history = server.run(graph)
    (png,) = server.images(history)
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (size, size)
    (saved,) = (image for node in history["outputs"].values() for image in node["images"])
    assert saved["filename"].startswith(name)

    (line,) = re.findall(r"\[ToMe\] .*", server.log[read:])
    assert re.match(r"\[ToMe\] .* \(node \d+\): merged ", line)
    assert f"({tokens}), 1/1 steps, ratio 0.60" in line


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_model_that_samples_comes_from_a_node_of_ours_behind_all_else(name):
    graph = api_file(name)
    samples = [
        node["inputs"]["model"][0]
        for node in graph.values()
        if node["class_type"].startswith("KSampler") or node["class_type"].endswith("Guider")
        if "model" in node["inputs"]
    ]
    patches = [key for key, node in graph.items() if node["class_type"] == PATCH]
    assert len(patches) == (2 if name == "tome_wan_video" else 1)
    assert {*samples} == {*patches}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_server_accepts_the_api_format_and_reads_the_models_that_it_names(server, name):
    """The files are empty here, so the run ends where the first of them is read."""
    graph = api_file(name)
    with pytest.raises(ExecutionFailed) as failed:
        server.run(graph)
    (kind,) = re.findall(r"^node \d+ \((\w+)\)", str(failed.value))
    assert kind in ("UNETLoader", "CLIPLoader", "VAELoader")
