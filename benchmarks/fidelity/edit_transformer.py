"""A small trained transformer to judge edits by: the one of scenes, with two references.

It paints the leaves of the first reference in the colours and the filling of the second, which is
another scene. Each reference is 1024 further tokens beside the 1024 of the picture, as in Flux.1
Kontext, Flux.2 and Qwen-Image-Edit. The prompt tells the sizes and whether there are letters.

    python -m benchmarks.fidelity.edit_transformer --minutes 60      train, or continue training

A training begins from the transformer of scenes, which knows no references.
"""

from dataclasses import replace
from pathlib import Path

from benchmarks.host import use_cpu

if __name__ == "__main__":
    use_cpu()

import torch
from comfy import model_base
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from benchmarks.fidelity import denoiser, latents, scene_transformer, scenes
from benchmarks.fidelity.networks import differentiable
from benchmarks.fidelity.scene_transformer import HELD_OUT, LATENT_SIDE, SIDE
from benchmarks.fidelity.training import Training, below, run

WEIGHTS = Path(__file__).with_name("edit_transformer.npz")
STATE = scene_transformer.STATES / "edit-transformer-training.pt"

FLUX = {**scene_transformer.FLUX, "default_ref_method": "index"}
"""Each reference has an index of its own in the first coordinate of its positions."""

EDITS = 4000
"""How many edits a training sees, each of which it crops anew every time."""


def edit(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An edit, decided by a seed.

    Returns:
        The latents ``[8, 64, 64]`` of the edited picture, of the reference that gives its leaves,
        and of the reference that gives its colours; the prompt ``[4, 64]``.
    """
    before = scenes.caption_of(seed)
    # Of another palette.
    other = seed + HELD_OUT // 2 + 1 + seed // scenes.PALETTES % (scenes.PALETTES - 1)
    like = scenes.caption_of(other)
    after = replace(like, size=before.size)
    prompt = scenes.prompt(after)
    # The references tell the palette and what fills the leaves.
    prompt[0] = prompt[2] = 0
    pictures = (
        scenes.scene(seed, SIDE, after)[0],
        scenes.scene(seed, SIDE)[0],
        scenes.scene(other, SIDE)[0],
    )
    edited, leaves, colours = latents.encode(torch.stack(pictures))
    return edited, leaves, colours, prompt


def held_out_edits(count: int) -> tuple[list[Tensor], Tensor]:
    """The references of edits that are judged, each ``[count, 8, 64, 64]``, and their prompts."""
    edits = [edit(seed) for seed in range(HELD_OUT, HELD_OUT + count)]
    _, leaves, colours, prompts = (torch.stack(each) for each in zip(*edits, strict=True))
    return [leaves, colours], prompts


def load() -> ModelPatcher:
    """The trained transformer as a ComfyUI model; ``latents.decode`` decodes its output."""
    settings = scene_transformer.Settings({**FLUX, "dtype": torch.float32})
    settings.sampling_settings = {"shift": scene_transformer.SHIFT}
    return denoiser.with_weights(model_base.Flux(settings), WEIGHTS)


class Trainer(Training):
    """The training of the transformer, on crops of the full side or of half of it."""

    def __init__(self, rate: float, full_share: float):
        model, base = scene_transformer.trained(FLUX), scene_transformer.WEIGHTS
        super().__init__(model, rate, full_share, STATE, WEIGHTS, base)
        edits = [edit(seed) for seed in range(EDITS)]
        *pictures, self.prompts = (torch.stack(each) for each in zip(*edits, strict=True))
        self.pictures = [each.half() for each in pictures]

    def loss(self) -> tuple[int, Tensor]:
        """The loss of a random batch, and the side of its crops."""
        side, size = (LATENT_SIDE, 2) if self.is_full_size() else (LATENT_SIDE // 2, 8)
        chosen = [below(len(self.prompts), self.generator) for _ in range(size)]
        cropped = [self._crops(index, side) for index in chosen]
        clean, *references = (torch.stack(each) for each in zip(*cropped, strict=True))
        times = scene_transformer.random_times(size, self.generator)
        noise = torch.randn(clean.shape, generator=self.generator)
        now = times.view(-1, 1, 1, 1)
        noisy = (1 - now) * clean + now * noise
        with differentiable():
            answer = self.model(noisy, times, self.prompts[chosen], ref_latents=references)
        return side, (answer - (noise - clean)).square().mean()

    def _crops(self, index: int, side: int) -> list[Tensor]:
        """Of an edit's pictures; the colours may come from another place than the leaves."""
        last = LATENT_SIDE - side + 1
        top, left, other_top, other_left = (below(last, self.generator) for _ in range(4))
        places = ((top, left), (top, left), (other_top, other_left))
        return [
            latent[index, :, down : down + side, across : across + side].float()
            for latent, (down, across) in zip(self.pictures, places, strict=True)
        ]


if __name__ == "__main__":
    run("Train the transformer of edits, or continue.", Trainer)
