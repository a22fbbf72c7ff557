"""Trained weights in few bits: whole numbers, with a scale for each output channel."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEVELS = 64
"""The largest whole number. With more, files grow; with fewer, figures move."""

_SCALES, _STEPS = "scales of ", "steps"


def save(weights: Mapping[str, Tensor], steps: int, file: Path) -> None:
    """Write weights, and after how many steps of training they were taken.

    Weights of one dimension, such as biases, are few and stay in 16 bits.
    """
    arrays: dict[str, Any] = {_STEPS: np.array(steps)}
    for name, weight in weights.items():
        if weight.ndim < 2:
            arrays[name] = weight.half().cpu().numpy()
            continue
        rows = weight.float().flatten(1)
        scales = (rows.abs().amax(1) / LEVELS).half().clamp_min(torch.finfo(torch.half).tiny)
        rounded = (rows / scales.float()[:, None]).round().clamp(-127, 127)
        arrays[name] = rounded.to(torch.int8).view(weight.shape).cpu().numpy()
        arrays[_SCALES + name] = scales.cpu().numpy()
    with file.open("wb") as stream:
        np.savez_compressed(stream, **arrays)


def load(file: Path) -> tuple[dict[str, Tensor], int]:
    """The weights of a file in float32, and after how many steps they were taken."""
    with np.load(file) as arrays:
        weights = {}
        for name in arrays.files:
            if name == _STEPS or name.startswith(_SCALES):
                continue
            weight = torch.from_numpy(arrays[name]).float()
            if _SCALES + name in arrays:
                scales = torch.from_numpy(arrays[_SCALES + name]).float()
                weight = weight * scales.view(-1, *[1] * (weight.ndim - 1))
            weights[name] = weight
        return weights, int(arrays[_STEPS])
