"""Copy a model so that evaluating the copy does not disturb the model."""

from typing import Any

import torch
from torch import Tensor, nn

from ..patching.blocks import uncompiled

_HOOKS = {
    name: value
    for name, value in vars(nn.Module()).items()
    if "hooks" in name and isinstance(value, dict)
}
"""The attributes of every module that hold hooks, with their empty values."""

_REPLACED = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook", "_compiled_call_impl")
"""Attributes by which accelerate, diffusers and PyTorch make a module run other code."""


def bare_copy(model: nn.Module, device: torch.device) -> Any:
    """A copy with the same weights, but without hooks, caches and compiled code.

    Weights on another device, such as offloaded ones, are replaced by made-up values. Those of
    linear layers are left as they are.
    """
    model = uncompiled(model)
    copy = type(model).__new__(type(model))
    own = {name: value for name, value in vars(model).items() if name not in _REPLACED}
    own |= {name: type(value)() for name, value in _HOOKS.items()}
    own["_modules"] = {
        name: None if each is None else bare_copy(each, device)
        for name, each in model._modules.items()
    }
    if not isinstance(model, nn.Linear):
        for kind in ("_parameters", "_buffers"):
            own[kind] = {name: _here(each, device) for name, each in own[kind].items()}
    vars(copy).update(own)
    return copy


def _here(weight: Tensor | None, device: torch.device) -> Any:
    """A weight, or made-up values of its shape and dtype if it is on another device."""
    if weight is None or weight.device == device:
        return weight
    values = torch.linspace(0.5, 1.5, weight.numel(), device=device).view(weight.shape)
    here = values.to(weight.dtype)
    return nn.Parameter(here, requires_grad=False) if isinstance(weight, nn.Parameter) else here
