"""A small trained transformer to judge pictures by: ComfyUI's own Flux on crops of a few photos.

It has the layout of Flux in small: blocks of two streams and of one, text beside the picture,
positions by rotation, a flow from noise to pixels, guidance by leaving the prompt out. 48x48 = 2304
tokens of 2x2 pixels. The prompt names the photo, and further channels say where in it the crop is.

    python -m benchmarks.fidelity.picture_transformer --minutes 60      train, or continue training

It can be stopped at any time, and continues where it stopped.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.host import use_cpu

if __name__ == "__main__":
    use_cpu()

import comfy.ldm.flux.model
import comfy.model_management
import comfy.ops
import torch
from comfy.model_base import ModelType
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from benchmarks.fidelity import denoiser
from benchmarks.fidelity.photos import Crop
from benchmarks.fidelity.training import Training, run

WEIGHTS = Path(__file__).with_name("picture_transformer.npz")
STATE = Path(__file__).parents[2] / "demo" / "picture-transformer-training.pt"

SHORT_SIDE = 120
SIDE = 96
PATCH = 2
LENGTHS = 6
"""How many waves tell a place; see :func:`benchmarks.fidelity.denoiser.waves`."""

SHIFT = 0.5
"""How much more of the steps are noisy ones; 0 for none."""

FLUX: dict[str, Any] = {
    "in_channels": 3 + 4 * LENGTHS,
    "out_channels": 3,
    "patch_size": PATCH,
    "vec_in_dim": None,
    "context_in_dim": denoiser.CONTEXT_SHAPE[1],
    "hidden_size": 192,
    "mlp_ratio": 3.0,
    "num_heads": 3,
    "depth": 2,
    "depth_single_blocks": 6,
    "axes_dim": [16, 24, 24],
    "theta": 1000,
    "qkv_bias": True,
    "guidance_embed": False,
    "txt_ids_dims": [],
}


class _Painter(denoiser.OfCrops):
    def place_of(self, crop: Crop) -> Tensor:
        return place(crop)


def load() -> ModelPatcher:
    """The trained transformer as a ComfyUI model; ``denoiser.to_pixels`` decodes its output."""
    settings = denoiser.Settings({**FLUX, "dtype": torch.float32})
    settings.sampling_settings = {"shift": SHIFT}
    model = _Painter(settings, ModelType.FLUX, unet_model=comfy.ldm.flux.model.Flux)
    return denoiser.with_weights(model, WEIGHTS)


def place(crop: Crop) -> Tensor:
    """The place of a crop, ``[24, side, side]``."""
    return denoiser.place(crop, SHORT_SIDE, LENGTHS)


def new_transformer(settings: Mapping[str, Any] = FLUX) -> nn.Module:
    """An untrained Flux; the host's layers have no initial weights."""
    transformer = comfy.ldm.flux.model.Flux(
        **settings, dtype=torch.float32, operations=comfy.ops.disable_weight_init
    )
    initialise(transformer)
    outputs = ("mod.lin", "modulation.lin", "final_layer.linear", "adaLN_modulation.1")
    for name, module in transformer.named_modules():
        # Blocks start as the identity, so that the deep network trains from the start.
        if isinstance(module, nn.Linear) and name.endswith(outputs):
            nn.init.zeros_(module.weight)
        if isinstance(module, nn.LayerNorm):
            # Blocks change their tokens in place, which the gradient of a norm does not survive.
            module.register_forward_pre_hook(lambda _, tokens: (tokens[0].clone(),))
    return transformer.requires_grad_(True)


def initialise(transformer: nn.Module) -> None:
    """Initial weights for the host's layers, which have none."""
    for module in transformer.modules():
        if isinstance(module, nn.Linear | nn.Conv3d):
            nn.init.xavier_uniform_(module.weight.flatten(1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
            nn.init.ones_(module.weight)
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor):
                nn.init.zeros_(bias)


def flow_loss(
    model: nn.Module,
    pixels: Tensor,
    places: Tensor,
    prompts: Tensor,
    shift: float,
    unit: float,
    generator: torch.Generator,
) -> Tensor:
    """The error of a model's flow from pixels to noise, at times spread over 0 to 1.

    Args:
        model: called with pixels and places, times and prompts.
        pixels: ``[batch, 3, ...]``.
        places: ``[batch, channels, ...]``, told in further channels.
        prompts: ``[batch, tokens, channels]``.
        shift: the ratio of noise to signal in the middle of the times.
        unit: the time of pure noise, as the model counts.
        generator: of the times and the noise.
    """
    size = len(pixels)
    even = (torch.arange(size) + torch.rand(size, generator=generator)) / size
    times = shift * even / (1 + (shift - 1) * even)
    noise = torch.randn(pixels.shape, generator=generator)
    now = times.view(-1, *[1] * (pixels.ndim - 1))
    inputs = torch.cat([(1 - now) * pixels + now * noise, places], dim=1)
    with differentiable():
        answer = model(inputs, unit * times, prompts)
    return (answer - (noise - pixels)).square().mean()


@contextmanager
def differentiable() -> Iterator[None]:
    """Have the host rotate by position in a way that has a gradient."""
    before = comfy.model_management.in_training
    comfy.model_management.in_training = True
    try:
        yield
    finally:
        comfy.model_management.in_training = before


class Trainer(Training):
    """The training of the transformer, on crops of the full side or of half of it."""

    in_bfloat16 = True

    def __init__(self, rate: float, full_share: float):
        super().__init__(new_transformer(), rate, full_share, STATE, WEIGHTS)
        self.data = denoiser.Data(self.generator, SHORT_SIDE, SIDE, place)

    def loss(self) -> tuple[int, Tensor]:
        """The loss of a random batch, and the side of its crops."""
        side, size = (SIDE, 2) if self.is_full_size() else (SIDE // 2, 8)
        batch = self.data.batch(size, side)
        return side, flow_loss(self.model, *batch, math.exp(SHIFT), 1, self.generator)


if __name__ == "__main__":
    run("Train the transformer of pictures, or continue.", Trainer)
