"""A latent that replaces a trained autoencoder's: the lowest cosine frequencies of 4x4 pixels.

It has eight channels: six for brightness and one for each of two colours. Frequencies are scaled by
the root of their own deviation in scenes: as in the latents of trained autoencoders, power falls
with frequency, but less than it does in pixels.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CELL = 4
"""The side, in pixels, of the square that one position of the latent holds."""
CHANNELS = 8
FREQUENCIES = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
"""Frequencies of brightness, down and across; colours have only the first."""

MEAN = 0.5


def encode(pixels: Tensor) -> Tensor:
    """The latent ``[batch, 8, height / 4, width / 4]`` of pixels from 0 to 1.

    Args:
        pixels: ``[batch, 3, height, width]``.
    """
    return F.conv2d(pixels - MEAN, _basis(), stride=CELL) / _scales()


def decode(latent: Tensor) -> Tensor:
    """The pixels ``[batch, 3, height, width]`` of a latent, from 0 to 1.

    Args:
        latent: ``[batch, 8, height / 4, width / 4]``.
    """
    pixels = F.conv_transpose2d(latent * _scales(), _basis(), stride=CELL)
    return (pixels + MEAN).clamp(0, 1)


def _scales() -> Tensor:
    return torch.tensor(_SCALES).view(1, CHANNELS, 1, 1)


def _basis() -> Tensor:
    """Orthonormal ``[8, 3, 4, 4]``."""
    root = math.sqrt
    brightness = torch.full((3,), 1 / root(3))
    red = torch.tensor([1, -1, 0]) / root(2)
    blue = torch.tensor([1, 1, -2]) / root(6)
    places = (torch.arange(CELL) + 0.5) * math.pi / CELL
    waves = [torch.cos(k * places) * root((2 if k else 1) / CELL) for k in range(CELL)]
    cells = [waves[down][:, None] * waves[across] for down, across in FREQUENCIES]
    channels = [(brightness, cell) for cell in cells] + [(red, cells[0]), (blue, cells[0])]
    return torch.stack([colour[:, None, None] * cell for colour, cell in channels])


_SCALES = (0.896, 0.368, 0.368, 0.251, 0.233, 0.233, 0.534, 0.575)
"""Roots of the deviations in 160 scenes, scaled so that latents have a mean power of 1."""
