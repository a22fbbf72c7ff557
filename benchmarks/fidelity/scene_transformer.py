"""A small trained transformer to judge pictures by: ComfyUI's own Flux on scenes made by a program.

It has the layout of Flux in small, 32x32 = 1024 tokens of 8x8 pixels, a flow from noise to the
latent of :mod:`benchmarks.fidelity.latents`, guidance by leaving the prompt out. Nothing tells it
where anything is: the picture comes from the noise, as in a model that people use.

    python -m benchmarks.fidelity.scene_transformer --minutes 60      train, or continue training

It can be stopped at any time, and continues where it stopped.
"""

import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.host import use_cpu

if __name__ == "__main__":
    use_cpu()

import comfy.latent_formats
import comfy.ldm.flux.model
import torch
from comfy.model_base import BaseModel, ModelType
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.fidelity import denoiser, latents, scenes
from benchmarks.fidelity.networks import differentiable, new_flux
from benchmarks.fidelity.training import Training, below, run
from benchmarks.fidelity.weights import load as load_weights
from tools.environment import ROOT

WEIGHTS = Path(__file__).with_name("scene_transformer.npz")
STATES = Path(os.environ.get("JUDGES", ROOT / "demo"))
"""The folder of unfinished trainings."""
STATE = STATES / "scene-transformer-training.pt"

PATCH = 2
SIDE = 256
"""Of a judged picture, in pixels."""
LATENT_SIDE = SIDE // latents.CELL
SHIFT = 1.15
"""How much more of the steps are noisy ones, as in Flux at its usual size; 0 for none."""

SCENES = 8000
"""How many scenes a training sees, each of which it crops anew every time."""
HELD_OUT = 10**6
"""Judged captions are those of scenes from this seed on, on which nothing was trained."""

FLUX: dict[str, Any] = {
    "in_channels": latents.CHANNELS,
    "out_channels": latents.CHANNELS,
    "patch_size": PATCH,
    "vec_in_dim": None,
    "context_in_dim": scenes.PROMPT_SHAPE[1],
    "hidden_size": 192,
    "mlp_ratio": 3.0,
    "num_heads": 3,
    "depth": 1,
    "depth_single_blocks": 6,
    "axes_dim": [16, 24, 24],
    "theta": 1000,
    "qkv_bias": True,
    "guidance_embed": False,
    "txt_ids_dims": [],
}


def held_out_prompts(count: int) -> Tensor:
    """Prompts of captions that are judged, ``[count, 4, 64]``."""
    seeds = range(HELD_OUT, HELD_OUT + count)
    return torch.stack([scenes.prompt(scenes.caption_of(seed)) for seed in seeds])


class Latents(comfy.latent_formats.LatentFormat):
    """The host's description of the latent."""

    latent_channels = latents.CHANNELS


class Settings(denoiser.Settings):
    """The host's settings of a model that paints such latents."""

    latent_format = Latents


def load(weights: Path = WEIGHTS) -> ModelPatcher:
    """The trained transformer as a ComfyUI model; ``latents.decode`` decodes its output."""
    settings = Settings({**FLUX, "dtype": torch.float32})
    settings.sampling_settings = {"shift": SHIFT}
    model = BaseModel(settings, ModelType.FLUX, unet_model=comfy.ldm.flux.model.Flux)
    return denoiser.with_weights(model, weights)


def new_transformer() -> nn.Module:
    """An untrained transformer."""
    return new_flux(FLUX)


def trained(settings: Mapping[str, Any] = FLUX) -> nn.Module:
    """A transformer with the averaged weights, to go on from; the settings may be others."""
    model = new_flux(settings)
    model.load_state_dict(load_weights(WEIGHTS)[0])
    return model


class Scenes:
    """Latents of scenes, held in memory, and random crops of them."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator
        made = [scenes.scene(seed, SIDE) for seed in range(SCENES)]
        self.latents = torch.cat([latents.encode(pixels[None]).half() for pixels, _ in made])
        self.prompts = torch.stack([scenes.prompt(caption) for _, caption in made])

    def batch(self, size: int, side: int) -> tuple[Tensor, Tensor]:
        """Latents ``[size, 8, side, side]`` and their prompts, of which a tenth is left out."""
        chosen = torch.randint(len(self.latents), (size,), generator=self.generator)
        crops = []
        for index in chosen.tolist():
            top, left = (below(LATENT_SIDE - side + 1, self.generator) for _ in range(2))
            crops.append(self.latents[index, :, top : top + side, left : left + side].float())
        kept = torch.rand(size, 1, 1, generator=self.generator) >= 0.1
        return torch.stack(crops), self.prompts[chosen] * kept


def random_times(size: int, generator: torch.Generator) -> Tensor:
    """Times spread evenly over the steps of a run, so that pure noise is among them.

    With few near 1, a model has never seen pure noise and takes it for half of a picture.
    """
    even = (torch.arange(size) + torch.rand(size, generator=generator)) / size
    ratio = math.exp(SHIFT)
    return ratio * even / (1 + (ratio - 1) * even)


def attention_of(side: int) -> AbstractContextManager[None]:
    """Has attention run as is fastest for latents of a side: for small ones by plain products."""
    is_small = side < LATENT_SIDE
    return sdpa_kernel(SDPBackend.MATH if is_small else SDPBackend.FLASH_ATTENTION)


class Trainer(Training):
    """The training of the transformer, on crops of the full side or of half of it."""

    def __init__(self, rate: float, full_share: float):
        super().__init__(new_transformer(), rate, full_share, STATE, WEIGHTS)
        self.data = Scenes(self.generator)

    def loss(self) -> tuple[int, Tensor]:
        """The loss of a random batch, and the side of its crops."""
        side, size = (LATENT_SIDE, 4) if self.is_full_size() else (LATENT_SIDE // 2, 16)
        clean, prompts = self.data.batch(size, side)
        times = random_times(size, self.generator)
        noise = torch.randn(clean.shape, generator=self.generator)
        now = times.view(-1, 1, 1, 1)
        with differentiable(), attention_of(side):
            answer = self.model((1 - now) * clean + now * noise, times, prompts)
        return side, (answer - (noise - clean)).square().mean()


if __name__ == "__main__":
    run("Train the transformer of scenes, or continue.", Trainer)
