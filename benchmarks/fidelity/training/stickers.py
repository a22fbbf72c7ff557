"""The pictures that the UNet of stickers is trained on, made by a program.

Stickers of one kind are scattered over clouds, whose power falls with frequency as that of photos
does. The stickers are emoji of the font Noto Color Emoji (SIL Open Font License), which Debian has
as ``fonts-noto-color-emoji``.
"""

import math
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from benchmarks.fidelity import latents
from benchmarks.fidelity.sticker_unet import CLOUDS, KINDS, PROMPT_SHAPE, SCALE, prompt

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
_FONT_SIZE = 109
"""The only size that the font has."""

SMALLEST, LARGEST = 44, 104
"""Sides of stickers in pixels."""
_SMALL = 128
"""The side in pixels of a picture with one sticker or two."""
WITHOUT_PROMPT = 0.1
"""The share of samples without a prompt, for guidance."""


class Stickers:
    """Random pictures with their prompts.

    Args:
        generator: only its seed is used.

    Raises:
        SystemExit: the font is missing.
    """

    def __init__(self, generator: torch.Generator):
        if not FONT.exists():
            raise SystemExit(f"{FONT} is missing; install fonts-noto-color-emoji")
        self._random = np.random.default_rng(generator.initial_seed())

    def batch(self, size: int, side: int) -> tuple[Tensor, Tensor]:
        """Latents of ``size`` pictures of ``side`` tokens, and prompts."""
        random, pictures, prompts = self._random, [], []
        for _ in range(size):
            kind, clouds = int(random.integers(len(KINDS))), int(random.integers(CLOUDS))
            pictures.append(picture(kind, clouds, side * latents.CELL, random))
            is_told = random.random() >= WITHOUT_PROMPT
            prompts.append(prompt(kind, clouds) if is_told else torch.zeros(PROMPT_SHAPE))
        pixels = torch.from_numpy(np.stack(pictures))
        return latents.encode(pixels) * SCALE, torch.stack(prompts)


def picture(kind: int, clouds: int, side: int, random: np.random.Generator) -> np.ndarray:
    """A picture, ``[3, side, side]`` float32 from 0 to 1."""
    pixels = _clouds(clouds, side, random)
    count = 1 + int(random.random() < 0.45)
    if side > _SMALL:
        count = max(1, int(random.poisson(1.6 * side**2 / _SMALL**2)))
    for _ in range(count):
        size = math.exp(random.uniform(math.log(SMALLEST), math.log(LARGEST)))
        # Few sizes and turns, so that most stickers are drawn once.
        turn, is_mirrored = int(random.integers(-4, 5)) * 6, bool(random.integers(2))
        sticker = _sticker(kind, int(size / 4) * 4, turn, is_mirrored)
        high, wide = sticker.shape[1:]
        down = int(random.integers(-high // 4, side - 3 * high // 4))
        across = int(random.integers(-wide // 4, side - 3 * wide // 4))
        top, left, bottom, right = max(0, down), max(0, across), down + high, across + wide
        seen = pixels[:, top:bottom, left:right]
        seen_part = sticker[:, top - down :, left - across :]
        seen_part = seen_part[:, : seen.shape[1], : seen.shape[2]]
        seen += seen_part[3:] * (seen_part[:3] - seen)
    return pixels.clip(0, 1)


def _clouds(colour: int, side: int, random: np.random.Generator) -> np.ndarray:
    hue = 2 * math.pi * colour / CLOUDS + random.normal(scale=0.15)
    axis = np.array([math.cos(hue - 2 * math.pi * index / 3) for index in range(3)])
    light = random.uniform(0.35, 0.7)
    across, down = np.fft.rfftfreq(side) * _SMALL, np.fft.fftfreq(side)[:, None] * _SMALL
    radius = np.hypot(down, across)
    radius[0, 0] = np.inf
    shape = (2, *radius.shape)
    waves = random.normal(size=shape) + 1j * random.normal(size=shape)
    fields = np.fft.irfft2(waves / np.maximum(radius, 0.7) ** 1.6, s=(side, side))
    fields /= fields.std((1, 2), keepdims=True)
    flat = (light + 0.13 * axis)[:, None, None]
    tinted: np.ndarray = flat + 0.11 * fields[0] + 0.05 * axis[:, None, None] * fields[1]
    return tinted.astype(np.float32)


@lru_cache(maxsize=500)
def _sticker(kind: int, size: int, turn: int, is_mirrored: bool) -> np.ndarray:
    """A sticker, ``[4, height, width]`` float32 from 0 to 1; the longer side is ``size``."""
    drawn = _emoji(kind)
    if is_mirrored:
        drawn = drawn.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    drawn = drawn.rotate(turn, expand=True, resample=Image.Resampling.BICUBIC)
    drawn = drawn.crop(drawn.getbbox())
    scale = size / max(drawn.size)
    high, wide = (max(1, round(each * scale)) for each in drawn.size[::-1])
    drawn = drawn.resize((wide, high), Image.Resampling.LANCZOS)
    return (np.asarray(drawn, np.float32) / 255).transpose(2, 0, 1)


@cache
def _emoji(kind: int) -> Image.Image:
    font = ImageFont.truetype(str(FONT), _FONT_SIZE)
    drawn = Image.new("RGBA", (136, 128))
    ImageDraw.Draw(drawn).text((0, 0), KINDS[kind], font=font, embedded_color=True)
    return drawn.crop(drawn.getbbox())
