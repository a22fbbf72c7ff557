"""A small trained transformer that judges videos: ComfyUI's own Wan on moving scenes.

It has the layout of Wan on a small scale: self-attention over all frames, cross-attention to a
text, positions by rotation in frames, rows and columns, a flow from noise to the latent of
:mod:`benchmarks.fidelity.latents`, guidance by leaving the prompt out. A clip has 9 frames of 16x16
tokens of 8x8 pixels. It pans over a scene and zooms, while a disc cut out of another moves across.
The prompt is the caption of the scene; what is where, and how it moves, comes from the noise.
"""

from pathlib import Path
from typing import Any

import comfy.ldm.wan.model
import torch
from comfy.model_base import BaseModel, ModelType
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from benchmarks.fidelity import denoiser, latents
from benchmarks.fidelity.scene_transformer import PROMPT_SHAPE, Settings

WEIGHTS = Path(__file__).with_name("video_transformer.npz")

FRAMES, SIDE = 9, 128
"""Frames of a judged clip, and its side in pixels."""
PATCH = 2
SHIFT = 5.0
"""The ratio of noise to signal in the middle of the steps."""

WAN: dict[str, Any] = {
    "model_type": "t2v",
    "patch_size": (1, PATCH, PATCH),
    "text_len": PROMPT_SHAPE[0],
    "in_dim": latents.CHANNELS,
    "out_dim": latents.CHANNELS,
    "dim": 192,
    "ffn_dim": 576,
    "text_dim": PROMPT_SHAPE[1],
    "num_heads": 3,
    "num_layers": 8,
}


def load() -> ModelPatcher:
    """The trained transformer as a ComfyUI model; :func:`decode` decodes its output."""
    settings = Settings({**WAN, "dtype": torch.float32})
    settings.sampling_settings = {"shift": SHIFT}
    model = BaseModel(settings, ModelType.FLOW, unet_model=comfy.ldm.wan.model.WanModel)
    return denoiser.with_weights(model, WEIGHTS)


def decode(latent: Tensor) -> Tensor:
    """The pixels ``[clips, 3, frames, height, width]`` of a latent, from 0 to 1."""
    frames = latents.decode(latent.transpose(1, 2).flatten(0, 1))
    return frames.unflatten(0, (-1, latent.shape[2])).transpose(1, 2)
