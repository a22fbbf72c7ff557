"""A small trained denoiser to judge pictures by: ComfyUI's own UNet on crops of a few photos.

It has the layout of SD 1.5 in small: self-attention over all 64x64 = 4096 tokens at the top level,
cross-attention to a prompt, guidance by leaving the prompt out, SD's noise schedule, predicted
velocities. Pixels take the place of latents. The prompt names the photo; additional input channels,
as in an inpainting model, say where in the photo the crop is.

    python -m benchmarks.fidelity.denoiser --minutes 90      train, or continue training

It can be stopped at any time, and continues where it stopped. Every few minutes the averaged
weights are saved to `benchmarks/denoiser.npz`.
"""

import math
from pathlib import Path
from typing import Any

from benchmarks.host import use_cpu

if __name__ == "__main__":
    use_cpu()

import comfy.latent_formats
import comfy.ops
import torch
from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock, UNetModel
from comfy.model_base import BaseModel, ModelType
from comfy.model_patcher import ModelPatcher
from comfy.model_sampling import ModelSamplingDiscrete
from comfy.supported_models_base import BASE
from torch import Tensor, nn

from benchmarks.fidelity import weights
from benchmarks.fidelity.photos import Crop, photo
from benchmarks.fidelity.training import Training, below, run

WEIGHTS = Path(__file__).with_name("denoiser.npz")
STATE = Path(__file__).parents[2] / "demo" / "denoiser-training.pt"

NAMES = ("astronaut", "chelsea", "coffee", "china", "flower")
SHORT_SIDE = 80
SIDE = 64
CONTEXT_SHAPE = (8, 64)
"""Tokens and channels of a prompt."""
PLACE_CHANNELS = 16
MEAN, DEVIATION = 0.45, 0.27
"""Mean and deviation of the photos' pixels, roughly."""

HELD_OUT = 8
"""Crops whose top or left is a multiple of this are held out from training."""

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
        return torch.stack([place(crop) for crop in kwargs["crops"]]).to(kwargs["device"])


def load() -> ModelPatcher:
    """The trained denoiser as a ComfyUI model; :func:`to_pixels` decodes its output."""
    settings = Settings({**UNET, "dtype": torch.float32})
    return with_weights(OfCrops(settings, ModelType.V_PREDICTION), WEIGHTS)


def with_weights(model: BaseModel, file: Path) -> ModelPatcher:
    """A model with trained weights, ready to sample with."""
    trained, _ = weights.load(file)
    model.diffusion_model.load_state_dict(trained)
    cpu = torch.device("cpu")
    return ModelPatcher(model, load_device=host_device(), offload_device=cpu)


def host_device() -> torch.device:
    """The device on which the host runs models."""
    return comfy.model_management.get_torch_device()


def to_pixels(latent: Tensor) -> Tensor:
    """``[batch, 3, height, width]`` pixels from 0 to 1."""
    return (latent * DEVIATION + MEAN).clamp(0, 1)


def from_pixels(pixels: Tensor) -> Tensor:
    """The inverse of :func:`to_pixels`."""
    return (pixels - MEAN) / DEVIATION


def prompt(name: str | None) -> Tensor:
    """The tokens of a photo's prompt, ``[8, 64]``; None is no prompt."""
    if name is None:
        return torch.zeros(CONTEXT_SHAPE)
    generator = torch.Generator().manual_seed(NAMES.index(name))
    return torch.randn(CONTEXT_SHAPE, generator=generator)


def place(crop: Crop) -> Tensor:
    """The place of a crop, ``[16, side, side]``; see :func:`waves`."""
    rows, columns = (
        torch.arange(start, start + crop.side) + 0.5 for start in (crop.top, crop.left)
    )
    shape = (crop.side, crop.side)
    return waves(
        rows[:, None].expand(shape), columns.expand(shape), SHORT_SIDE, PLACE_CHANNELS // 4
    )


def waves(rows: Tensor, columns: Tensor, short_side: int, lengths: int) -> Tensor:
    """Places in a photo as waves of several lengths, the longest twice its short side.

    Args:
        rows: ``[height, width]``, down from the top of the photo, in pixels.
        columns: the same, across.
        short_side: that of the photo.
        lengths: how many, each half of the one before.

    Returns:
        ``[4 * lengths, height, width]``.
    """
    times = 2.0 ** torch.arange(lengths)[:, None, None]
    phases = [places * math.pi / short_side * times for places in (rows, columns)]
    return torch.cat([f(each) for each in phases for f in (torch.sin, torch.cos)])


