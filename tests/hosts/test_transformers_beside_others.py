"""Transformers with core nodes that people add to them, before ours and after it."""

import asyncio
import inspect

import comfy.controlnet
import comfy.sd
import pytest
import torch
from comfy_extras import nodes_context_windows, nodes_easycache, nodes_slg
from common import Shuffle, relative_error
from host import merging, overridden
from tiny_transformers import TINY, build, conditioning, sample

from tome_nodes.hosts.comfyui.attachment import attach

STEPS = {"steps": 4}


def core_node(module, name):
    async def nodes():
        extension = module.comfy_entrypoint()
        # In some modules of the host it is a coroutine.
        extension = await extension if inspect.isawaitable(extension) else extension
        return await extension.get_node_list()

    return {node.GET_SCHEMA().node_id: node for node in asyncio.run(nodes())}[name]


def cached(name):
    node = core_node(nodes_easycache, name)
    return lambda model: node.execute(model, 3.0, 0.0, 1.0, False).result[0]


def skipping_a_layer(model):
    node = core_node(nodes_slg, "SkipLayerGuidanceDiT")
    return node.execute(model, 3.0, 0.0, 1.0, "0", "1").result[0]


def in_windows(model):
    node = core_node(nodes_context_windows, "ContextWindowsManual")
    return node.execute(
        model,
        context_length=3,
        context_overlap=1,
        context_schedule="standard_static",
        context_stride=1,
        closed_loop=False,
        fuse_method="pyramid",
        dim=2,
        freenoise=False,
    ).result[0]


def replacing_a_block(model):
    other = model.clone()
    other.set_model_patch_replace(
        lambda args, extra: extra["original_block"](args), "dit", "double_block", 0
    )
    return other


CASES = {
    "EasyCache": ("flux", cached("EasyCache")),
    "EasyCache with Wan": ("wan21", cached("EasyCache")),
    "LazyCache": ("z_image", cached("LazyCache")),
    "SkipLayerGuidance": ("flux", skipping_a_layer),
    "context windows": ("wan21", in_windows),
    "a replaced block of Wan": ("wan21", replacing_a_block),
    "a replaced block of SD3": ("sd3", replacing_a_block),
}


@pytest.mark.parametrize(
    ("ours_first", "scope"),
    [(True, "module"), (False, "module"), (False, "block"), (False, "stack")],
)
@pytest.mark.parametrize("case", CASES)
def test_a_lossless_plan_with_another_node(models, told, case, ours_first, scope):
    kind, other = CASES[case]
    tiny, model = TINY[kind], models(kind)
    size = tiny.size(8, 10)
    expected = sample(other(model), tiny, size, **STEPS)
    assert relative_error(sample(model, tiny, size, **STEPS), expected) > 1e-5 or "block" in case
    config = merging(strategy="window", attn_tokens="k,v", scope=scope, refresh_steps=4)

    def ours(patched):
        return attach(patched, config, Shuffle)

    both = other(ours(model)) if ours_first else ours(other(model))
    assert relative_error(sample(both, tiny, size, **STEPS), expected) < 1e-5
    assert told()[-1].startswith("[ToMe] merged ")
    assert overridden(model) == []


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_lora(models, ours_first):
    tiny, model = TINY["flux"], models("flux")
    size = tiny.size(8, 10)
    random = torch.Generator().manual_seed(0)
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    lora = {
        f"{name}.lora_down.weight": torch.randn(4, 64, generator=random),
        f"{name}.lora_up.weight": torch.randn(192, 4, generator=random),
    }
    config = merging(strategy="window", attn_tokens="k,v")

    def with_lora(patched):
        return comfy.sd.load_lora_for_models(patched, None, lora, 1.0, 0.0)[0]

    expected = sample(with_lora(model), tiny, size)
    assert relative_error(sample(model, tiny, size), expected) > 1e-4
    if ours_first:
        both = with_lora(attach(model, config, Shuffle))
    else:
        both = attach(with_lora(model), config, Shuffle)
    assert relative_error(sample(both, tiny, size), expected) < 1e-5


class Adds(comfy.controlnet.ControlBase):
    """A control of the host that adds to the output of a block."""

    def __init__(self, name, tokens, channels):
        super().__init__()
        random = torch.Generator().manual_seed(7)
        added = torch.randn(1, tokens, channels, generator=random)
        self.added = {"input": [], "output": []} | {name: [added]}

    def get_control(self, *args):
        return self.added

    def copy(self):
        return self

    def get_models(self):
        return []

    def cleanup(self):
        pass


@pytest.mark.parametrize("scope", ["module", "block", "stack"])
@pytest.mark.parametrize(
    ("kind", "name", "channels"),
    [("flux", "input", 64), ("sd3", "output", 128), ("qwen_image", "input", 64)],
)
def test_a_controlnet(models, kind, name, channels, scope):
    tiny, model = TINY[kind], models(kind)
    size = tiny.size(8, 10)
    prompts = [conditioning(tiny, seed, control=Adds(name, 80, channels)) for seed in (5, 6)]
    expected = sample(model, tiny, size, prompts=prompts)
    assert relative_error(sample(model, tiny, size), expected) > 1e-4
    config = merging(strategy="window", attn_tokens="k,v", scope=scope, refresh_steps=4)
    shuffled = attach(model, config, Shuffle)
    assert relative_error(sample(shuffled, tiny, size, prompts=prompts), expected) < 1e-5


def test_a_partly_loaded_model():
    tiny = TINY["flux"]
    model = build(tiny)
    size = tiny.size(8, 10)
    config = merging(strategy="window", attn_tokens="k,v")
    expected = sample(attach(model, config), tiny, size)
    partly = build(tiny)
    partly.load(torch.device("cpu"), lowvram_model_memory=1)
    assert relative_error(sample(attach(partly, config), tiny, size), expected) < 1e-6
