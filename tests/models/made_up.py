"""A transformer that no host has, from which tests derive others, in the host's own sampler.

Import this after ComfyUI is on the path and told how to run.
"""

from __future__ import annotations

import math
from typing import Any

import comfy.conds
import comfy.model_base
import comfy.ops
import comfy.supported_models
import torch
from comfy.ldm.modules.attention import optimized_attention
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from einops import rearrange
from torch import Tensor, nn

from .comfyui import with_random_weights

WIDTH, HEADS, TEXT_CHANNELS = 64, 2, 32

PIXELS = "b c (f p) (h q) (w r)"
PATCHES = "b (f h w) (c p q r)"
"""A latent, and the same values patch by patch."""


class Attention(nn.Module):
    """Queries, keys and values by head, keys and values of half as many heads if ``grouped``."""

    def __init__(self, grouped: bool = False):
        super().__init__()
        self.key_heads = HEADS // 2 if grouped else HEADS
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.to_kv = nn.Linear(WIDTH, 2 * WIDTH * self.key_heads // HEADS)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def project(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, ``[batch, heads, tokens, channels]``."""
        k, v = self.to_kv(x).chunk(2, -1)
        heads = HEADS, self.key_heads, self.key_heads
        return [
            each.unflatten(-1, (number, -1)).transpose(1, 2)
            for each, number in zip((self.to_q(x), k, v), heads, strict=True)
        ]

    def forward(
        self, x: Tensor, context: Tensor | None = None, transformer_options: Any = None
    ) -> Tensor:
        q, *_ = self.project(x)
        _, k, v = self.project(x if context is None else context)
        options = {"skip_reshape": True, "transformer_options": transformer_options}
        return self.to_out(optimized_attention(q, k, v, HEADS, **options))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, grouped: bool = False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn = Attention(grouped)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))

    def forward(self, x: Tensor, transformer_options: Any = None) -> Tensor:
        x = x + self.attn(self.norm(x), transformer_options=transformer_options)
        return x + self.mlp(self.norm(x))


class MadeUp(nn.Module):
    """Patches of a latent, some blocks, and patches again; a class below says what is between."""

    channels = 16
    patch = (1, 2, 2)

    def __init__(self, **_: Any):
        super().__init__()
        self.dtype = torch.float32
        values = self.channels * math.prod(self.patch)
        self.to_tokens = nn.Linear(values, WIDTH)
        self.to_text = nn.Linear(TEXT_CHANNELS, WIDTH)
        self.to_time = nn.Linear(1, WIDTH)
        self.to_values = nn.Linear(WIDTH, values)
        self.make_blocks()

    def make_blocks(self) -> None:
        """Make the blocks."""
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, timestep, context=None, transformer_options=None, **kwargs):
        options = transformer_options or {}
        return WrapperExecutor.new_class_executor(
            self._forward, self, get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options)
        ).execute(x, timestep, context, options, **kwargs)

    def _forward(self, x, timestep, context, options, **kwargs):
        picture, sides = self.tokens_of(x)
        picture = picture + self.to_time(timestep.float().view(-1, 1, 1))
        picture = self.run(picture, self.to_text(context), sides, options, **kwargs)
        return self.latent_of(self.to_values(picture), sides, x.shape)

    def run(self, picture, text, sides, options, **kwargs) -> Tensor:
        """The picture's tokens after all blocks."""
        x = torch.cat([text, picture], 1)
        for block in self.blocks:
            x = block(x, transformer_options=options)
        return x[:, text.shape[1] :]

    def tokens_of(self, x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Tokens with their places, row by row, and how many there are along each side."""
        deep = x if x.ndim == 5 else x[:, :, None]
        sides = tuple(side // each for side, each in zip(deep.shape[2:], self.patch, strict=True))
        values = rearrange(deep, f"{PIXELS} -> {PATCHES}", **self.patch_sides)
        tokens = self.to_tokens(values)
        return tokens + self.places(tokens.shape[1]), sides

    def latent_of(self, values: Tensor, sides, shape) -> Tensor:
        """The latent of a shape, of the values of its patches."""
        counts = dict(zip("fhw", sides, strict=True))
        pixels = rearrange(values, f"{PATCHES} -> {PIXELS}", **counts, **self.patch_sides)
        return pixels.reshape(shape)

    @property
    def patch_sides(self) -> dict[str, int]:
        return dict(zip("pqr", self.patch, strict=True))

    @staticmethod
    def places(number: int) -> Tensor:
        """Something for each place, ``[number, channels]``."""
        angles = torch.outer(torch.arange(number), torch.arange(1, WIDTH + 1).float().rsqrt())
        return 0.5 * angles.cos()


class _Model(comfy.model_base.BaseModel):
    def extra_conds(self, **kwargs):
        found = super().extra_conds(**kwargs)
        found["c_crossattn"] = comfy.conds.CONDRegular(kwargs["cross_attn"])
        if references := kwargs.get("reference_latents"):
            found["ref_latents"] = comfy.conds.CONDList(references)
        return found


def build(kind: type[nn.Module]) -> Any:
    """A model patcher whose diffusion model is of a class, with random weights, in float32."""
    config = comfy.supported_models.Flux({"image_model": "flux"})
    config.unet_config = {}
    config.set_inference_dtype(torch.float32, None)
    config.custom_operations = comfy.ops.disable_weight_init
    base = _Model(config, comfy.model_base.ModelType.FLUX, torch.device("cpu"), unet_model=kind)
    return with_random_weights(base)
