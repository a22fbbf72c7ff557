"""Find the family of a ComfyUI model."""

from torch import nn

from .base import ComfyFamily, class_name
from .transformers import REFUSED, TRANSFORMERS
from .unet import UNet

FAMILIES: tuple[ComfyFamily, ...] = (UNet(), *TRANSFORMERS)
"""In order: the first that matches a model is used."""


def family_of(model: nn.Module) -> ComfyFamily:
    """The family of a diffusion model.

    Raises:
        ValueError: it has no family, or no blocks. The message names its class.
    """
    name = type(model).__name__
    family = next((each for each in FAMILIES if each.matches(model)), None)
    if family is None:
        why = REFUSED.get(class_name(model), "this kind of model is not known")
        raise ValueError(f"token merging does not work with a {name}: {why}")
    if not family.has_blocks(model):
        raise ValueError(
            f"token merging needs a model with transformer blocks, and this {name} has none"
        )
    return family
