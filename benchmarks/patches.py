"""What nodes do to a model."""

from collections.abc import Callable
from typing import Any

from comfy.model_patcher import ModelPatcher

Patch = Callable[[ModelPatcher], ModelPatcher]
"""Makes a patched clone of a model."""


def node(kind: Any, **inputs: Any) -> Patch:
    """What a node of ComfyUI does to a model, given the class of the node."""
    return lambda model: getattr(kind(), kind.FUNCTION)(model=model, **inputs)[0]
