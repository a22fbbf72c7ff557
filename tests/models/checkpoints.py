"""Checkpoint files with random weights that the stock ComfyUI loaders accept.

A file takes a few megabytes and about a second to write, whatever the model's size: all its
weights are strided views of a few shared storages, which the `.ckpt` format keeps shared. The
loader copies them into a model of the full size. The names and shapes are those of the published
checkpoints, so the loader detects each family by itself.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

Layout = dict[str, tuple[int, ...]]
"""The names and shapes of a state dict."""

STORAGE_ELEMENTS = 2**19
"""Elements of each shared storage: one megabyte in half precision."""

CHANNELS = 320
"""Those of a UNet's first level."""

VOCABULARY = 49408
TEXT_LENGTH = 77


@dataclass(frozen=True)
class UNet:
    """The shape of a UNet, with one entry for each level in every tuple."""

    context: int
    multipliers: tuple[int, ...]
    depths: tuple[int, ...]
    middle_depth: int = 1
    linear_projections: bool = True
    vector_condition: int | None = None


@dataclass(frozen=True)
class Family:
    """A UNet, and the other parts of a full checkpoint of its family."""

    unet: UNet
    conditioner: Layout


def write_checkpoint(
    path: str | os.PathLike[str],
    family: str,
    *,
    levels: int | None = None,
    full_width: bool = False,
    unet_only: bool = False,
) -> Path:
    """Write a checkpoint of `family` with random weights to `path`, a `.ckpt` file.

    `family` is one of these:

    ============== ============================== ================
    family         detected as                    UNet parameters
    ============== ============================== ================
    sd15           SD15                            66 M, 2 levels
    sdxl           Segmind_Vega, a kind of SDXL   115 M
    sdxl_base      SDXL                           441 M
    ============== ============================== ================

    `levels` is how many of the first levels of the real UNet there are, all by default. With
    fewer, only sd15 is recognised.

    `full_width` gives each level its published channels; by default all have the first level's,
    which is enough to be recognised and several times smaller. sd15 with 4 levels at full width
    is the real architecture (860 M parameters), and so is sdxl_base (2.6 G parameters).

    `unet_only` leaves out the text encoder and the VAE: for UNETLoader, or to save the
    time and memory of a large encoder (CLIP-G has 695 M parameters). The VAE is a TAESD.

    Weights are scaled by fan-in, so activations stay finite and of order one; norms are the
    identity and biases zero. The same arguments always give the same file content.
    """
    layout = _prefixed("model.diffusion_model.", _unet_layout(_unet(family, levels, full_width)))
    if not unet_only:
        layout |= _prefixed("first_stage_model.", _vae_layout()) | _FAMILIES[family].conditioner
    return _write(path, layout)


def write_controlnet(path: str | os.PathLike[str], *, levels: int) -> Path:
    """Write a ControlNet with random weights for `sd15` of as many levels; for ControlNetLoader."""
    unet = _unet_layout(_unet("sd15", levels, full_width=False))
    encoder = ("time_embed.", "input_blocks.", "middle_block.")
    layout = {name: shape for name, shape in unet.items() if name.startswith(encoder)}
    channels = CHANNELS
    hints = (3, 16, 16, 32, 32, 96, 96, 256, channels)
    for index, (inp, out) in enumerate(pairwise(hints)):
        layout |= _layer(f"input_hint_block.{2 * index}", out, inp, 3, 3)
    blocks = {name.split(".")[1] for name in layout if name.startswith("input_blocks.")}
    for block in sorted(blocks, key=int):
        layout |= _layer(f"zero_convs.{block}.0", channels, channels, 1, 1)
    return _write(path, layout | _layer("middle_block_out.0", channels, channels, 1, 1))


