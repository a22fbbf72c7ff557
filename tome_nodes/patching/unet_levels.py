"""The levels of UNets that descend from latent-diffusion's, whose code each project has copied."""

from collections.abc import Callable, Iterator

from torch import nn

from .blocks import StackParts


def stacks_by_level(
    model: nn.Module, is_stack: Callable[[nn.Module], bool]
) -> Iterator[StackParts]:
    """The stacks of a UNet whose modules are in the order in which they run.

    Args:
        model: the UNet; its layers between levels are a ``Downsample`` or an ``Upsample``.
        is_stack: whether a module is a stack, which holds its blocks as ``transformer_blocks``.
    """
    level = 1
    for name, module in model.named_modules():
        kind = type(module).__name__
        if is_stack(module):
            blocks: nn.ModuleList = module.transformer_blocks
            yield name, module, blocks, level
        elif name.endswith(".x_upd"):
            # A residual block that resizes does so on both of its ways.
            continue
        elif kind == "Downsample":
            level *= 2
        elif kind == "Upsample":
            level //= 2
