"""A small trained transformer to judge videos by: ComfyUI's own Wan on clips made from photos.

It has the layout of Wan in small: self-attention over all frames, a text by cross-attention,
positions by rotation in frames, rows and columns, a flow from noise to pixels, guidance by leaving
the prompt out. A clip has 9 frames of 16x16 tokens of 2x2 pixels. It pans over a photo and zooms,
while a disc cut out of another photo moves across. The prompt names both photos. In every other
frame, further channels say where in its photo each pixel is; those between have to find out by
attention.

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

from benchmarks.fidelity import denoiser
from benchmarks.fidelity.networks import differentiable, new_wan
from benchmarks.fidelity.photos import photo
from benchmarks.fidelity.training import Training, below, happens, run

WEIGHTS = Path(__file__).with_name("video_transformer.npz")
STATE = Path(__file__).parents[2] / "demo" / "video-transformer-training.pt"

SHORT_SIDE = 48
FRAMES, SIDE = 9, 32
PATCH = 2
TOLD_EVERY = 2
"""One of so many frames is told its place."""

LENGTHS = 5
"""How many waves tell a place; see :func:`benchmarks.fidelity.denoiser.waves`."""

PLACE_CHANNELS = 4 * LENGTHS + 2
SHIFT = 5.0
"""The ratio of noise to signal in the middle of the steps."""

STILLS = 0.5
"""The share of training steps on first frames alone: more photos for the same work."""

WAN: dict[str, Any] = {
    "model_type": "t2v",
    "patch_size": (1, PATCH, PATCH),
    "text_len": 2 * denoiser.CONTEXT_SHAPE[0],
    "in_dim": 3 + PLACE_CHANNELS,
    "out_dim": 3,
    "dim": 192,
    "ffn_dim": 576,
    "text_dim": denoiser.CONTEXT_SHAPE[1],
    "num_heads": 3,
    "num_layers": 8,
}


@dataclass(frozen=True)
class Path2D:
    """A straight path of a square window or a disc: centre and half its side, first and last."""

    start: tuple[float, float, float]
    stop: tuple[float, float, float]

    def at(self, along: float) -> tuple[float, float, float]:
        """Centre down, centre across and half the side, at 0 to 1 of the path."""
        down, across, half = (
            first + along * (last - first)
            for first, last in zip(self.start, self.stop, strict=True)
        )
        return down, across, half


@dataclass(frozen=True)
class Clip:
    """A pan over a photo, with a disc of another photo that moves across.

    Attributes:
        photo: the background.
        window: the path of the part of it that is seen, in its pixels.
        cutting: the photo of the disc.
        disc: the path of the disc, in pixels of the clip.
        source: where the disc was cut out: its centre down and across.
    """

    photo: str
    window: Path2D
    cutting: str
    disc: Path2D
    source: tuple[float, float]


class Photos:
    """The photos that clips are made from."""

    def __init__(self) -> None:
        self._photos = {
            name: denoiser.from_pixels(photo(name, SHORT_SIDE)) for name in denoiser.NAMES
        }

    def random_clip(self, generator: torch.Generator, side: int) -> Clip:
        """A clip with a random background, disc and motion."""
        names = denoiser.NAMES
        background = below(len(names), generator)
        cutting = (background + 1 + below(len(names) - 1, generator)) % len(names)
        height, width = self._photos[names[background]].shape[1:]

        def between(low: float, high: float) -> float:
            return low + (high - low) * torch.rand((), generator=generator).item()

        def window() -> tuple[float, float, float]:
            half = between(0.625, 1.1) * side / 2
            return between(half, height - half), between(half, width - half), half

        radius = between(0.2, 0.3) * side
        high, wide = self._photos[names[cutting]].shape[1:]
        disc = Path2D(
            (between(0, side), between(0, side), radius),
            (between(0, side), between(0, side), radius),
        )
        source = between(radius, high - radius), between(radius, wide - radius)
        return Clip(names[background], Path2D(window(), window()), names[cutting], disc, source)

    def render(self, clip: Clip, side: int, frames: int = FRAMES) -> tuple[Tensor, Tensor]:
        """The pixels ``[3, frames, side, side]`` and places ``[22, frames, side, side]``.

        The last two channels of a place are 1 in the disc, and in a frame that is told its place.
        """
        pixels, places = [], []
        centres = torch.arange(side) + 0.5
        for index in range(frames):
            along = index / (FRAMES - 1)
            down, across, half = clip.window.at(along)
            scale = 2 * half / side
            rows = (down - half + centres * scale)[:, None].expand(side, side)
            columns = (across - half + centres * scale)[None].expand(side, side)
            top, left, radius = clip.disc.at(along)
            y, x = centres[:, None] - top, centres[None] - left
            inside = y**2 + x**2 < radius**2
            their_rows = (clip.source[0] + y).expand(side, side)
            their_columns = (clip.source[1] + x).expand(side, side)
            seen = self._look(clip.photo, rows, columns)
            cut = self._look(clip.cutting, their_rows, their_columns)
            pixels.append(torch.where(inside, cut, seen))
            waves = torch.where(
                inside,
                denoiser.waves(their_rows, their_columns, SHORT_SIDE, LENGTHS),
                denoiser.waves(rows, columns, SHORT_SIDE, LENGTHS),
            )
            places.append(torch.cat([waves, inside[None], torch.ones(1, side, side)]))
        told = torch.zeros(frames, 1, 1)
        told[::TOLD_EVERY] = 1
        return torch.stack(pixels, 1), torch.stack(places, 1) * told

    def _look(self, name: str, rows: Tensor, columns: Tensor) -> Tensor:
        """The pixels of a photo at places between its own."""
        pixels = self._photos[name]
        height, width = pixels.shape[1:]
        grid = torch.stack([2 * columns / width - 1, 2 * rows / height - 1], 2)
        found = F.grid_sample(pixels[None], grid[None], padding_mode="border", align_corners=False)
        return found[0]


def prompt(clip: Clip | None) -> Tensor:
    """The tokens of a clip's prompt, ``[16, 64]``; None is no prompt."""
    if clip is None:
        return denoiser.prompt(None).repeat(2, 1)
    return torch.cat([denoiser.prompt(clip.photo), denoiser.prompt(clip.cutting).flip(1)])


