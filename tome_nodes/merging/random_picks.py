"""The project's own random numbers: a hash of seed, step, grid and cell.

A counter-based generator has no state, so the picks are the same for every batch, device and
restart, and the global generators are neither read nor advanced.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..ops.hashing import MASK, scramble
from .grid import Grid


@lru_cache(maxsize=4096)
def step_key(seed: int, step: int) -> int:
    """The 32-bit key of one sampling step; ``seed`` and ``step`` are not negative."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def pick_per_cell(key: Tensor, cells: Grid, choices: int) -> Tensor:
    """A pick in ``range(choices)`` for each cell.

    Args:
        key: scalar int64 tensor that holds a :func:`step_key`. It is a tensor so that one compiled
            graph serves every step.
        cells: number of cells down and across.
        choices: tokens in a cell, at most 64.

    Returns:
        ``[cells]`` int64 on the device of ``key``.
    """
    stream = scramble(key ^ scramble((cells.height << 16) ^ cells.width))
    index = torch.arange(cells.tokens, device=key.device)
    return (scramble((stream + index) & MASK) * choices) >> 32
