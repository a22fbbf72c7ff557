"""The random picks: a hash of the seed, the step, the size of the grid, and the cell.

A hash has no state. So the picks are the same for every batch, device and restart, and torch's
global generators are neither read nor advanced. The Triton kernels compute the same picks.
"""

from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

_LOW_32_BITS = 0xFFFFFFFF

# Odd, and below 2**31 so that a product with a 32-bit value fits into a signed 64-bit integer.
MULTIPLIERS = (0x7C3A95D3, 0x5D1B6E4B, 0x6A09E667)
"""The multipliers of the three rounds of :func:`scramble`."""

Bits = TypeVar("Bits", int, Tensor)


@lru_cache(maxsize=4096)
def step_key(seed: int, step: int) -> int:
    """The 32-bit key of one sampling step; ``seed`` and ``step`` are not negative."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def pick_per_cell(key: Tensor, rows: int, columns: int, choices: int) -> Tensor:
    """A pick in ``range(choices)`` for every cell.

    Args:
        key: scalar int64 tensor that holds a :func:`step_key`; a tensor, so that one compiled graph
            serves all steps.
        rows: number of cells down.
        columns: number of cells across.
        choices: tokens in a cell, at most 64.

    Returns:
        ``[rows * columns]`` int64 on the device of ``key``.
    """
    stream = scramble(key ^ scramble((rows << 16) ^ columns))
    index = torch.arange(rows * columns, device=key.device)
    return (scramble((stream + index) & _LOW_32_BITS) * choices) >> 32


def scramble(bits: Bits) -> Bits:
    """Mix a 32-bit value so that each input bit affects every output bit."""
    for multiplier in MULTIPLIERS:
        bits = ((bits ^ (bits >> 16)) * multiplier) & _LOW_32_BITS
    return bits ^ (bits >> 15)
