"""What nodes do to a model, and a ControlNet without a network."""

from collections.abc import Callable
from typing import Any

import comfy.controlnet
from comfy.model_patcher import ModelPatcher
from torch import Tensor

Patch = Callable[[ModelPatcher], ModelPatcher]
"""Makes a patched clone of a model."""


def execute(kind: Any, *args: Any, **inputs: Any) -> Any:
    """The first output of a node of ComfyUI, given its class."""
    return getattr(kind(), kind.FUNCTION)(*args, **inputs)[0]


def node(kind: Any, **inputs: Any) -> Patch:
    """What a node of ComfyUI does to a model, given the class of the node."""
    return lambda model: execute(kind, model=model, **inputs)


class Control(comfy.controlnet.ControlBase):
    """A ControlNet without a network.

    ``adds`` makes what it adds to the output of a block from the noisy latent. ``place`` says in
    which blocks: ``input``, ``middle`` or ``output``.
    """

    def __init__(self, adds: Callable[[Tensor], Tensor], place: str = "input"):
        super().__init__()
        self.adds, self.place = adds, place

    def get_control(self, x: Tensor, t: Tensor, *_: Any) -> dict[str, list[Tensor]] | None:
        first, last = self.timestep_range
        if not last <= t[0] <= first:
            return None
        return {"input": [], "middle": [], "output": [], self.place: [self.adds(x)]}

    def copy(self) -> "Control":
        made = Control(self.adds, self.place)
        self.copy_to(made)
        return made

    def get_models(self) -> list[Any]:
        return []
