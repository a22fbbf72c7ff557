"""Transformers that no host has, as a model of tomorrow might be, in the host's own sampler.

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
import torch.nn.functional as F
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
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        transformer_options: Any = None,
    ) -> Tensor:
        q, *_ = self.project(x)
        _, k, v = self.project(x if context is None else context)
        options = {"mask": mask, "skip_reshape": True, "transformer_options": transformer_options}
        if self.key_heads != HEADS:
            options["enable_gqa"] = True
        return self.to_out(optimized_attention(q, k, v, HEADS, **options))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, grouped: bool = False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn = Attention(grouped)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        transformer_options: Any = None,
    ) -> Tensor:
        x = x + self.attn(self.norm(x), context, mask, transformer_options)
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
        return self.through(torch.cat([text, picture], 1), options)[:, text.shape[1] :]

    def through(self, x: Tensor, options, mask: Tensor | None = None) -> Tensor:
        """Tokens after all blocks."""
        for block in self.blocks:
            x = block(x, mask, transformer_options=options)
        return x

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


class RegistersAndTextBehind(MadeUp):
    """Registers, the picture, then masked text; a refiner sees the picture alone before."""

    def make_blocks(self) -> None:
        super().make_blocks()
        self.registers = nn.Parameter(torch.zeros(4, WIDTH))
        self.refiners = nn.ModuleList([Block()])

    def run(self, picture, text, sides, options, **kwargs):
        for block in self.refiners:
            picture = block(picture, transformer_options=options)
        x = torch.cat([self.registers.expand(len(text), -1, -1), picture, text], 1)
        mask = x.new_zeros(len(x), 1, 1, x.shape[1])
        mask[..., -text.shape[1] // 4 :] = -20.0
        return self.through(x, options, mask)[:, 4 : 4 + picture.shape[1]]


class VideoAmongReferences(MadeUp):
    """References, a video, and text padded to a multiple of 16, in blocks given their attention."""

    def make_blocks(self) -> None:
        self.trunk = nn.Module()
        self.trunk.layers = nn.ModuleList(Closed() for _ in range(3))

    def run(self, picture, text, sides, options, ref_latents=(), **kwargs):
        before = [self.tokens_of(each)[0].expand(len(picture), -1, -1) for each in ref_latents]
        padded = F.pad(text, (0, 0, 0, -text.shape[1] % 16))
        x = torch.cat([*before, picture, padded], 1)
        start = sum(each.shape[1] for each in before)

        def attend(q, k, v):
            return optimized_attention(
                q, k, v, HEADS, skip_reshape=True, transformer_options=options
            )

        for layer in self.trunk.layers:
            x = layer(x, attend, transformer_options=dict(options))
        return x[:, start : start + picture.shape[1]]


class Closed(Block):
    """A block that is given its attention."""

    def forward(self, x, attend, transformer_options=None):
        x = x + self.attn.to_out(attend(*self.attn.project(self.norm(x))))
        return x + self.mlp(self.norm(x))


class OrderChanges(MadeUp):
    """Text comes first in one list of blocks and last in the other; keys have fewer heads."""

    patch = (1, 4, 4)

    def make_blocks(self) -> None:
        self.pairs = nn.ModuleList(Cross() for _ in range(2))
        self.singles = nn.ModuleList(Block(grouped=True) for _ in range(2))

    def run(self, picture, text, sides, options, **kwargs):
        x = torch.cat([text, picture], 1)
        for block in self.pairs:
            x = block(x, text, transformer_options=options)
        x = x.roll(-text.shape[1], 1)
        for block in self.singles:
            x = block(x, transformer_options=options)
        return x[:, : picture.shape[1]]


class Cross(Block):
    """A block with attention to text as well."""

    def __init__(self):
        super().__init__(grouped=True)
        self.cross = Attention()

    def forward(self, x, text, transformer_options=None):
        x = super().forward(x, transformer_options=transformer_options)
        return x + self.cross(self.norm(x), text, transformer_options=transformer_options)


class Windows(MadeUp):
    """Attention in windows of rows, which are samples of their own."""

    def run(self, picture, text, sides, options, **kwargs):
        for block in self.blocks:
            rows = picture.unflatten(1, (sides[0] * sides[1], -1)).flatten(0, 1)
            picture = block(rows, transformer_options=options).reshape(picture.shape)
        return picture


class Interleaved(MadeUp):
    """A token of text stands behind each of the picture."""

    def run(self, picture, text, sides, options, **kwargs):
        number = picture.shape[1]
        text = text.repeat(1, -(-number // text.shape[1]), 1)[:, :number]
        x = torch.stack([picture, text], 2).flatten(1, 2)
        return self.through(x, options)[:, ::2]


class Pooled(MadeUp):
    """Keys are means over pairs of rows."""

    def run(self, picture, text, sides, options, **kwargs):
        for block in self.blocks:
            rows = picture.unflatten(1, (sides[0] * sides[1] // 2, 2, sides[2]))
            pooled = rows.mean(2).flatten(1, 2)
            picture = block(picture, context=pooled, transformer_options=options)
        return picture


class Causal(MadeUp):
    """Tokens attend to those before them."""

    def run(self, picture, text, sides, options, **kwargs):
        x = torch.cat([text, picture], 1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.through(x, options, mask)[:, text.shape[1] :]


class Turning(MadeUp):
    """Between blocks, rows and columns change places; blocks cannot tell."""

    def run(self, picture, text, sides, options, **kwargs):
        for index, block in enumerate(self.blocks):
            if index == 1:
                picture = picture.unflatten(1, sides).transpose(2, 3).flatten(1, 3)
            picture = block(picture, transformer_options=options)
        turned = sides[0], sides[2], sides[1]
        return picture.unflatten(1, turned).transpose(2, 3).flatten(1, 3)


class Caching(MadeUp):
    """What is before the picture runs in the first evaluation only, and its tokens are kept."""

    def make_blocks(self) -> None:
        super().make_blocks()
        self.kept: list[Tensor] = []

    def run(self, picture, text, sides, options, **kwargs):
        first = not self.kept
        for index, block in enumerate(self.blocks):
            if first:
                self.kept.append(text)
                text = block(text, transformer_options=options)
            x = torch.cat([self.kept[index], picture], 1)
            picture = block(x, transformer_options=options)[:, -picture.shape[1] :]
        return picture


MERGING = (RegistersAndTextBehind, VideoAmongReferences, OrderChanges)
"""Those that merge."""

REFUSED = (Windows, Interleaved, Pooled, Causal)
"""Those in which nothing may merge."""


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