def _write(path: str | os.PathLike[str], layout: Layout) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    try:
        torch.save({"state_dict": _random_weights(layout)}, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _unet(family: str, levels: int | None, full_width: bool) -> UNet:
    unet = _FAMILIES[family].unet
    multipliers = unet.multipliers[:levels]
    if not full_width:
        multipliers = (1,) * len(multipliers)
    return replace(unet, multipliers=multipliers, depths=unet.depths[:levels])


def _random_weights(layout: Layout) -> dict[str, torch.Tensor]:
    """Fill `layout`; no two weights of one shape and fan-in are the same view."""
    generator = torch.Generator().manual_seed(0)
    storages: dict[int, torch.Tensor] = {}
    weights = {}
    for index, (name, shape) in enumerate(layout.items()):
        if len(shape) < 2:
            weights[name] = torch.full(shape, _constant(name), dtype=torch.float16)
            continue
        fan_in = math.prod(shape[1:])
        # A view cannot be scaled, so there is one storage for each power of two.
        exponent = round(-0.5 * math.log2(fan_in))
        if exponent not in storages:
            noise = torch.randn(STORAGE_ELEMENTS, generator=generator)
            storages[exponent] = (noise * 2.0**exponent).half()
        weights[name] = _view(storages[exponent], shape, index)
    return weights


def _constant(name: str) -> float:
    """Norms are the identity and biases zero, except where an image would be out of range.

    A random UNet leaves the noise as it is, and for the VAE such latents are far too large.
    """
    if name.startswith("first_stage_model."):
        special = {"vae_scale": 1 / 64, "taesd_decoder.19.bias": 0.5}
        return special.get(name.removeprefix("first_stage_model."), 0.0)
    return float(name.endswith(".weight"))


def _view(storage: torch.Tensor, shape: tuple[int, ...], index: int) -> torch.Tensor:
    """The `index`-th view of `storage` with `shape`: overlapping rows, each a shift of the last."""
    row = math.prod(shape[1:])
    row_stride = (len(storage) - row) // (2 * shape[0]) | 1
    span = (shape[0] - 1) * row_stride + row
    offset = index * 7919 % (len(storage) - span + 1)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
    return storage.as_strided(shape, (row_stride, *strides), offset)


def _prefixed(prefix: str, layout: Layout) -> Layout:
    return {prefix + name: shape for name, shape in layout.items()}


def _layer(name: str, out: int, inp: int, *kernel: int, bias: bool = True) -> Layout:
    """A convolution, or a linear layer if there is no kernel."""
    return {f"{name}.weight": (out, inp, *kernel)} | ({f"{name}.bias": (out,)} if bias else {})


def _norm(name: str, channels: int) -> Layout:
    return {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}


def _unet_layout(unet: UNet) -> Layout:
    channels, embedding = CHANNELS, 4 * CHANNELS
    layout = _layer("time_embed.0", embedding, channels)
    layout |= _layer("time_embed.2", embedding, embedding)
    if unet.vector_condition is not None:
        layout |= _layer("label_emb.0.0", embedding, unet.vector_condition)
        layout |= _layer("label_emb.0.2", embedding, embedding)
    layout |= _layer("input_blocks.0.0", channels, 4, 3, 3)
    layout |= _unet_blocks(unet)
    layout |= _norm("out.0", channels)
    return layout | _layer("out.2", 4, channels, 3, 3)


def _unet_blocks(unet: UNet) -> Layout:
    """Two residual blocks a level on the way down, a middle, three a level on the way up."""
    layout: Layout = {}
    current = CHANNELS
    skipped = [current]
    last = len(unet.multipliers) - 1
    block = 1
    for level, (multiplier, depth) in enumerate(zip(unet.multipliers, unet.depths, strict=True)):
        for _ in range(2):
            out = multiplier * CHANNELS
            name = f"input_blocks.{block}"
            layout |= _residual(f"{name}.0", unet, current, out)
            layout |= _transformer(f"{name}.1", unet, out, depth)
            current = out
            skipped.append(current)
            block += 1
        if level != last:
            layout |= _layer(f"input_blocks.{block}.0.op", current, current, 3, 3)
            skipped.append(current)
            block += 1
    layout |= _residual("middle_block.0", unet, current, current)
    layout |= _transformer("middle_block.1", unet, current, unet.middle_depth)
    layout |= _residual("middle_block.2", unet, current, current)
    block = 0
    for level in range(last, -1, -1):
        for position in range(3):
            out = unet.multipliers[level] * CHANNELS
            name = f"output_blocks.{block}"
            layout |= _residual(f"{name}.0", unet, current + skipped.pop(), out)
            layout |= _transformer(f"{name}.1", unet, out, unet.depths[level])
            current = out
            if level > 0 and position == 2:
                upsample = 2 if unet.depths[level] else 1
                layout |= _layer(f"{name}.{upsample}.conv", current, current, 3, 3)
            block += 1
    return layout


def _residual(name: str, unet: UNet, inp: int, out: int) -> Layout:
    return (
        _norm(f"{name}.in_layers.0", inp)
        | _layer(f"{name}.in_layers.2", out, inp, 3, 3)
        | _layer(f"{name}.emb_layers.1", out, 4 * CHANNELS)
        | _norm(f"{name}.out_layers.0", out)
        | _layer(f"{name}.out_layers.3", out, out, 3, 3)
        | (_layer(f"{name}.skip_connection", out, inp, 1, 1) if inp != out else {})
    )


def _transformer(name: str, unet: UNet, channels: int, depth: int) -> Layout:
    if depth == 0:
        return {}
    layout = _norm(f"{name}.norm", channels)
    for projection in (f"{name}.proj_in", f"{name}.proj_out"):
        kernel = () if unet.linear_projections else (1, 1)
        layout |= _layer(projection, channels, channels, *kernel)
    for index in range(depth):
        block = f"{name}.transformer_blocks.{index}"
        layout |= _transformer_block(block, channels, unet.context)
    return layout


def _transformer_block(name: str, channels: int, context: int) -> Layout:
    layout: Layout = {}
    for attention, keys in (("attn1", channels), ("attn2", context)):
        layout |= _layer(f"{name}.{attention}.to_q", channels, channels, bias=False)
        layout |= _layer(f"{name}.{attention}.to_k", channels, keys, bias=False)
        layout |= _layer(f"{name}.{attention}.to_v", channels, keys, bias=False)
        layout |= _layer(f"{name}.{attention}.to_out.0", channels, channels)
    layout |= _layer(f"{name}.ff.net.0.proj", 8 * channels, channels)
    layout |= _layer(f"{name}.ff.net.2", channels, 4 * channels)
    for norm in ("norm1", "norm2", "norm3"):
        layout |= _norm(f"{name}.{norm}", channels)
    return layout


def _vae_layout() -> Layout:
    """TAESD: half a megabyte of convolutions instead of the full VAE's 84 M parameters."""
    layout: Layout = {"vae_scale": (), "vae_shift": ()}
    layout |= _taesd_side("taesd_encoder", "i.s...s...s...o", (3, 4))
    return layout | _taesd_side("taesd_decoder", "-i-...-s...-s...-s.o", (4, 3))


def _taesd_side(name: str, modules: str, ends: tuple[int, int]) -> Layout:
    """One half of the network, one character per module.

    `i` and `o` are the first and last convolution, `s` one that changes the size, `.` a residual
    block and `-` a module without weights.
    """
    layout: Layout = {}
    for index, module in enumerate(modules):
        here = f"{name}.{index}"
        if module == "i":
            layout |= _layer(here, 64, ends[0], 3, 3)
        elif module == "o":
            layout |= _layer(here, ends[1], 64, 3, 3)
        elif module == "s":
            layout |= _layer(here, 64, 64, 3, 3, bias=False)
        elif module == ".":
            for position in (0, 2, 4):
                layout |= _layer(f"{here}.conv.{position}", 64, 64, 3, 3)
    return layout


def _encoder_layer(name: str, width: int) -> Layout:
    layout = _norm(f"{name}.layer_norm1", width) | _norm(f"{name}.layer_norm2", width)
    for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
        layout |= _layer(f"{name}.self_attn.{projection}", width, width)
    layout |= _layer(f"{name}.mlp.fc1", 4 * width, width)
    return layout | _layer(f"{name}.mlp.fc2", width, 4 * width)


def _text_encoder(prefix: str, width: int, layers: int, projection: str | None = None) -> Layout:
    """A CLIP text model, with names that the loader accepts in place of open_clip's."""
    name = f"{prefix}transformer.text_model"
    layout = _layer(f"{name}.embeddings.token_embedding", VOCABULARY, width, bias=False)
    layout |= _layer(f"{name}.embeddings.position_embedding", TEXT_LENGTH, width, bias=False)
    for index in range(layers):
        layout |= _encoder_layer(f"{name}.encoder.layers.{index}", width)
    layout |= _norm(f"{name}.final_layer_norm", width)
    return layout | ({prefix + projection: (width, width)} if projection else {})


_clip_l = partial(_text_encoder, width=768, layers=12)
_clip_g = partial(_text_encoder, width=1280, layers=32, projection="text_projection")

_SD15 = Family(
    UNet(context=768, multipliers=(1, 2, 4, 4), depths=(1, 1, 1, 0), linear_projections=False),
    _clip_l("cond_stage_model."),
)

_SDXL = Family(
    UNet(
        context=2048,
        multipliers=(1, 2, 4),
        depths=(0, 1, 2),
        middle_depth=2,
        vector_condition=2816,
    ),
    _clip_l("conditioner.embedders.0.") | _clip_g("conditioner.embedders.1.model."),
)

_FAMILIES = {
    "sd15": _SD15,
    "sdxl": _SDXL,
    "sdxl_base": replace(_SDXL, unet=replace(_SDXL.unet, depths=(0, 2, 10), middle_depth=10)),
}
