"""Other nodes of ComfyUI's core that people put on the same model."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher
from torch import nn

from benchmarks.neighbours import core_node, execute

_LORA_RANK = 4
_LORA_LAYERS = 3


@dataclass(frozen=True)
class Neighbour:
    """A node that makes a model of a model.

    Attributes:
        module: the one in ``comfy_extras`` that has it.
        inputs: those beside the model.
    """

    module: str
    inputs: Mapping[str, Any] = field(default_factory=dict)


_ALL_STEPS = {"start_percent": 0.0, "end_percent": 1.0}

ANY_MODEL: Mapping[str, Neighbour] = {
    "EasyCache": Neighbour(
        "nodes_easycache", {"reuse_threshold": 0.2, **_ALL_STEPS, "verbose": False}
    ),
    "LazyCache": Neighbour(
        "nodes_easycache", {"reuse_threshold": 0.2, **_ALL_STEPS, "verbose": False}
    ),
    "APG": Neighbour("nodes_apg", {"eta": 1.0, "norm_threshold": 5.0, "momentum": 0.5}),
    "TCFG": Neighbour("nodes_tcfg"),
    "Mahiro": Neighbour("nodes_mahiro"),
    "CFGZeroStar": Neighbour("nodes_cfg"),
    "CFGNorm": Neighbour("nodes_cfg", {"strength": 1.0}),
    "Epsilon Scaling": Neighbour("nodes_eps", {"scaling_factor": 1.005}),
    "RescaleCFG": Neighbour("nodes_model_advanced", {"multiplier": 0.7}),
    "DifferentialDiffusion": Neighbour("nodes_differential_diffusion", {"strength": 1.0}),
}
"""The nodes that every model takes."""

UNETS: Mapping[str, Neighbour] = {
    "HyperTile": Neighbour(
        "nodes_hypertile",
        {"tile_size": 64, "swap_size": 2, "max_depth": 0, "scale_depth": False},
    ),
    "PatchModelAddDownscale": Neighbour(
        "nodes_model_downscale",
        {
            "block_number": 2,
            "downscale_factor": 2.0,
            "start_percent": 0.0,
            "end_percent": 0.6,
            "downscale_after_skip": True,
            "downscale_method": "bicubic",
            "upscale_method": "bicubic",
        },
    ),
    "PerturbedAttentionGuidance": Neighbour("nodes_pag", {"scale": 3.0}),
    "SelfAttentionGuidance": Neighbour("nodes_sag", {"scale": 0.5, "blur_sigma": 2.0}),
    "TomePatchModel": Neighbour("nodes_tomesd", {"ratio": 0.3}),
    "FreeU_V2": Neighbour("nodes_freelunch", {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2}),
    "FreSca": Neighbour("nodes_fresca", {"scale_low": 1.0, "scale_high": 1.25, "freq_cutoff": 20}),
    "UNetSelfAttentionMultiply": Neighbour(
        "nodes_attention_multiply", {"q": 1.1, "k": 0.9, "v": 1.0, "out": 1.0}
    ),
    "UNetCrossAttentionMultiply": Neighbour(
        "nodes_attention_multiply", {"q": 1.1, "k": 0.9, "v": 1.0, "out": 1.0}
    ),
}
"""The nodes for UNets."""

SKIP_LAYERS: Mapping[str, Neighbour] = {
    "SkipLayerGuidanceDiT": Neighbour(
        "nodes_slg",
        {
            "scale": 3.0,
            **_ALL_STEPS,
            "double_layers": "0",
            "single_layers": "1",
            "rescaling_scale": 0.0,
        },
    ),
}
"""The node for transformers whose blocks can be replaced."""

VIDEOS: Mapping[str, Neighbour] = {
    "ContextWindowsManual": Neighbour(
        "nodes_context_windows",
        {
            "context_length": 3,
            "context_overlap": 1,
            "context_schedule": "standard_static",
            "context_stride": 1,
            "closed_loop": False,
            "fuse_method": "pyramid",
            "dim": 2,
            "freenoise": False,
        },
    ),
}
"""The node for videos."""

NEIGHBOURS: Mapping[str, Neighbour] = {**ANY_MODEL, **UNETS, **SKIP_LAYERS, **VIDEOS}


def with_neighbour(model: ModelPatcher, name: str) -> ModelPatcher:
    """The model that a node makes of a model."""
    return execute(_node(name), model, **NEIGHBOURS[name].inputs)


@cache
def _node(name: str) -> Any:
    return core_node(NEIGHBOURS[name].module, name)


def load_nodes() -> None:
    """Import what would otherwise be imported in the middle of the runs: the nodes, the server."""
    importlib.import_module("server")
    for name in NEIGHBOURS:
        _node(name)


def with_lora(model: ModelPatcher) -> ModelPatcher:
    """A model with a small LoRA on some of its linear layers."""
    layers = [
        (name, module)
        for name, module in model.model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("diffusion_model.")
    ]
    random = torch.Generator().manual_seed(0)
    lora = {}
    for name, layer in layers[:: max(1, len(layers) // _LORA_LAYERS)]:
        out, into = layer.weight.shape
        lora[f"{name}.lora_down.weight"] = torch.randn(_LORA_RANK, into, generator=random)
        lora[f"{name}.lora_up.weight"] = torch.randn(out, _LORA_RANK, generator=random) / into
    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)[0]