def judged_clips() -> list[Clip]:
    """The clips that are judged: one for each photo."""
    photos, generator = Photos(), torch.Generator().manual_seed(2**31)
    found: dict[str, Clip] = {}
    while len(found) < len(denoiser.NAMES):
        clip = photos.random_clip(generator, SIDE)
        found.setdefault(clip.photo, clip)
    return [found[name] for name in denoiser.NAMES]


def load() -> ModelPatcher:
    """The trained transformer as a ComfyUI model; ``denoiser.to_pixels`` decodes its output."""
    settings = denoiser.Settings({**WAN, "dtype": torch.float32})
    settings.sampling_settings = {"shift": SHIFT}
    model = _Filmer(settings, ModelType.FLOW, unet_model=comfy.ldm.wan.model.WanModel)
    return denoiser.with_weights(model, WEIGHTS)


class _Filmer(BaseModel):
    """Takes the places of each sample from the conditioning, under the key ``places``."""

    def concat_cond(self, **kwargs: Any) -> Tensor:
        """What :meth:`Photos.render` told; the host appends it to the noisy pixels."""
        return kwargs["places"].to(kwargs["device"])


def new_transformer() -> nn.Module:
    """An untrained transformer."""
    return new_wan(WAN)


class Trainer(Training):
    """The training of the transformer: stills, and clips of the full side or of half of it."""

    in_bfloat16 = True

    def __init__(self, rate: float, full_share: float):
        super().__init__(new_transformer(), rate, full_share, STATE, WEIGHTS)
        self.photos = Photos()

    def loss(self) -> tuple[str, Tensor]:
        """The loss of a random batch, and what it is of."""
        if happens(STILLS, self.generator):
            frames, side, size = 1, SIDE, 14
        elif self.is_full_size():
            frames, side, size = FRAMES, SIDE, 2
        else:
            frames, side, size = FRAMES, SIDE // 2, 6
        clips = [self.photos.random_clip(self.generator, side) for _ in range(size)]
        rendered = [self.photos.render(clip, side, frames) for clip in clips]
        pixels, places = (torch.stack(each) for each in zip(*rendered, strict=True))
        kept = (torch.rand(size, generator=self.generator) >= 0.1).tolist()
        prompts = torch.stack(
            [prompt(clip if keep else None) for clip, keep in zip(clips, kept, strict=True)]
        )
        even = (torch.arange(size) + torch.rand(size, generator=self.generator)) / size
        times = SHIFT * even / (1 + (SHIFT - 1) * even)
        now = times.view(-1, 1, 1, 1, 1)
        noise = torch.randn(pixels.shape, generator=self.generator)
        inputs = torch.cat([(1 - now) * pixels + now * noise, places], dim=1)
        with differentiable():
            answer = self.model(inputs, 1000 * times, prompts)
        loss = (answer - (noise - pixels)).square().mean()
        return f"{frames}x{side}x{side}", loss


if __name__ == "__main__":
    run("Train the transformer of videos, or continue.", Trainer)
