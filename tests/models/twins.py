"""Twins of models of later hosts, whose code cannot be had here.

Each has the name of the real class and calls its blocks and its attention as that does, as far as
its public code said in November 2026. The arithmetic is made up.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor, nn

from .made_up import HEADS, WIDTH, Attention, Block, MadeUp


def named(path: str) -> Callable[[type], type]:
    """Give a class the module and name that a path below ``comfy.ldm`` has."""

    def name(kind: type) -> type:
        module, _, kind.__name__ = f"comfy.ldm.{path}".rpartition(".")
        kind.__module__, kind.__qualname__ = module, kind.__name__
        return kind

    return name


def attend(*by_head: Tensor, **kwargs) -> Tensor:
    """Attention of ``[batch, heads, tokens, channels]``, given to the host without its heads."""
    q, k, v = (each.transpose(1, 2).flatten(2) for each in by_head)
    return optimized_attention(q, k, v, heads=HEADS, **kwargs)


@named("qwen_image21.model.QwenImage21TransformerBlock")
class _ClosedBlock(Block):
    def forward(self, x, mod, pe, attn_fn, prefix_len, transformer_options=None):
        x = x + self.attn.to_out(attn_fn(*self.attn.project(self.norm(x)), HEADS))
        return x + self.mlp(self.norm(x))


@named("qwen_image21.model.QwenImage21Transformer2DModel")
class QwenImage21(MadeUp):
    """Text, references, picture: a segment attends to itself and what is before it, in a call each.

    With ``caches``, what is before the picture runs in the first evaluation only. The closure that
    blocks get has the transformer options of the model.
    """

    patch = (1, 1, 1)
    caches = False

    def make_blocks(self) -> None:
        self.transformer_blocks = nn.ModuleList(_ClosedBlock() for _ in range(3))
        self.kept: list[tuple[Tensor, Tensor]] = []

    def run(self, picture, text, sides, options, ref_latents=(), **kwargs):
        references = [self.tokens_of(each)[0].expand(len(picture), -1, -1) for each in ref_latents]
        before = torch.cat([text, *references], 1)
        prefix = before.shape[1]
        ends = [*accumulate(each.shape[1] for each in (text, *references, picture))]

        def in_segments(q, k, v, heads):
            out, start = [], 0
            for end in (each for each in ends if each <= q.shape[2]):
                mask = torch.ones(end, end, dtype=torch.bool).tril() if start == 0 else None
                own = q[:, :, start:end], k[:, :, :end], v[:, :, :end]
                out.append(attend(*own, mask=mask, transformer_options=options))
                start = end
            return torch.cat(out, 1)

        if not self.caches:
            x = torch.cat([before, picture], 1)
            for block in self.transformer_blocks:
                x = block(x, None, None, in_segments, prefix, transformer_options=options)
            return x[:, prefix:]

        def storing(q, k, v, heads):
            self.kept.append((k, v))
            return in_segments(q, k, v, heads)

        for index, block in enumerate(self.transformer_blocks):
            if index == len(self.kept):
                before = block(before, None, None, storing, prefix, transformer_options=options)

            def cached(q, k, v, heads, kept=self.kept[index]):
                joined = (torch.cat(pair, 2) for pair in zip(kept, (k, v), strict=True))
                return attend(q, *joined, transformer_options=options)

            picture = block(picture, None, None, cached, 0, transformer_options=options)
        return picture


@named("sensenova.model.DecoderLayer")
class _DecoderLayer(nn.Module):
    """Has no ``forward``."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.self_attn = Attention(grouped=True)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward_generation(self, image, image_rope, prefix_key, prefix_value, transformer_options):
        q, k, v = self.self_attn.project(self.norm(image))
        out = optimized_attention(
            q,
            torch.cat([prefix_key, k], 2),
            torch.cat([prefix_value, v], 2),
            HEADS,
            skip_reshape=True,
            enable_gqa=True,
            transformer_options=transformer_options,
        )
        image = image + self.self_attn.to_out(out)
        return image + self.mlp(self.norm(image))


@named("sensenova.model.SenseNovaU15")
class SenseNova(MadeUp):
    """Pixels, whose keys stand behind those of a prefix that ran before."""

    channels = 3
    patch = (1, 32, 32)

    def make_blocks(self) -> None:
        self.language_model = nn.Module()
        self.language_model.model = nn.Module()
        self.language_model.model.layers = nn.ModuleList(_DecoderLayer() for _ in range(3))

    def run(self, picture, text, sides, options, **kwargs):
        for layer in self.language_model.model.layers:
            _, key, value = layer.self_attn.project(layer.norm(text))
            picture = layer.forward_generation(picture, None, key, value, options)
        return picture


@named("wan.model_animate2.WanAnimate2SelfAttention")
class _FrameAttention(Attention):
    """Is never called by ``forward``."""

    def forward_pose(self, x, freqs, transformer_options=None):
        q, k, v = self.project(x)
        return self.to_out(attend(q, k, v, transformer_options=transformer_options)), k, v

    def forward_gen(self, x, freqs, k_pose, v_pose, f_gen, hw, buffers, transformer_options=None):
        q, k, v = self.project(x)
        frames = []
        for index in range(f_gen):
            keys, values = k, v
            if index:
                pose = slice((index - 1) * hw, index * hw)
                keys = torch.cat([k, k_pose[:, :, pose]], 2)
                values = torch.cat([v, v_pose[:, :, pose]], 2)
            frame = q[:, :, index * hw : (index + 1) * hw]
            frames.append(attend(frame, keys, values, transformer_options=transformer_options))
        return self.to_out(torch.cat(frames, 1))


@named("wan.model_animate2.WanAnimate2Block")
class _FrameBlock(nn.Module):
    """Is never called by ``forward``."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.self_attn, self.cross_attn = _FrameAttention(), Attention()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward_pose(self, x, e, freqs, context, transformer_options=None):
        out, k, v = self.self_attn.forward_pose(
            self.norm(x), freqs, transformer_options=transformer_options
        )
        return x + out, k, v

    def forward_gen(
        self, x, e, freqs, context, k_pose, v_pose, f_gen, hw, buffers, transformer_options=None
    ):
        x = x + self.self_attn.forward_gen(
            *(self.norm(x), freqs, k_pose, v_pose, f_gen, hw, buffers),
            transformer_options=transformer_options,
        )
        x = x + self.cross_attn(self.norm(x), context, transformer_options=transformer_options)
        return x + self.mlp(self.norm(x))


@named("wan.model_animate2.WanAnimate2Model")
class WanAnimate2(MadeUp):
    """A reference and the frames of a video; each attends to all of them and to its own pose."""

    patch_size = patch = (1, 2, 2)

    def make_blocks(self) -> None:
        self.blocks = nn.ModuleList(_FrameBlock() for _ in range(2))

    def run(self, picture, text, sides, options, **kwargs):
        frames, rows = sides[0], sides[1] * sides[2]
        pose = picture[:, rows:].flip(1)
        for block in self.blocks:
            pose, k, v = block.forward_pose(pose, None, None, text, transformer_options=options)
            picture = block.forward_gen(
                picture, None, None, text, k, v, frames, rows, None, transformer_options=options
            )
        return picture


class StoredAttention(nn.Module):
    """An attention that is stored with weights, as of ComfyUI 0.38, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.keys: list[int] = []

    def function(self, q, k, v, heads, mask=None, **kwargs):
        self.keys.append(k.shape[-2])
        return optimized_attention(q, k, v, heads, mask=mask, **kwargs)

    # How the pack knows it.
    function.__name__ = "attention_comfy_kitchen_int8"
