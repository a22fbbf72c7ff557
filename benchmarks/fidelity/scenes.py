"""Computer-made scenes: leaves that cover one another, as things in a photo do, and letters.

Sizes of leaves are distributed by the inverse cube, so scenes look alike at any scale and their
power falls with the square of the frequency, as that of photos does. A caption tells the palette,
the sizes, what fills the leaves, and whether there are letters, but not where anything is.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from benchmarks.fidelity.photos import PHOTOS, photo

SMALLEST = (14.0, 24.0, 40.0)
"""Radii of the smallest leaves in pixels, by the caption's ``size``.

With these, neighbouring tokens of a scene are as alike as those of photos with 64 tokens across, as
in a picture of 1024x1024 pixels.
"""
LARGEST = 140.0
FILLS = ("flat", "shaded", "photo")
PALETTES = 8
COLOURS = 5
"""Colours of a palette."""
COVERED = 4.0
"""How many times all leaves of a scene together would cover it."""
PROMPT_SHAPE = (4, 64)
"""Tokens and channels of a prompt: one token for each of what a caption tells."""


@dataclass(frozen=True)
class Caption:
    """What is told about a scene.

    Attributes:
        palette: from 0 to ``PALETTES - 1``.
        size: of the smallest leaves, an index of ``SMALLEST``.
        fill: an index of ``FILLS``.
        letters: 1 if there are letters, else 0.
    """

    palette: int
    size: int
    fill: int
    letters: int


def caption_of(seed: int) -> Caption:
    """The caption of the scene of a seed; any ``PALETTES`` in a row have different palettes."""
    generator = np.random.default_rng([seed, 0])
    size, fill, letters = (int(generator.integers(n)) for n in (len(SMALLEST), len(FILLS), 2))
    return Caption(seed % PALETTES, size, fill, letters)


def prompt(caption: Caption) -> Tensor:
    """The tokens of a caption, ``[4, 64]``."""
    told = (caption.palette, caption.size, caption.fill, caption.letters)
    words = _words()
    return torch.stack([words[kind, value] for kind, value in enumerate(told)])


@cache
def _words() -> Tensor:
    """A token for each value that a caption can tell, ``[4, PALETTES, 64]``."""
    count, channels = PROMPT_SHAPE
    return torch.randn(count, PALETTES, channels, generator=torch.Generator().manual_seed(0))


def scene(seed: int, side: int, caption: Caption | None = None) -> tuple[Tensor, Caption]:
    """The scene of a seed, ``[3, side, side]`` from 0 to 1, and its caption.

    With another ``caption`` of the same size, leaves of the same shapes are at the same places.
    """
    caption = caption or caption_of(seed)
    generator = np.random.default_rng([seed, 1])
    palette = _palette(caption.palette)
    pixels = np.empty((3, side, side), np.float32)
    pixels[:] = palette[generator.integers(COLOURS)][:, None, None]
    smallest = SMALLEST[caption.size]
    area, aim = 0.0, COVERED * (side + LARGEST) ** 2
    while area < aim:
        radius = _radius(generator, smallest)
        area += math.pi * radius**2
        _paint_leaf(pixels, radius, palette, FILLS[caption.fill], generator)
    if caption.letters:
        for _ in range(max(1, side * side // 96**2)):
            _paint_letter(pixels, palette, generator)
    return torch.from_numpy(pixels), caption


def _radius(generator: np.random.Generator, smallest: float) -> float:
    """A random radius; its density falls with the cube."""
    low, high = smallest**-2, LARGEST**-2
    return float((low - generator.random() * (low - high)) ** -0.5)


@cache
def _palette(index: int) -> np.ndarray:
    """The colours of a palette, ``[COLOURS, 3]``: of two hues, from dark to light."""
    generator = np.random.default_rng(1000 + index)
    hues = generator.normal(size=(2, 3))
    hues -= hues.mean(1, keepdims=True)
    hues *= 0.25 / np.linalg.norm(hues, axis=1, keepdims=True)
    lights = np.linspace(0.15, 0.85, COLOURS)
    colours = [light + hues[place % 2] for place, light in enumerate(lights)]
    return np.clip(colours, 0.02, 0.98).astype(np.float32)


def _colour(palette: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    near = palette[generator.integers(COLOURS)] + generator.normal(scale=0.03, size=3)
    return near.astype(np.float32)[:, None, None]


def _paint_leaf(
    pixels: np.ndarray,
    radius: float,
    palette: np.ndarray,
    fill: str,
    generator: np.random.Generator,
) -> None:
    """Paint an ellipse or a rectangle at a random place, over everything there."""
    side = pixels.shape[1]
    down, across = generator.uniform(-LARGEST / 2, side + LARGEST / 2, 2)
    is_round, angle = generator.random() < 0.6, generator.uniform(0, math.pi)
    flatness = generator.uniform(0.5, 1.0)
    colour = _colour(palette, generator)
    light, slope = generator.uniform(0, 2 * math.pi), generator.uniform(0.1, 0.3)
    texture, corner = generator.integers(len(PHOTOS)), generator.random(2)
    reach = radius * (1 if is_round else math.sqrt(1 + flatness**2)) + 1
    top, bottom = max(0, int(down - reach)), min(side, int(down + reach) + 2)
    left, right = max(0, int(across - reach)), min(side, int(across + reach) + 2)
    if top >= bottom or left >= right:
        return
    y = np.arange(top, bottom, dtype=np.float32)[:, None] - np.float32(down)
    x = np.arange(left, right, dtype=np.float32)[None] - np.float32(across)
    u = math.cos(angle) * x + math.sin(angle) * y
    v = (math.cos(angle) * y - math.sin(angle) * x) / flatness
    far = np.hypot(u, v) if is_round else np.maximum(np.abs(u), np.abs(v))
    cover = np.clip((radius - far) * flatness + 0.5, 0, 1)
    if fill == "shaded":
        colour = colour + slope / radius * (math.cos(light) * x + math.sin(light) * y)
    elif fill == "photo":
        colour = colour + _texture(int(texture), corner, bottom - top, right - left)
    seen = pixels[:, top:bottom, left:right]
    seen += cover * (np.clip(colour, 0, 1) - seen)


def _paint_letter(pixels: np.ndarray, palette: np.ndarray, generator: np.random.Generator) -> None:
    """Paint a capital letter at a random place, over everything there."""
    size = int(generator.integers(24, 72))
    letter = chr(ord("A") + int(generator.integers(26)))
    mask = _letter(letter, size)
    colour = _colour(palette, generator)
    high, wide = mask.shape
    side = pixels.shape[1]
    top, left = (int(generator.integers(side - each)) for each in (high, wide))
    seen = pixels[:, top : top + high, left : left + wide]
    seen += mask * (np.clip(colour, 0, 1) - seen)


@cache
def _letter(letter: str, size: int) -> np.ndarray:
    """How much of each pixel a letter covers."""
    font = ImageFont.load_default(size)
    left, top, right, bottom = font.getbbox(letter)
    image = Image.new("L", (math.ceil(right - left), math.ceil(bottom - top)))
    ImageDraw.Draw(image).text((-left, -top), letter, 255, font)
    return np.asarray(image, np.float32) / 255


def _texture(index: int, corner: np.ndarray, height: int, width: int) -> np.ndarray:
    """A part of a photo, minus its mean brightness, ``[height, width]``."""
    whole = _photo(index)
    top, left = (
        int(place * (total - wanted + 1))
        for place, total, wanted in zip(corner, whole.shape, (height, width), strict=True)
    )
    part = whole[top : top + height, left : left + width]
    return part - part.mean()


@cache
def _photo(index: int) -> np.ndarray:
    """The brightness of a photo at half strength; it is at least as large as any leaf."""
    return photo([*PHOTOS][index], 400).mean(0).numpy() / 2
