"""What families of ComfyUI's models share."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from comfy.ldm.modules import attention
from torch import Tensor, nn

from ...merging.attention_trial import Attention
from ...merging.model import ModelFamily
from ...reasons import Reason
from ...settings.config import ToMeConfig
from ...strategies.plan import Grid

OVERRIDE = "optimized_attention_override"
"""The transformer option with a function that ComfyUI calls instead of its attention."""


class ComfyFamily(ModelFamily, Protocol):
    """What is known about ComfyUI's models of one kind."""

    def matches(self, model: nn.Module) -> bool:
        """Whether a model is of this kind."""

    def grid(self, model: Any, shape: Sequence[int]) -> Grid:
        """The grid at level 1, given the shape of the latent, or of the part that is evaluated.

        ``shape`` is batch, channels, frames if it is a video, height, width.
        """

    def in_effect(self, config: ToMeConfig) -> ToMeConfig:
        """The settings as they take effect in models of this kind."""

    def changed_part(self, model: Any) -> str | None:
        """The name of the first part of a model that has changed in ComfyUI, None if none has."""

    def obstacle(self, model: nn.Module, conditions: Mapping[str, Any]) -> Reason | None:
        """Why nothing in a model can merge in an evaluation, None if something may.

        ``conditions`` are the arguments of the model, by name, besides the latent.
        """


def takes(module: nn.Module, *names: str) -> bool:
    """Whether a module can be called with arguments of these names.

    A module that is not ComfyUI's own is not checked: another node has put it there.
    """
    kind: Any = type(module)
    if not kind.__module__.startswith("comfy."):
        return True
    parameters = inspect.signature(kind.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or set(names) <= parameters.keys()


def class_name(model: nn.Module) -> str:
    """The full name of a model's class."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def handed(called: Attention) -> tuple[Any, ...] | None:
    """What an attention of ComfyUI hands to an override: a function, q, k, v and heads.

    None if it does not call the override once. To find out, it is called with tiny tensors.
    """
    x, seen = torch.zeros(1, 2, 8), []

    def override(func: Any, q: Any, k: Any, v: Any, heads: Any, /, *_: Any, **__: Any) -> Tensor:
        seen.append((func, q, k, v, heads))
        return x

    try:
        called(x, x, x, 1, transformer_options={OVERRIDE: override})
    except Exception:
        # An error of any kind means that attention has changed.
        return None
    return seen[0] if len(seen) == 1 else None


def host_attentions() -> set[Attention]:
    """The functions that ComfyUI's attention hands to overrides."""
    all_handed = map(handed, (attention.optimized_attention, attention.optimized_attention_masked))
    return {each[0] for each in all_handed if each is not None}


def stored_attention(module: nn.Module) -> Attention | None:
    """The attention function that is stored with the weights of an attention module, if any.

    From version 0.38 on, ComfyUI calls it instead of its own attention if there is no override.
    """
    stored = getattr(module, "comfy_attention", None)
    return getattr(stored, "function", None)
