"""What all families of ComfyUI's models share: what a model is given, and how it is recognised."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...core.layout import Picture
from ...core.site import Family, ModelSites


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model is evaluated with.

    Attributes:
        shape: of the latent, or of the part of it that is evaluated: batch, channels, perhaps
            frames, height, width.
        conditions: what else the model is called with, by name.
    """

    shape: tuple[int, ...]
    conditions: Mapping[str, Any]

    def tensors(self, name: str) -> list[Any]:
        """A condition that is a list of tensors or one, empty where there is none."""
        found = self.conditions.get(name)
        if found is None:
            return []
        return list(found) if isinstance(found, list | tuple) else [found]


class ComfyFamily(Family):
    """Classes of ComfyUI's diffusion models, and how their blocks are found and called."""

    def matches(self, model: nn.Module) -> bool:
        """Whether a model is of one of the classes."""
        raise NotImplementedError

    def pictures(self, model: Any, inputs: Inputs) -> tuple[Picture, ...]:
        """The pictures in the sequence of a transformer, in order; none for a UNet."""
        return ()

    def options(self, options: dict[str, Any], sites: ModelSites) -> dict[str, Any]:
        """The transformer options of an evaluation that merges, where blocks get none."""
        return options


def class_name(model: nn.Module) -> str:
    """The full name of a model's class."""
    return f"{type(model).__module__}.{type(model).__qualname__}"
