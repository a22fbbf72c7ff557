"""Trained weights in few bits: whole numbers, with a scale for each output channel.

Weights that were trained from others take less room as what they differ by.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZIP_LZMA, ZipFile

import numpy as np
import torch
from torch import Tensor

LEVELS = 64
"""The largest whole number. With more, files grow; with fewer, figures move."""

_SCALES, _STEPS, _BASE = "scales of ", "steps", "base"


def save(weights: Mapping[str, Tensor], steps: int, file: Path, base: Path | None = None) -> None:
    """Write weights, and after how many steps of training they were taken.

    Weights of one dimension, such as biases, are few and stay in 16 bits.

    Args:
        weights: by name.
        steps: how many.
        file: where to.
        base: a file in the same folder with the weights that the training began with; without it,
            the file cannot be read.
    """
    arrays: dict[str, Any] = {_STEPS: np.array(steps)}
    before: Mapping[str, Tensor] = {}
    if base is not None:
        arrays[_BASE] = np.array([base.name, _digest(base)])
        before, _ = load(base)
    for name, weight in weights.items():
        if weight.ndim < 2:
            arrays[name] = weight.half().cpu().numpy()
            continue
        rows = weight.float().flatten(1).cpu()
        scales = (rows.abs().amax(1) / LEVELS).half().clamp_min(torch.finfo(torch.half).tiny)
        rounded = (rows / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        rounded -= _whole(before, name, scales)
        arrays[name] = rounded.view(weight.shape).numpy()
        arrays[_SCALES + name] = scales.numpy()
    # NumPy reads these as its own, which are larger.
    with ZipFile(file, "w", ZIP_LZMA) as packed:
        for name, array in arrays.items():
            with packed.open(f"{name}.npy", "w") as stream:
                np.lib.format.write_array(stream, array)


def load(file: Path) -> tuple[dict[str, Tensor], int]:
    """The weights of a file in float32, and after how many steps they were taken.

    Raises:
        ValueError: they differ from those of another file, which has changed.
    """
    with np.load(file) as arrays:
        before: Mapping[str, Tensor] = {}
        if _BASE in arrays:
            name, digest = arrays[_BASE].tolist()
            base = file.with_name(name)
            if _digest(base) != digest:
                raise ValueError(
                    f"{file.name} tells what differs from a {name} that is gone: delete "
                    f"{file.name} and train it again"
                )
            before, _ = load(base)
        weights = {}
        for name in arrays.files:
            if name in (_STEPS, _BASE) or name.startswith(_SCALES):
                continue
            weight = torch.from_numpy(arrays[name])
            if _SCALES + name in arrays:
                scales = torch.from_numpy(arrays[_SCALES + name])
                rounded = weight.flatten(1) + _whole(before, name, scales)
                weight = (rounded.float() * scales.float()[:, None]).view(weight.shape)
            weights[name] = weight.float()
        return weights, int(arrays[_STEPS])


def _whole(weights: Mapping[str, Tensor], name: str, scales: Tensor) -> Tensor:
    """A weight in whole numbers, ``[rows, others]`` int8, counted around; 0 if there is none.

    Sums of such numbers are counted around too, so what is taken off can be added again.
    """
    if name not in weights:
        return torch.zeros((), dtype=torch.int8)
    rows = weights[name].flatten(1) / scales.float()[:, None]
    return rows.round().to(torch.int64).to(torch.int8)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
