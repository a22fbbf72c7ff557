"""Photos from the packages of scikit-image and scikit-learn; nothing is downloaded."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from skimage import data
from sklearn.datasets import load_sample_image
from torch import Tensor

PHOTOS: dict[str, Callable[[], np.ndarray]] = {
    "astronaut": data.astronaut,
    "chelsea": data.chelsea,
    "coffee": data.coffee,
    "china": lambda: load_sample_image("china.jpg"),
    "flower": lambda: load_sample_image("flower.jpg"),
    "rocket": data.rocket,
}


def photo(name: str, short_side: int) -> Tensor:
    """A photo ``[3, height, width]`` from 0 to 1, scaled to ``short_side``."""
    pixels = torch.from_numpy(PHOTOS[name]().copy()).permute(2, 0, 1).float() / 255
    scale = short_side / min(pixels.shape[1:])
    size = [round(side * scale) for side in pixels.shape[1:]]
    scaled = F.interpolate(pixels[None], size, mode="bicubic", antialias=True)
    return scaled[0].clamp(0, 1)


@dataclass(frozen=True)
class Crop:
    """A square part of a photo, ``side`` pixels wide, at ``top``, ``left``."""

    photo: str
    top: int
    left: int
    side: int
