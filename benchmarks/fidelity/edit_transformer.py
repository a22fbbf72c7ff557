"""A small trained transformer that judges edits: the one of scenes, with two references.

It paints the leaves of the first reference in the colours and the filling of the second, which is
another scene. Each reference adds 1024 tokens to the 1024 of the picture, as in Flux.1 Kontext,
Flux.2 and Qwen-Image-Edit. The prompt tells the sizes and whether there are letters.
"""

from dataclasses import replace
from pathlib import Path

import torch
from comfy import model_base
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from benchmarks.fidelity import denoiser, latents, scene_transformer, scenes
from benchmarks.fidelity.scene_transformer import HELD_OUT, SIDE

WEIGHTS = Path(__file__).with_name("edit_transformer.npz")

FLUX = {**scene_transformer.FLUX, "default_ref_method": "index"}
"""The first coordinate of positions is the index of the reference."""


def edit(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The edit of a seed.

    Returns:
        The latents ``[8, 64, 64]`` of the edited picture, of the reference that gives its leaves,
        and of the reference that gives its colours; the prompt ``[4, 64]``.
    """
    before = scenes.caption_of(seed)
    # A scene of another palette.
    other = seed + HELD_OUT // 2 + 1 + seed // scenes.PALETTES % (scenes.PALETTES - 1)
    like = scenes.caption_of(other)
    after = replace(like, size=before.size)
    prompt = scenes.prompt(after)
    # The references show the palette and what fills the leaves.
    prompt[0] = prompt[2] = 0
    pictures = (
        scenes.scene(seed, SIDE, after)[0],
        scenes.scene(seed, SIDE)[0],
        scenes.scene(other, SIDE)[0],
    )
    edited, leaves, colours = latents.encode(torch.stack(pictures))
    return edited, leaves, colours, prompt


def held_out_edits(count: int) -> tuple[list[Tensor], Tensor]:
    """References of the edits that are judged, each ``[count, 8, 64, 64]``, and their prompts."""
    edits = [edit(seed) for seed in range(HELD_OUT, HELD_OUT + count)]
    _, leaves, colours, prompts = (torch.stack(each) for each in zip(*edits, strict=True))
    return [leaves, colours], prompts


def load() -> ModelPatcher:
    """The trained transformer as a ComfyUI model; ``latents.decode`` decodes its output."""
    settings = scene_transformer.Settings({**FLUX, "dtype": torch.float32})
    settings.sampling_settings = {"shift": scene_transformer.SHIFT}
    return denoiser.with_weights(model_base.Flux(settings), WEIGHTS)
