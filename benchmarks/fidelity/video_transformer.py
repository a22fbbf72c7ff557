"""A small trained transformer to judge videos by: ComfyUI's own Wan on moving scenes.

It has the layout of Wan in small: self-attention over all frames, a text by cross-attention,
positions by rotation in frames, rows and columns, a flow from noise to the latent of
:mod:`benchmarks.fidelity.latents`, guidance by leaving the prompt out. A clip has 9 frames of 16x16
tokens of 8x8 pixels. It pans over a scene and zooms, while a disc cut out of another moves across.
The prompt is the caption of the scene: what is where, and how it moves, comes from the noise.

    python -m benchmarks.fidelity.video_transformer --minutes 60      train, or continue training

It can be stopped at any time, and continues where it stopped.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.host import use_cpu

if __name__ == "__main__":
    use_cpu()

import comfy.ldm.wan.model
import torch
import torch.nn.functional as F
from comfy.model_base import BaseModel, ModelType
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from benchmarks.fidelity import denoiser, latents, scenes
from benchmarks.fidelity.networks import differentiable, new_wan
from benchmarks.fidelity.scene_transformer import STATES, Settings
from benchmarks.fidelity.training import Training, below, happens, run

WEIGHTS = Path(__file__).with_name("video_transformer.npz")
STATE = STATES / "video-transformer-training.pt"

FRAMES, SIDE = 9, 128
"""Of a judged clip, the side in pixels."""
PATCH = 2
SHIFT = 5.0
"""The ratio of noise to signal in the middle of the steps."""

SCENES, SCENE_SIDE = 4000, 256
"""How many scenes a training sees, and their side in pixels."""
STILLS = 0.5
"""The share of training steps on first frames alone: more scenes for the same work."""

WAN: dict[str, Any] = {
    "model_type": "t2v",
    "patch_size": (1, PATCH, PATCH),
    "text_len": scenes.PROMPT_SHAPE[0],
    "in_dim": latents.CHANNELS,
    "out_dim": latents.CHANNELS,
    "dim": 192,
    "ffn_dim": 576,
    "text_dim": scenes.PROMPT_SHAPE[1],
    "num_heads": 3,
    "num_layers": 8,
}


@dataclass(frozen=True)
class Way:
    """A straight way of a square window or a disc: centre and half its side, first and last."""

    start: tuple[float, float, float]
    stop: tuple[float, float, float]

    def at(self, along: float) -> tuple[float, float, float]:
        """Centre down, centre across and half the side, at 0 to 1 of the way."""
        down, across, half = (
            first + along * (last - first)
            for first, last in zip(self.start, self.stop, strict=True)
        )
        return down, across, half


def clip(
    scene: Tensor, other: Tensor, side: int, frames: int, generator: torch.Generator
) -> Tensor:
    """A random pan over a scene, with a disc of another that moves across.

    Args:
        scene: the background, ``[3, height, width]``.
        other: where the disc is cut out, of the same size.
        side: of the clip, in pixels.
        frames: the number of frames; with fewer than a clip has, its beginning.
        generator: decides everything else.

    Returns:
        The pixels, ``[frames, 3, side, side]``.
    """
    whole = scene.shape[-1]

    def between(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    def window() -> tuple[float, float, float]:
        half = between(0.4, 0.7) * side
        return between(half, whole - half), between(half, whole - half), half

    radius = between(0.2, 0.3) * side
    pan = Way(window(), window())
    disc = Way(
        (between(0, side), between(0, side), radius),
        (between(0, side), between(0, side), radius),
    )
    source = between(radius, whole - radius), between(radius, whole - radius)
    centres = torch.arange(side) + 0.5
    shown = []
    for index in range(frames):
        along = index / (FRAMES - 1)
        down, across, half = pan.at(along)
        scale = 2 * half / side
        seen = _look(scene, down - half + centres * scale, across - half + centres * scale)
        top, left, _ = disc.at(along)
        y, x = centres - top, centres - left
        inside = y[:, None] ** 2 + x[None] ** 2 < radius**2
        shown.append(torch.where(inside, _look(other, source[0] + y, source[1] + x), seen))
    return torch.stack(shown)


def _look(pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels at places between them."""
    side = pixels.shape[-1]
    down, across = torch.meshgrid(2 * rows / side - 1, 2 * columns / side - 1, indexing="ij")
    grid = torch.stack([across, down], 2)
    return F.grid_sample(pixels[None], grid[None], padding_mode="border", align_corners=False)[0]


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


def new_transformer() -> nn.Module:
    """An untrained transformer."""
    return new_wan(WAN)


class Trainer(Training):
    """The training of the transformer: stills, and clips of the full side or of half of it."""

    def __init__(self, rate: float, full_share: float):
        super().__init__(new_transformer(), rate, full_share, STATE, WEIGHTS)
        made = [scenes.scene(seed, SCENE_SIDE) for seed in range(SCENES)]
        self.scenes = torch.stack([(255 * pixels).to(torch.uint8) for pixels, _ in made])
        self.prompts = torch.stack([scenes.prompt(caption) for _, caption in made])

    def loss(self) -> tuple[str, Tensor]:
        """The loss of a random batch, and what it is of."""
        if happens(STILLS, self.generator):
            frames, side, size = 1, SIDE, 14
        elif self.is_full_size():
            frames, side, size = FRAMES, SIDE, 2
        else:
            frames, side, size = FRAMES, SIDE // 2, 6
        chosen = [below(len(self.scenes), self.generator) for _ in range(size)]
        clean = torch.stack([self._clip(index, side, frames) for index in chosen])
        kept = torch.rand(size, 1, 1, generator=self.generator) >= 0.1
        even = (torch.arange(size) + torch.rand(size, generator=self.generator)) / size
        times = SHIFT * even / (1 + (SHIFT - 1) * even)
        now = times.view(-1, 1, 1, 1, 1)
        noise = torch.randn(clean.shape, generator=self.generator)
        with differentiable():
            answer = self.model(
                (1 - now) * clean + now * noise, 1000 * times, self.prompts[chosen] * kept
            )
        loss = (answer - (noise - clean)).square().mean()
        return f"{frames}x{side}x{side}", loss

    def _clip(self, index: int, side: int, frames: int) -> Tensor:
        """The latent of a random clip over a scene, ``[8, frames, side / 4, side / 4]``.

        Its disc is of a scene of the same palette, so that the caption holds.
        """
        others = len(self.scenes) // scenes.PALETTES
        other = index % scenes.PALETTES + scenes.PALETTES * below(others, self.generator)
        scene, cut = (self.scenes[each].float() / 255 for each in (index, other))
        return latents.encode(clip(scene, cut, side, frames, self.generator)).transpose(0, 1)


if __name__ == "__main__":
    run("Train the transformer of videos, or continue.", Trainer)
