"""Trained weights in few bits: whole numbers, with a scale for each output channel.

Weights that were trained from others are stored as their difference, which takes less space. The
code that trained and wrote these is gone (see benchmarks/FIDELITY.md).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZIP_LZMA, ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor

_LARGEST = 64
"""The largest whole number. With more, files grow; with fewer, pictures change."""

_SCALES, _STEPS, _BASE = "scales of ", "steps", "base"


def save(weights: Mapping[str, Tensor], file: Path) -> None:
    """Write weights by name; weights of one dimension, such as biases, are few and get 16 bits.

    An interrupted write leaves the old file, and equal weights make equal files.
    """
    arrays = {}
    for name, weight in weights.items():
        if weight.ndim < 2:
            arrays[name] = weight.half().numpy()
            continue
        rows = weight.float().flatten(1)
        scales = (rows.abs().amax(1) / _LARGEST).half().clamp_min(torch.finfo(torch.half).tiny)
        rounded = (rows / scales.float()[:, None]).round().to(torch.int8)
        arrays[name] = rounded.view(weight.shape).numpy()
        arrays[_SCALES + name] = scales.numpy()
    # NumPy's own compression makes larger files.
    unfinished = file.with_suffix(".part")
    with ZipFile(unfinished, "w") as packed:
        for name, array in arrays.items():
            entry = ZipInfo(f"{name}.npy")
            entry.compress_type = ZIP_LZMA
            with packed.open(entry, "w") as stream:
                np.lib.format.write_array(stream, array)
    os.replace(unfinished, file)


def load(file: Path) -> dict[str, Tensor]:
    """The weights of a file in float32, by name."""
    with np.load(file) as arrays:
        before: Mapping[str, Tensor] = {}
        if _BASE in arrays:
            # The name of the other file, and a digest of its content.
            before = load(file.with_name(str(arrays[_BASE][0])))
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
        return weights


def _whole(weights: Mapping[str, Tensor], name: str, scales: Tensor) -> Tensor:
    """A weight in whole numbers, ``[rows, others]`` int8 that wrap around; 0 if there is none.

    Sums of such numbers wrap around too, so what was subtracted can be added again.
    """
    if name not in weights:
        return torch.zeros((), dtype=torch.int8)
    rows = weights[name].flatten(1) / scales.float()[:, None]
    return rows.round().to(torch.int64).to(torch.int8)
