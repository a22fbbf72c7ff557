"""What records of ComfyUI's models share: their interface, and the inputs of a model."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ...merging.layout import Picture
from ...patching.blocks import Evaluation, ModelRecord, Reasons

REASONS = Reasons(
    tokens_changed="another node changes the tokens of the transformer blocks",
    attention_masked="another node masks the attention or changes its tokens",
    attention_replaced="other nodes replace the attention of the transformer blocks",
)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of a model evaluation.

    Attributes:
        shape: the shape of the latent, or of the part of it that is evaluated: batch, channels,
            frames if it is a video, height, width.
        conditions: the other arguments of the model, by name.
    """

    shape: tuple[int, ...]
    conditions: Mapping[str, Any]

    def tensors(self, name: str) -> list[Any]:
        """A condition that is a tensor or a list of tensors, as a list; empty if it is missing."""
        found = self.conditions.get(name)
        if found is None:
            return []
        return list(found) if isinstance(found, list | tuple) else [found]


class ComfyRecord(ModelRecord, Protocol):
    """What is known about ComfyUI's models of one kind."""

    def matches(self, model: nn.Module) -> bool:
        """Whether a model is of this kind."""

    def pictures(self, model: Any, inputs: Inputs) -> tuple[Picture, ...]:
        """The pictures in the sequence of a transformer, in order; none for a UNet."""

    def changed_part(self, model: Any) -> str | None:
        """The name of the first part of a model that has changed in ComfyUI, None if none has."""

    def obstacle(self, model: nn.Module) -> str | None:
        """Why nothing in a model can merge in its current state, None if something may."""

    def options(self, options: dict[str, Any], evaluation: Evaluation) -> dict[str, Any]:
        """The transformer options for an evaluation that merges, made from those given."""


def takes(module: nn.Module, *names: str) -> bool:
    """Whether a module can be called with arguments of these names.

    A module that is not ComfyUI's own is not checked: another node has put it there.
    """
    kind: Any = type(module)
    if not kind.__module__.startswith("comfy."):
        return True
    parameters = inspect.signature(kind.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_any or set(names) <= parameters.keys()


def class_name(model: nn.Module) -> str:
    """The full name of a model's class."""
    return f"{type(model).__module__}.{type(model).__qualname__}"
