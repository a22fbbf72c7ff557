"""Tiny models of latent-diffusion with random weights, and sampling runs by its own samplers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ldm.modules.attention import BasicTransformerBlock
from ldm.modules.diffusionmodules.openaimodel import UNetModel
from ldm.modules.diffusionmodules.util import make_beta_schedule
from torch import Tensor, nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRID = (12, 16)
TOKENS = 12 * 16
TEXT_CHANNELS = 32


class BlockOfVersion1(BasicTransformerBlock):
    """A block of the first release, which has no option to attend to text instead of itself."""

    def _forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), context=context)
        return x + self.ff(self.norm3(x))


class LatentDiffusion(nn.Module):
    """The model interface of ldm's samplers; the real one needs pytorch-lightning 1.4."""

    num_timesteps = 1000
    parameterization = "eps"
    device = DEVICE

    def __init__(self, unet: nn.Module):
        super().__init__()
        self.model: Any = nn.Module()
        self.model.diffusion_model = unet
        betas = make_beta_schedule("linear", self.num_timesteps, 0.00085, 0.012)
        alphas = torch.cumprod(1 - torch.as_tensor(betas), 0)
        self.betas = torch.as_tensor(betas, device=DEVICE)
        self.alphas_cumprod = alphas.float()
        self.alphas_cumprod_prev = torch.cat([torch.ones(1), alphas[:-1].float()])

    def apply_model(self, x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        answer: Tensor = self.model.diffusion_model(x, t, context=c)
        return answer


SHARED: dict[str, Any] = {
    **{"image_size": 64, "in_channels": 4, "out_channels": 4, "model_channels": 32},
    **{"num_res_blocks": 1, "attention_resolutions": [1, 2], "channel_mult": (1, 2)},
    **{"use_spatial_transformer": True, "context_dim": TEXT_CHANNELS, "legacy": False},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "sd1": {"num_heads": 4, "use_checkpoint": True},
    "sd2": {"num_head_channels": 8, "use_linear_in_transformer": True},
    "x4_upscaler": {"num_heads": 4, "disable_self_attentions": [True, False]},
}


def make_model(family: str = "sd1") -> LatentDiffusion:
    """A model of a family, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = UNetModel(**SHARED, **FAMILIES[family]).eval()
        # Untrained, its output would be zero.
        for parameter in unet.parameters():
            if not parameter.any():
                parameter.data.normal_(0, 0.1)
    if family == "sd1":
        for module in unet.modules():
            if isinstance(module, BasicTransformerBlock):
                module.__class__ = BlockOfVersion1
                del module.disable_self_attn
    return LatentDiffusion(unet).to(DEVICE)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, *GRID), (7, TEXT_CHANNELS))
    return [torch.randn(2, *shape, generator=generator).to(DEVICE) for shape in shapes]


@torch.no_grad()
def call(model: LatentDiffusion) -> Tensor:
    """One evaluation."""
    sample, text = inputs()
    return model.apply_model(sample, torch.full((2,), 500, device=DEVICE), text)


def run(
    model: LatentDiffusion,
    sampler: Any,
    steps: int = 4,
    callback: Callable[[int], None] | None = None,
) -> Tensor:
    """A sampling run with classifier-free guidance, by a sampler of ldm.

    After each step, the callback gets the number of the step.
    """
    torch.manual_seed(3)
    _, text = inputs()
    guidance = {"unconditional_guidance_scale": 4.0, "unconditional_conditioning": text[1:]}
    made = sampler(model).sample(
        steps, 1, (4, *GRID), text[:1], verbose=False, callback=callback, **guidance
    )
    latent: Tensor = made[0]
    return latent
