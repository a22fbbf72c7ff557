"""The UNets of latent-diffusion and of code bases derived from it.

Each code base has its own copy of the classes, so modules are recognised by their attributes: a
spatial transformer has ``transformer_blocks``, which have ``attn1``, ``attn2`` and ``ff``.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import reasons
from ..merging.deep_blocks import DeepBlocks, no_channels
from ..merging.model import unwrapped
from ..merging.unet import UNetFamily, layers_by_level
from ..settings.config import ToMeConfig
from .arguments import TIMESTEPS
from .patched_unet import UNetContext, UNetHost
from .scheduling import Scheduling
from .unets import Arguments


def _is_stack(module: nn.Module) -> bool:
    blocks = getattr(module, "transformer_blocks", None)
    return isinstance(blocks, nn.ModuleList) and all(
        hasattr(block, name) for block in blocks for name in ("attn1", "attn2", "ff")
    )


class LdmUNets(UNetHost):
    """``UNetModel``."""

    family = UNetFamily(
        layers=layers_by_level,
        is_stack=_is_stack,
        # Blocks of Stable Diffusion 1 lack the attribute.
        attends_to_text=lambda block: getattr(block, "disable_self_attn", False),
        needs_all_tokens=lambda *args, **kwargs: False,
        masks=("mask",),
        source="context",
    )

    def find(self, model: object) -> list[tuple[nn.Module, UNetContext]]:
        """The UNet at ``model.model.diffusion_model``, ``model.diffusion_model`` or ``model``."""
        inner = getattr(model, "model", model)
        unet = unwrapped(getattr(inner, "diffusion_model", inner))
        parts = ("input_blocks", "middle_block", "output_blocks")
        if not (isinstance(unet, nn.Module) and all(hasattr(unet, name) for name in parts)):
            return []
        levels = getattr(model, "num_timesteps", None) or TIMESTEPS
        return [(unet, UNetContext(Scheduling(), levels))]

    def obstacle(self, unet: nn.Module, config: ToMeConfig) -> reasons.Reason | None:
        if torch.is_grad_enabled() and any(
            getattr(module, "checkpoint", False) for module in unet.modules()
        ):
            return reasons.RECOMPUTED
        return None

    def deep_blocks(self, unet: Any) -> DeepBlocks | None:
        inputs, outputs = unet.input_blocks, unet.output_blocks
        if len(inputs) != len(outputs) or len(inputs) < 2:
            return None
        if any(stack.is_of_video for stack in self.family.stacks(unet)):
            return None
        blocks: list[nn.Module] = [*inputs[1:], unet.middle_block, *outputs[:-1]]
        *others, last = blocks
        return DeepBlocks([(block, "forward", no_channels) for block in others], last)

    def conditions(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        # What a ControlNet adds changes from step to step.
        is_controlled = kwargs.get("control") is not None
        return super().conditions(args, {**kwargs, "control": is_controlled})

    def shallow_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
        # A ControlNet adds to the skips of all blocks.
        return None if kwargs.get("control") is not None else (args, kwargs)
