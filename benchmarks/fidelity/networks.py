"""Untrained transformers of ComfyUI's own classes, and what their training needs."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import comfy.ldm.flux.model
import comfy.ldm.wan.model
import comfy.model_management
import comfy.ops
import torch
from torch import Tensor, nn


def new_flux(settings: Mapping[str, Any]) -> nn.Module:
    """An untrained Flux."""
    transformer = comfy.ldm.flux.model.Flux(
        **settings, dtype=torch.float32, operations=comfy.ops.disable_weight_init
    )
    _initialise(transformer)
    outputs = ("mod.lin", "modulation.lin", "final_layer.linear", "adaLN_modulation.1")
    for name, module in transformer.named_modules():
        # Blocks start as the identity, so that the deep network trains from the start.
        if isinstance(module, nn.Linear) and name.endswith(outputs):
            nn.init.zeros_(module.weight)
        if isinstance(module, nn.LayerNorm):
            # Blocks change their tokens in place, which the gradient of a norm does not survive.
            module.register_forward_pre_hook(lambda _, tokens: (tokens[0].clone(),))
    return transformer.requires_grad_(True)


def new_wan(settings: Mapping[str, Any]) -> nn.Module:
    """An untrained Wan."""
    transformer = comfy.ldm.wan.model.WanModel(
        **settings, dtype=torch.float32, operations=comfy.ops.disable_weight_init
    )
    _initialise(transformer)
    for name, parameter in transformer.named_parameters():
        # Blocks start as the identity, as in Flux.
        starts_at_zero = name.startswith(("time_projection", "head.head"))
        if starts_at_zero or name.endswith(("modulation", "cross_attn.o.weight")):
            nn.init.zeros_(parameter)
    return transformer.requires_grad_(True)


def _initialise(transformer: nn.Module) -> None:
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


def differentiable() -> AbstractContextManager[object]:
    """Has the host rotate by position in a way that has a gradient."""
    return patch.object(comfy.model_management, "in_training", True)