def is_held_out(top: int, left: int) -> bool:
    """Whether full-size crops at this place are held out from training."""
    return top % HELD_OUT == 0 or left % HELD_OUT == 0


class Data:
    """Random crops of the photos, with their places and prompts.

    Args:
        generator: of random numbers.
        full_side: that of the crops of which some are held out.
    """

    def __init__(self, generator: torch.Generator, full_side: int = SIDE):
        self.generator = generator
        self.photos = {name: from_pixels(photo(name, SHORT_SIDE)) for name in NAMES}
        self._full_side = full_side

    def batch(self, size: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels, places and prompts of ``size`` crops; a tenth of the prompts is left out."""
        crops = [self._crop(side) for _ in range(size)]
        pixels = torch.stack([crop.of(self.photos[crop.photo]) for crop in crops])
        kept = torch.rand(size, generator=self.generator) >= 0.1
        chosen = zip(crops, kept.tolist(), strict=True)
        prompts = torch.stack([prompt(crop.photo if keep else None) for crop, keep in chosen])
        return pixels, torch.stack([place(crop) for crop in crops]), prompts

    def _crop(self, side: int) -> Crop:
        name = NAMES[below(len(NAMES), self.generator)]
        height, width = self.photos[name].shape[1:]
        while True:
            top = below(height - side + 1, self.generator)
            left = below(width - side + 1, self.generator)
            if side < self._full_side or not is_held_out(top, left):
                return Crop(name, top, left, side)


def held_out_crops(count: int) -> list[Crop]:
    """Full-size crops that were not trained on, spread over the photos."""
    photos = {name: photo(name, SHORT_SIDE) for name in NAMES}
    places = {
        name: [
            (top, left)
            for top in range(pixels.shape[1] - SIDE + 1)
            for left in range(pixels.shape[2] - SIDE + 1)
            if is_held_out(top, left)
        ]
        for name, pixels in photos.items()
    }
    generator = torch.Generator().manual_seed(0)
    crops = []
    for index in range(count):
        name = NAMES[index % len(NAMES)]
        chosen = below(len(places[name]), generator)
        crops.append(Crop(name, *places[name][chosen], SIDE))
    return crops


def new_unet() -> UNetModel:
    """An untrained UNet; the host's layers have no initial weights."""
    unet = UNetModel(**UNET, dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    for module in unet.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.GroupNorm | nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
    # Residual branches start at zero, so that the deep network trains from the start.
    for module in unet.modules():
        if isinstance(module, ResBlock):
            nn.init.zeros_(module.out_layers[-1].weight)
        elif isinstance(module, SpatialTransformer):
            nn.init.zeros_(module.proj_out.weight)
    nn.init.zeros_(unet.out[-1].weight)
    return unet.requires_grad_(True)


class Trainer(Training):
    """The training of the denoiser, on crops of the full side or of half of it."""

    def __init__(self, rate: float, full_share: float):
        unet = new_unet().to(memory_format=torch.channels_last)
        super().__init__(unet, rate, full_share, STATE, WEIGHTS)
        self.sigmas = ModelSamplingDiscrete().sigmas
        self.data = Data(self.generator, full_side=SIDE)

    def loss(self) -> tuple[int, Tensor]:
        """The loss of a random batch, and the side of its crops."""
        side, size = (SIDE, 2) if self.is_full_size() else (SIDE // 2, 8)
        pixels, places, prompts = self.data.batch(size, side)
        times = torch.rand(size, generator=self.generator)
        times = ((torch.arange(size) + times) * len(self.sigmas) / size).long()
        sigma = self.sigmas[times].view(-1, 1, 1, 1)
        noise = torch.randn(pixels.shape, generator=self.generator)
        size_of_input = (sigma**2 + 1).sqrt()
        target = (noise - sigma * pixels) / size_of_input
        inputs = torch.cat([(pixels + sigma * noise) / size_of_input, places], dim=1)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        return side, (self.model(inputs, times, context=prompts) - target).square().mean()


if __name__ == "__main__":
    run("Train the denoiser, or continue.", Trainer)
