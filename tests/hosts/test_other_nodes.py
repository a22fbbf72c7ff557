"""Beside the core nodes that patch the UNet too: a lossless plan leaves each one's result alone."""

import asyncio
import logging

import comfy.sd
import pytest
import torch
from comfy_extras import (
    nodes_hypertile,
    nodes_model_downscale,
    nodes_pag,
    nodes_sag,
    nodes_tomesd,
)
from common import EVERYTHING, Shuffle, relative_error
from host import sample

from tome_nodes.config import ToMeConfig
from tome_nodes.hosts.comfyui.attachment import attach

CONFIG = ToMeConfig(ratio=0.5, **EVERYTHING)


@pytest.fixture(scope="module")
def model(checkpoints):
    return comfy.sd.load_diffusion_model(str(checkpoints("sd15", levels=2)))


def run(node, model, **inputs):
    """The model that a core node, of the old interface or the new, makes of ``model``."""
    if hasattr(node, "FUNCTION"):
        return getattr(node(), node.FUNCTION)(model, **inputs)[0]
    return node.execute(model, **inputs).result[0]


def core_node(module, name):
    if hasattr(module, "NODE_CLASS_MAPPINGS"):
        return module.NODE_CLASS_MAPPINGS[name]

    async def nodes():
        return await (await module.comfy_entrypoint()).get_node_list()

    return {node.GET_SCHEMA().node_id: node for node in asyncio.run(nodes())}[name]


CASES = {
    "HyperTile": (
        nodes_hypertile,
        {"tile_size": 64, "swap_size": 2, "max_depth": 0, "scale_depth": False},
    ),
    "PatchModelAddDownscale": (
        nodes_model_downscale,
        {
            "block_number": 2,
            "downscale_factor": 2.0,
            "start_percent": 0.0,
            "end_percent": 0.6,
            "downscale_after_skip": True,
            "downscale_method": "bicubic",
            "upscale_method": "bicubic",
        },
    ),
    "PerturbedAttentionGuidance": (nodes_pag, {"scale": 3.0}),
    "SelfAttentionGuidance": (nodes_sag, {"scale": 0.5, "blur_sigma": 2.0}),
    "TomePatchModel": (nodes_tomesd, {"ratio": 0.3}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_a_lossless_plan_next_to_another_node(model, caplog, name, order):
    caplog.set_level(logging.INFO, logger="tome_nodes")
    module, inputs = CASES[name]
    node = core_node(module, name)
    theirs = run(node, model, **inputs)
    if order == "ours first":
        both = run(node, attach(model, CONFIG, Shuffle), **inputs)
    else:
        both = attach(theirs, CONFIG, Shuffle)
    size = (16, 16)
    # HyperTile and the core's own token merging draw from the global generator.
    torch.manual_seed(5)
    expected = sample(theirs, size=size)
    torch.manual_seed(5)
    actual = sample(both, size=size)
    assert relative_error(expected, sample(model, size=size)) > 1e-4
    assert relative_error(actual, expected) < 1e-4
    assert any("merged" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", CASES)
def test_real_merging_next_to_another_node_changes_the_result_reproducibly(model, told, name):
    module, inputs = CASES[name]
    theirs = run(core_node(module, name), model, **inputs)
    samples = []
    for each in theirs, attach(theirs, CONFIG), attach(theirs, CONFIG):
        torch.manual_seed(5)
        samples.append(sample(each, size=(16, 16)))
    expected, merged, again = samples
    assert 1e-3 < relative_error(merged, expected) < 1
    assert torch.equal(again, merged)
    assert told()[-1].startswith("[ToMe] merged 11/11 blocks (")
