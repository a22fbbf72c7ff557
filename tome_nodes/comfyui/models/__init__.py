"""Records of the ComfyUI models whose tokens merge, and what is refused."""

from torch import nn

from .base import ComfyRecord, class_name
from .transformers import KEEPS_STATE, TRANSFORMERS
from .unet import UNET, ComfyUNet

RECORDS: tuple[ComfyRecord, ...] = (UNET, *TRANSFORMERS)
"""All records; the first that matches a model is used."""


def is_unet(model: nn.Module) -> bool:
    """Whether a diffusion model is a UNet, whose tokens merge under every preset."""
    return isinstance(_known_record(model), ComfyUNet)


def is_of_video(model: nn.Module) -> bool:
    """Whether a UNet makes videos."""
    record = _known_record(model)
    return record is not None and any(stack.is_of_video for stack in record.stacks(model))


def check_forecasts(model: nn.Module) -> None:
    """Check that the steps of a diffusion model can be forecast.

    Raises:
        ValueError: the model keeps something from step to step. The message names its class.
    """
    if (why := KEEPS_STATE.get(class_name(model))) is not None:
        name = type(model).__name__
        raise ValueError(f"no step of a {name} can be forecast: {why}; leave the node out")


def record_of(model: nn.Module) -> ComfyRecord:
    """The record of a diffusion model whose tokens are to merge.

    Raises:
        ValueError: there is none, or the model has no blocks. The message names its class.
    """
    name = type(model).__name__
    record = _known_record(model)
    if record is None:
        check_forecasts(model)
        raise ValueError(
            f"tokens do not merge in a {name}, but its steps can be forecast: take a preset other "
            "than paper, or switch forecast on under preset custom"
        )
    if not any(stack.blocks for stack in record.stacks(model)):
        raise ValueError(f"this {name} has no transformer blocks to merge in; leave the node out")
    return record


def _known_record(model: nn.Module) -> ComfyRecord | None:
    return next((record for record in RECORDS if record.matches(model)), None)
