"""A small trained transformer that judges edits: the one of scenes, with two references.

It paints the leaves of the first reference in the colours and the filling of the second, which is
another scene. Each reference adds 1024 tokens to the 1024 of the picture, as in Flux.1 Kontext,
Flux.2 and Qwen-Image-Edit. The prompt tells the sizes and whether there are letters.
"""

from pathlib import Path

import torch
from comfy import model_base
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from benchmarks.fidelity import denoiser, scene_transformer

WEIGHTS = Path(__file__).with_name("edit_transformer.npz")

FLUX = {**scene_transformer.FLUX, "default_ref_method": "index"}
"""The first coordinate of positions is the index of the reference."""


def held_out_edits() -> tuple[list[Tensor], Tensor]:
    """References of four edits that are judged, each ``[4, 8, 64, 64]``, and their prompts."""
    held_out = scene_transformer.held_out
    references = [held_out(name) / 256 for name in ("leaves", "colours")]
    return references, held_out("edit_prompts")


def load() -> ModelPatcher:
    """The trained transformer as a ComfyUI model; ``latents.decode`` decodes its output."""
    settings = scene_transformer.Settings({**FLUX, "dtype": torch.float32})
    settings.sampling_settings = {"shift": scene_transformer.SHIFT}
    return denoiser.with_weights(model_base.Flux(settings), WEIGHTS)
