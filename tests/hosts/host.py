"""Sampling with real ComfyUI models in this process, for the tests of the host."""

from dataclasses import replace

import pytest
import torch
from comfyui_version import __version__
from common import Shuffle, relative_error
from models import comfyui

from tome_nodes.comfyui.attachment import attach
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.policy import Policy
from tome_nodes.settings.presets import PRESETS, settings_of
from tools.environment import NEWEST, is_earlier

SMALL = Policy(least_tokens=256)
"""The policy of settings by which small maps pay off."""

OVERRIDE = "optimized_attention_override"
"""The option of the host for a function in place of its attention."""


def needs(part, is_there, since=NEWEST):
    """Skip the test if this ComfyUI lacks a part, which only one before ``since`` may."""
    if not is_there:
        reason = f"ComfyUI {__version__} has no {part}"
        assert is_earlier(__version__, since), reason
        pytest.skip(reason)


def no_free_memory(*_, torch_free_too=False):
    """Takes the place of ``comfy.model_management.get_free_memory``: one prompt at a time."""
    return (0, 0) if torch_free_too else 0


def conditioning(value, channels=32, **extras):
    """A prompt: ``[1, 77, channels]`` that varies over its tokens and channels."""
    generator = torch.Generator().manual_seed(int(value * 1000))
    text = torch.randn(1, 77, channels, generator=generator)
    return [
        [text, {"pooled_output": text.mean() + torch.randn(1, 1280, generator=generator)} | extras]
    ]


def merging(min_tokens=1, ratio=0.5, **others):
    """Settings that merge the small feature maps of the tests, too."""
    return ToMeConfig(**{"min_tokens": min_tokens, "ratio": ratio, "policy": SMALL, **others})


def preset(name, **changes):
    """The settings of a preset, under which small maps merge, too, whatever that saves."""
    always = {"min_tokens": 1, "policy": policy_of(name)}
    return ToMeConfig(**settings_of(name, {}) | always | changes)


def policy_of(name, **changes):
    """The policy of a preset, by which small maps merge, whatever that saves."""
    small = {"least_tokens": SMALL.least_tokens, "least_saved": 0.0}
    return replace(PRESETS[name].policy, **small | changes)


def fast(**changes):
    return preset("fast", **changes)


def keys_only(**options):
    return merging(**{"strategy": "window", "attn_tokens": "k,v"} | options)


def sample(model, size=(12, 16), channels=32, scheduler="normal", positive=None, **options):
    """Sample with a UNet like that of Stable Diffusion 1.x; see :func:`models.comfyui.sample`."""
    prompts = positive or conditioning(0.5, channels), conditioning(0.25, channels)
    return comfyui.sample(
        model, comfyui.sd15(1), size, prompts=prompts, scheduler=scheduler, **options
    )


def overridden(model):
    return [name for name, module in model.model.named_modules() if "forward" in vars(module)]


def with_override(model, override):
    other = model.clone()
    other.model_options["transformer_options"][OVERRIDE] = override
    return other


def compiled(model, **options):
    """The model, which the host's node compiles whole, or those of its parts that are ``keys``."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    set_torch_compile_wrapper(model, **{"fullgraph": True, **options})
    return model


def numbers(q, k):
    return q.shape[-2], k.shape[-2]


def calls_of(model, tiny, config=None, note=numbers, **options):
    """What is noted of the queries and keys of each attention of a run, and its result."""
    calls = []

    def spy(func, q, k, *args, **kwargs):
        calls.append(note(q, k))
        return func(q, k, *args, **kwargs)

    watched = with_override(model, spy)
    if config is not None:
        watched = attach(watched, config)
    return calls, comfyui.sample(watched, tiny, **options)


def merged_keys(before, after):
    """Where keys merged: their number before, and how many of them merged into others."""
    pairs = zip(before, after, strict=True)
    return [(keys, keys - left) for (_, keys), (_, left) in pairs if keys != left]


def shuffle_error(model, tiny, config=None, **options):
    """How far the result of a run with a lossless plan is from that of the unpatched model."""
    expected = comfyui.sample(model, tiny, **options)
    shuffled = attach(model, config or keys_only(), Shuffle)
    return relative_error(comfyui.sample(shuffled, tiny, **options), expected)
