"""Checkpoint files with random weights that the stock ComfyUI loaders accept.

A file takes a few megabytes, whatever the model's size: all its weights are strided views of a few
shared storages, which the `.ckpt` format keeps shared. The names and shapes are those of ComfyUI's
own modules, so the loader detects each family by itself.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.host import use_cpu

if "comfy.cli_args" not in sys.modules:
    # Nobody has told ComfyUI how to run, and its modules need a device before they can be made.
    use_cpu()

import comfy.clip_model
import comfy.ops
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.taesd.taesd import TAESD

Layout = dict[str, tuple[int, ...]]

STORAGE_ELEMENTS = 2**19
"""Elements of each shared storage: one megabyte in half precision."""

CHANNELS = 320


@dataclass(frozen=True)
class Family:
    """A UNet, with one entry for each level in its tuples, and the text encoders beside it.

    These are the prefixes of CLIP models, each with the name of its configuration.
    """

    multipliers: tuple[int, ...]
    depths: tuple[int, ...]
    settings: dict[str, Any]
    text: dict[str, str]


def write_checkpoint(
    path: str | os.PathLike[str],
    family: str,
    *,
    levels: int | None = None,
    residuals: int = 2,
    full_width: bool = False,
    unet_only: bool = False,
) -> Path:
    """Write a checkpoint with random weights to `path`, a `.ckpt` file.

    Weights are scaled by fan-in, so activations stay finite and of order one; norms are the
    identity and biases zero. The same arguments always give the same file content.

    Args:
        family: `sd15`, `sdxl` (Segmind_Vega) or `sdxl_base`.
        levels: how many of the first levels of the UNet there are; fewer only of sd15.
        residuals: how many residual blocks each level has on the way down; fewer only of sd15.
        full_width: whether each level has its published channels, or those of the first, which
            is enough to be recognised. At full width sd15 and sdxl_base are the real UNets.
        unet_only: whether the text encoder and the VAE, a TAESD, are left out.
    """
    chosen = _FAMILIES[family]
    unet = unet_of(family, levels, full_width, residuals)
    layout = _layout("model.diffusion_model.", lambda: UNetModel(**unet))
    if not unet_only:
        # Half a megabyte of convolutions instead of the full VAE's 84 M parameters.
        layout |= _layout("first_stage_model.", TAESD)
        for prefix, name in chosen.text.items():
            layout |= _text_encoder(prefix, name)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    try:
        torch.save({"state_dict": _random_weights(layout)}, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


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


def unet_settings(depths: tuple[int, ...], residuals: int, **settings: Any) -> dict[str, Any]:
    """The arguments of a UNet.

    On the way down, each level has so many residual blocks, on the way up one more; behind each is
    a stack of transformer blocks, of the depth of its level.
    """
    return {
        **{"image_size": 32, "in_channels": 4, "out_channels": 4},
        "num_res_blocks": [residuals] * len(depths),
        "transformer_depth": [depth for depth in depths for _ in range(residuals)],
        "transformer_depth_output": [depth for depth in depths for _ in range(residuals + 1)],
        "use_spatial_transformer": True,
        **settings,
    }


def unet_of(
    name: str, levels: int | None = None, full_width: bool = True, residuals: int = 2
) -> dict[str, Any]:
    """The arguments of the UNet of a family, by its name."""
    family = _FAMILIES[name]
    multipliers = family.multipliers[:levels]
    return unet_settings(
        family.depths[:levels],
        residuals,
        model_channels=CHANNELS,
        channel_mult=multipliers if full_width else (1,) * len(multipliers),
        **family.settings,
    )


def _layout(prefix: str, make: Callable[[], nn.Module]) -> Layout:
    with torch.device("meta"):
        weights = make().state_dict()
    return {prefix + name: tuple(weight.shape) for name, weight in weights.items()}


def _text_encoder(prefix: str, configuration: str) -> Layout:
    """A CLIP text model, with names that the loader accepts in place of open_clip's."""
    file = Path(comfy.clip_model.__file__).with_name(configuration)
    config = json.loads(file.read_text(encoding="utf-8"))
    model = comfy.clip_model.CLIPTextModel
    operations = comfy.ops.disable_weight_init
    return _layout(f"{prefix}transformer.", lambda: model(config, torch.float16, None, operations))


_CLIP_L = "sd1_clip_config.json"
_SDXL = Family(
    multipliers=(1, 2, 4),
    depths=(0, 1, 2),
    settings={
        **{"transformer_depth_middle": 2, "use_linear_in_transformer": True},
        **{"num_head_channels": 64, "context_dim": 2048},
        **{"num_classes": "sequential", "adm_in_channels": 2816},
    },
    text={
        "conditioner.embedders.0.": _CLIP_L,
        "conditioner.embedders.1.model.": "clip_config_bigg.json",
    },
)
_FAMILIES = {
    "sd15": Family(
        multipliers=(1, 2, 4, 4),
        depths=(1, 1, 1, 0),
        settings={"transformer_depth_middle": 1, "num_heads": 8, "context_dim": 768},
        text={"cond_stage_model.": _CLIP_L},
    ),
    "sdxl": _SDXL,
    "sdxl_base": replace(
        _SDXL, depths=(0, 2, 10), settings={**_SDXL.settings, "transformer_depth_middle": 10}
    ),
}
