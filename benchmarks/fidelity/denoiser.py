"""A small trained denoiser that judges pictures: ComfyUI's own UNet on crops of a few photos.

It has the layout of SD 1.5 on a small scale: self-attention over all 64x64 = 4096 tokens at the top
level, cross-attention to a prompt, guidance by leaving the prompt out, SD's noise schedule,
predicted velocities. Pixels take the place of latents. The prompt names the photo; additional input
channels, as in an inpainting model, say where in the photo the crop is.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import comfy.latent_formats
import torch
from comfy.model_base import BaseModel, ModelType
from comfy.model_patcher import ModelPatcher
from comfy.supported_models_base import BASE
from torch import Tensor

from benchmarks.fidelity import weights

WEIGHTS = Path(__file__).with_name("denoiser.npz")

HEIGHT = 80
WIDTHS = {"astronaut": 80, "chelsea": 120, "coffee": 120, "china": 120, "flower": 120}
"""The photos, all scaled to one height. They are from scikit-image and scikit-learn."""
NAMES = [*WIDTHS]
SIDE = 64
CONTEXT_SHAPE = (8, 64)
"""Tokens and channels of a prompt."""
PLACE_CHANNELS = 16
MEAN, DEVIATION = 0.45, 0.27
"""Mean and deviation of the photos' pixels, roughly."""

HELD_OUT = 8
"""Crops whose top or left is a multiple of this were held out from training."""

UNET: dict[str, Any] = {
    "image_size": SIDE,
    "in_channels": 3 + PLACE_CHANNELS,
    "out_channels": 3,
    "model_channels": 64,
    "num_res_blocks": [1, 1, 1],
    "channel_mult": (1, 2, 2),
    "num_head_channels": 32,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "transformer_depth": [1, 1, 0],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1, 1, 1, 0, 0],
    "context_dim": CONTEXT_SHAPE[1],
    "legacy": False,
}


class Crop(NamedTuple):
    """A square part of a photo at ``top``, ``left``; ``side`` in pixels of the photo."""

    photo: str
    top: int
    left: int
    side: int = SIDE


class Pixels(comfy.latent_formats.LatentFormat):
    """Pixels of mean 0 and variance 1 in place of latents; they need no decoding."""

    latent_channels = 3


class Settings(BASE):
    """The description of a model that the host needs."""

    latent_format = Pixels
    memory_usage_factor = 1.0
    unet_extra_config: dict[str, Any] = {}  # noqa: RUF012


class OfCrops(BaseModel):
    """Takes a crop for each sample from the conditioning, under the key ``crops``."""

    def concat_cond(self, **kwargs: Any) -> Tensor:
        """The places of the crops; the host appends them to the noisy pixels."""
        side = kwargs["noise"].shape[-1]
        return torch.stack([place(crop, side) for crop in kwargs["crops"]]).to(kwargs["device"])


def load() -> ModelPatcher:
    """The trained denoiser as a ComfyUI model; :func:`to_pixels` decodes its output."""
    settings = Settings({**UNET, "dtype": torch.float32})
    return with_weights(OfCrops(settings, ModelType.V_PREDICTION), WEIGHTS)


def with_weights(model: BaseModel, file: Path) -> ModelPatcher:
    """A model with the trained weights of a file, ready to sample with."""
    return ready(model, weights.load(file))


def ready(model: BaseModel, trained: Mapping[str, Tensor]) -> ModelPatcher:
    """A model with trained weights, ready to sample with."""
    model.diffusion_model.load_state_dict(trained)
    device = comfy.model_management.get_torch_device()
    return ModelPatcher(model, load_device=device, offload_device=torch.device("cpu"))


def to_pixels(latent: Tensor) -> Tensor:
    """``[batch, 3, height, width]`` pixels from 0 to 1."""
    return (latent * DEVIATION + MEAN).clamp(0, 1)


def prompt(name: str) -> Tensor:
    """The tokens of a photo's prompt, ``[8, 64]``."""
    generator = torch.Generator().manual_seed(NAMES.index(name))
    return torch.randn(CONTEXT_SHAPE, generator=generator)


def place(crop: Crop, side: int = SIDE) -> Tensor:
    """The place of a crop as waves of several lengths; the longest is twice a photo's height.

    Returns:
        ``[16, side, side]``, of the same crop whatever its side in tokens.
    """
    shape = (side, side)
    steps = (torch.arange(side) + 0.5) * crop.side / side
    rows, columns = crop.top + steps, crop.left + steps
    times = 2.0 ** torch.arange(PLACE_CHANNELS // 4)[:, None, None]
    places = (rows[:, None].expand(shape), columns.expand(shape))
    phases = [along * math.pi / HEIGHT * times for along in places]
    return torch.cat([wave(phase) for phase in phases for wave in (torch.sin, torch.cos)])


def held_out_crops(count: int) -> list[Crop]:
    """Full-size crops that were not trained on, spread over the photos."""
    places = {
        name: [
            (top, left)
            for top in range(HEIGHT - SIDE + 1)
            for left in range(width - SIDE + 1)
            if top % HELD_OUT == 0 or left % HELD_OUT == 0
        ]
        for name, width in WIDTHS.items()
    }
    generator = torch.Generator().manual_seed(0)
    crops = []
    for index in range(count):
        name = NAMES[index % len(NAMES)]
        chosen = torch.randint(len(places[name]), (), generator=generator)
        crops.append(Crop(name, *places[name][chosen]))
    return crops
