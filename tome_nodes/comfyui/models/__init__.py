"""What is known about each kind of ComfyUI model, and which kind a model is of."""

from torch import nn

from .base import ComfyRecord, class_name
from .transformers import REFUSED, TRANSFORMERS
from .unet import UNET

RECORDS: tuple[ComfyRecord, ...] = (UNET, *TRANSFORMERS)
"""In order: the first that matches a model is used."""


def record_of(model: nn.Module) -> ComfyRecord:
    """The record of a diffusion model.

    Raises:
        ValueError: it has no record, or no blocks. The message names its class.
    """
    name = type(model).__name__
    record = next((each for each in RECORDS if each.matches(model)), None)
    if record is None:
        why = REFUSED.get(class_name(model), "this kind of model is not known")
        raise ValueError(f"token merging does not work with a {name}: {why}")
    if not any(stack.blocks for stack in record.stacks(model)):
        raise ValueError(
            f"token merging needs a model with transformer blocks, and this {name} has none"
        )
    return record
