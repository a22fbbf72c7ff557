"""The classes of ComfyUI's models that can merge tokens, one record each."""

from torch import nn

from .family import ComfyFamily
from .unet import UNet

FAMILIES: tuple[ComfyFamily, ...] = (UNet(),)
"""The first that matches a model is taken."""


def family_of(model: nn.Module) -> ComfyFamily:
    """The family of a diffusion model.

    Raises:
        ValueError: it is of none, or has no blocks. The message names its class.
    """
    name = type(model).__name__
    family = next((each for each in FAMILIES if each.matches(model)), None)
    if family is None:
        raise ValueError(
            f"token merging is for UNet models (Stable Diffusion 1.x, 2.x, XL and their kin), "
            f"and this model is a {name}"
        )
    if not family.blocks_by_level(model):
        raise ValueError(
            f"token merging needs a model with transformer blocks, and this {name} has none"
        )
    return family
