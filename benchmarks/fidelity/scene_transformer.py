"""A small trained transformer that judges pictures: ComfyUI's own Flux on computer-made scenes.

It has the layout of Flux on a small scale: 32x32 = 1024 tokens of 8x8 pixels, a flow from noise to
the latent of :mod:`benchmarks.fidelity.latents`, guidance by leaving the prompt out. Nothing tells
it where anything is: the picture comes from the noise, as in a model that people use.
"""

from pathlib import Path
from typing import Any

import comfy.latent_formats
import comfy.ldm.flux.model
import numpy as np
import torch
from comfy.model_base import BaseModel, Flux, ModelType
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from benchmarks.fidelity import denoiser, latents

WEIGHTS = Path(__file__).with_name("scene_transformer.npz")
FEW_STEPS = Path(__file__).with_name("student.npz")
"""The weights of the same transformer, distilled to four steps without guidance."""
EDIT = Path(__file__).with_name("edit_transformer.npz")

PATCH = 2
LATENT_SIDE = 256 // latents.CELL
"""The side of the latent of a judged picture."""
SHIFT = 1.15
"""How far the steps shift towards noise, as in Flux at its usual size; 0 for not at all."""

HELD_OUT = Path(__file__).with_name("held_out.npz")
"""What is judged: prompts and references of scenes that no model was trained on."""
PROMPT_SHAPE = (4, 64)
"""Tokens and channels of a prompt: one token for each thing that a caption tells."""
_PALETTES = 8

FLUX: dict[str, Any] = {
    "in_channels": latents.CHANNELS,
    "out_channels": latents.CHANNELS,
    "patch_size": PATCH,
    "vec_in_dim": None,
    "context_in_dim": PROMPT_SHAPE[1],
    "hidden_size": 192,
    "mlp_ratio": 3.0,
    "num_heads": 3,
    "depth": 1,
    "depth_single_blocks": 6,
    "axes_dim": [16, 24, 24],
    "theta": 1000,
    "qkv_bias": True,
    "guidance_embed": False,
    "txt_ids_dims": [],
}


def held_out(name: str) -> Tensor:
    """An array of :data:`HELD_OUT`, such as ``prompts`` ``[4, 4, 64]``."""
    with np.load(HELD_OUT) as arrays:
        return torch.from_numpy(arrays[name])


def prompt(*told: int) -> Tensor:
    """The prompt ``[4, 64]`` of a caption, in the words of the models' training.

    Args:
        told: the palette, below 8; how large things are and what fills them, below 3 each; and
            whether there are letters, 0 or 1.
    """
    count, channels = PROMPT_SHAPE
    chance = torch.Generator().manual_seed(0)
    words = torch.randn(count, _PALETTES, channels, generator=chance)
    return words[range(count), list(told)]


class Latents(comfy.latent_formats.LatentFormat):
    """The host's description of the latent."""

    latent_channels = latents.CHANNELS


class Settings(denoiser.Settings):
    """The host's settings of a model that paints such latents."""

    latent_format = Latents


def load(weights: Path = WEIGHTS) -> ModelPatcher:
    """The trained transformer as a ComfyUI model; ``latents.decode`` decodes its output."""
    settings = _settings()
    model = BaseModel(settings, ModelType.FLUX, unet_model=comfy.ldm.flux.model.Flux)
    return denoiser.with_weights(model, weights)


def load_editor() -> ModelPatcher:
    """The transformer trained further to edit, with two references.

    It paints the leaves of the first reference in the colours and the filling of the second, which
    is another scene. Each reference adds 1024 tokens to the 1024 of the picture, as in Flux.1
    Kontext, Flux.2 and Qwen-Image-Edit. The prompt tells the sizes and whether there are letters.
    """
    # The first coordinate of positions is the index of the reference.
    return denoiser.with_weights(Flux(_settings(default_ref_method="index")), EDIT)


def _settings(**others: Any) -> Settings:
    settings = Settings({**FLUX, **others, "dtype": torch.float32})
    settings.sampling_settings = {"shift": SHIFT}
    return settings
