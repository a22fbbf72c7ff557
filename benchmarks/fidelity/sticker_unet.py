"""A small trained UNet with SDXL's layout that judges pictures: stickers on clouds.

As in SDXL, the outer level has no attention, and next to none of the work or of the weights: 0.07
of the multiplications at 64x64 tokens and 0.015 of the weights lie outside of the first step down;
in SDXL at 1024x1024, 0.067 and 0.006. Stacks of two blocks at the second level and the third attend
to themselves and to a prompt. The UNet predicts noise, on the noise schedule of SD, in the latent
of :mod:`benchmarks.fidelity.latents`. Nothing tells it where anything is: the prompt names one of
twelve kinds of sticker and one of six colours of clouds, and the noise decides how many there are,
where, how large and how they are turned.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import comfy.ops
import torch
from comfy.model_base import BaseModel, ModelType
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from benchmarks.fidelity import denoiser, latents, scene_transformer

WEIGHTS = Path(__file__).with_name("sticker_unet.npz")

KINDS = "🐱🍓🚗⚽🦋🌻🏠🐟🍕🐸🌲🍄"
SIDE = 64
"""The side in tokens of a judged picture."""
CLOUDS = 6
"""The number of colours of clouds."""
PROMPT_SHAPE = (2, 64)
"""Tokens and channels of a prompt: a token for the kind and one for the clouds."""
SCALE = 1.2
"""Latents are multiplied by this, so that they have a mean power of 1."""

UNET: dict[str, Any] = {
    "image_size": 32,
    "in_channels": latents.CHANNELS,
    "out_channels": latents.CHANNELS,
    "model_channels": 32,
    "num_res_blocks": [1, 1, 1],
    "channel_mult": (1, 3, 5),
    "num_head_channels": 32,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "transformer_depth": [0, 2, 2],
    "transformer_depth_middle": 2,
    "transformer_depth_output": [0, 0, 2, 2, 2, 2],
    "context_dim": PROMPT_SHAPE[1],
    "legacy": False,
}


class Operations(comfy.ops.disable_weight_init):
    """The host's layers, with eight channels in each group of a norm; SDXL has ten or more."""

    class GroupNorm(comfy.ops.disable_weight_init.GroupNorm):
        def __init__(self, num_groups: int, num_channels: int, **others: Any):
            super().__init__(num_channels // 8, num_channels, **others)


class Settings(scene_transformer.Settings):
    """The host's settings of a model that paints such latents, with these layers."""

    custom_operations = Operations


def load() -> ModelPatcher:
    """The trained UNet as a ComfyUI model; :func:`decode` decodes its output."""
    return denoiser.with_weights(untrained(), WEIGHTS)


def untrained(unet: Mapping[str, Any] = UNET) -> BaseModel:
    """The model without weights, in its own layout or in another one."""
    return BaseModel(Settings({**unet, "dtype": torch.float32}), ModelType.EPS)


def decode(latent: Tensor) -> Tensor:
    """The pixels ``[batch, 3, height, width]`` of a latent, from 0 to 1."""
    return latents.decode(latent / SCALE)


def prompt(kind: int, clouds: int) -> Tensor:
    """The tokens of a prompt, ``[2, 64]``, from the indices of a kind and of a colour."""
    words = _words()
    return torch.stack([words[kind], words[len(KINDS) + clouds]])


@cache
def _words() -> Tensor:
    return torch.randn(
        len(KINDS) + CLOUDS, PROMPT_SHAPE[1], generator=torch.Generator().manual_seed(0)
    )
