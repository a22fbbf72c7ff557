"""The ComfyUI models whose tokens merge, and those that are refused."""

from torch import nn

from .base import ComfyFamily, class_name
from .transformers import KEEPS_STATE, TRANSFORMERS
from .unet import UNET, ComfyUNet

FAMILIES: tuple[ComfyFamily, ...] = (UNET, *TRANSFORMERS)
"""All families; the first that matches a model is used."""


def is_unet(model: nn.Module) -> bool:
    """Whether a diffusion model is a UNet, whose tokens merge under every preset."""
    return isinstance(_known_family(model), ComfyUNet)


def check_forecasts(model: nn.Module) -> None:
    """Check that the steps of a diffusion model can be forecast.

    Raises:
        ValueError: the model keeps something from step to step. The message names its class.
    """
    if (why := KEEPS_STATE.get(class_name(model))) is not None:
        name = type(model).__name__
        raise ValueError(f"no step of a {name} can be forecast: {why}; leave the node out")


def family_of(model: nn.Module) -> ComfyFamily:
    """The family of a diffusion model whose tokens are to merge.

    Raises:
        ValueError: there is none, or the model has no blocks. The message names its class.
    """
    name = type(model).__name__
    family = _known_family(model)
    if family is None:
        check_forecasts(model)
        raise ValueError(
            f"tokens do not merge in a {name}, but its steps can be forecast: take a preset other "
            "than paper, or switch forecast on under preset custom"
        )
    if not any(stack.blocks for stack in family.stacks(model)):
        raise ValueError(f"this {name} has no transformer blocks to merge in; leave the node out")
    return family


def _known_family(model: nn.Module) -> ComfyFamily | None:
    return next((family for family in FAMILIES if family.matches(model)), None)
