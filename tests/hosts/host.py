"""Sampling with real ComfyUI models in this process, for the tests of the host."""

import comfy.sample
import pytest
import torch
from comfyui_version import __version__

from tome_nodes.settings.config import ToMeConfig
from tools.environment import NEWEST, is_earlier

CONTEXT_CHANNELS = {
    "sd15": 768,
    "sd15_inpaint": 768,
    "sd2": 1024,
    "sdxl": 2048,
    "sdxl_refiner": 1280,
    "x4_upscaler": 1024,
    "svd": 1024,
}


def needs(part, is_there, since=NEWEST):
    """Skip the test if this ComfyUI lacks a part, which only one before ``since`` may."""
    if not is_there:
        reason = f"ComfyUI {__version__} has no {part}"
        assert is_earlier(__version__, since), reason
        pytest.skip(reason)


def conditioning(channels, value, **extras):
    """A prompt: ``[1, 77, channels]`` that varies over its tokens and channels."""
    generator = torch.Generator().manual_seed(int(value * 1000))
    text = torch.randn(1, 77, channels, generator=generator)
    return [
        [text, {"pooled_output": text.mean() + torch.randn(1, 1280, generator=generator)} | extras]
    ]


def merging(min_tokens=1, ratio=0.5, **options):
    """Settings that merge the small feature maps of the tests, too."""
    return ToMeConfig(min_tokens=min_tokens, ratio=ratio, **options)


def sample(
    model,
    size=(12, 16),
    channels=768,
    steps=2,
    seed=1,
    sampler="euler",
    scheduler="normal",
    cfg=4.0,
    batch=1,
    positive=None,
    picture=0.0,
    **options,
):
    """Sample a latent of ``size`` from one full of ``picture``, without any image encoder."""
    empty = torch.full((batch, 4, *size), picture)
    return comfy.sample.sample(
        model,
        comfy.sample.prepare_noise(empty, seed),
        steps,
        cfg,
        sampler,
        scheduler,
        positive or conditioning(channels, 0.5),
        conditioning(channels, 0.25),
        empty,
        disable_pbar=True,
        seed=seed,
        **options,
    )


def overridden(model):
    """Names of the modules of a model whose forward is overridden."""
    return [name for name, module in model.model.named_modules() if "forward" in vars(module)]
