"""Sampling with real ComfyUI models in this process, for the tests of the host."""

import pytest
import torch
from comfyui_version import __version__
from models import comfyui

from tome_nodes.settings.config import ToMeConfig
from tools.environment import NEWEST, is_earlier


def needs(part, is_there, since=NEWEST):
    """Skip the test if this ComfyUI lacks a part, which only one before ``since`` may."""
    if not is_there:
        reason = f"ComfyUI {__version__} has no {part}"
        assert is_earlier(__version__, since), reason
        pytest.skip(reason)


def conditioning(value, channels=32, **extras):
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
    channels=32,
    scheduler="normal",
    positive=None,
    **options,
):
    """Sample with a UNet like that of Stable Diffusion 1.x; see :func:`models.comfyui.sample`."""
    prompts = positive or conditioning(0.5, channels), conditioning(0.25, channels)
    return comfyui.sample(
        model, comfyui.sd15(1), size, prompts=prompts, scheduler=scheduler, **options
    )


def overridden(model):
    """Names of the modules of a model whose forward is overridden."""
    return [name for name, module in model.model.named_modules() if "forward" in vars(module)]
