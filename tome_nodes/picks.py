"""The project's own random numbers: a hash of seed, step, grid and cell.

A counter-based generator has no state to carry, so the picks are the same for every batch, every
device and every restart, and the global generators are neither read nor moved.
"""

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from .grid import Grid

_MASK = 0xFFFFFFFF
# Odd, and below 2**31 so that a product with a 32-bit value stays within a signed 64-bit one.
MULTIPLIERS = (0x7C3A95D3, 0x5D1B6E4B, 0x6A09E667)
"""Of the three rounds of the hash."""

Bits = TypeVar("Bits", int, Tensor)


def step_key(seed: int, step: int) -> int:
    """The 32-bit key of one sampling step; ``seed`` and ``step`` are not negative."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def pick_per_cell(key: Tensor, cells: Grid, choices: int) -> Tensor:
    """A pick in ``range(choices)`` for each cell.

    Args:
        key: scalar int64 tensor that holds a :func:`step_key`. A tensor, so that a compiled graph
            serves every step.
        cells: number of cells down and across.
        choices: tokens in a cell, at most 64.

    Returns:
        ``[cells]`` int64 on the device of ``key``.
    """
    stream = _scramble(key ^ _scramble((cells.height << 16) ^ cells.width))
    index = torch.arange(cells.tokens, device=key.device)
    return (_scramble((stream + index) & _MASK) * choices) >> 32


def _scramble(bits: Bits) -> Bits:
    """Mix a 32-bit value so that each input bit moves every output bit."""
    for multiplier in MULTIPLIERS:
        bits = ((bits ^ (bits >> 16)) * multiplier) & _MASK
    return bits ^ (bits >> 15)
