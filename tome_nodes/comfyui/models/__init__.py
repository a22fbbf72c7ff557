"""Records of the kinds of ComfyUI models, and the choice of the record for a model."""

from torch import nn

from .base import ComfyRecord, class_name
from .transformers import REFUSED, TRANSFORMERS
from .unet import UNET
from .unknown import unknown_transformer

RECORDS: tuple[ComfyRecord, ...] = (UNET, *TRANSFORMERS)
"""All records; the first that matches a model is used."""


def record_of(model: nn.Module) -> ComfyRecord:
    """The record of a diffusion model.

    Raises:
        ValueError: the model is refused, or has no blocks. The message names its class.
    """
    name = type(model).__name__
    if (why := REFUSED.get(class_name(model))) is not None:
        raise ValueError(f"token merging does not work with a {name}: {why}")
    known = (each for each in RECORDS if each.matches(model))
    record = next(known, None) or unknown_transformer(model)
    if not any(stack.blocks for stack in record.stacks(model)):
        raise ValueError(
            f"token merging needs a model with transformer blocks, and this {name} has none"
        )
    return record
