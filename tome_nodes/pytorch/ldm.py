"""The UNets of latent-diffusion and code bases derived from it.

Each code base has its own copy of the classes, so modules are recognised by their attributes: a
spatial transformer has ``transformer_blocks``, which have ``attn1``, ``attn2`` and ``ff``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..patching.blocks import StackParts
from ..patching.unet_levels import stacks_by_level
from ..settings.config import ToMeConfig
from .hooks import RECOMPUTED, HookedBlock, HookedFamily, HookedStack


class LdmBlock(HookedBlock):
    """A ``BasicTransformerBlock``."""

    context_name = "context"
    mask_names = ("mask",)

    def attends_to_text(self) -> bool:
        # Blocks of Stable Diffusion 1 lack the attribute.
        return getattr(self.module, "disable_self_attn", False)

    def needs_all_tokens(self, *args: Any, **kwargs: Any) -> bool:
        return False


class LdmStack(HookedStack):
    """A ``SpatialTransformer``."""

    block_class = LdmBlock

    @property
    def runs_as_one(self) -> bool:
        # Video models run a temporal block, which needs all tokens, after each spatial one.
        return not hasattr(self.module, "time_stack")


class LdmUNet(HookedFamily):
    """``UNetModel``."""

    stack_class = LdmStack

    def find(self, model: object) -> tuple[nn.Module, int | None] | None:
        """The UNet at ``model.model.diffusion_model``, ``model.diffusion_model`` or ``model``."""
        inner = getattr(model, "model", model)
        unet = getattr(inner, "diffusion_model", inner)
        unet = getattr(unet, "_orig_mod", unet)
        parts = ("input_blocks", "middle_block", "output_blocks")
        if not (isinstance(unet, nn.Module) and all(hasattr(unet, name) for name in parts)):
            return None
        return unet, getattr(model, "num_timesteps", None)

    def stacks(self, model: nn.Module) -> Iterator[StackParts]:
        return stacks_by_level(model, _is_transformer)

    def obstacle(self, unet: nn.Module, config: ToMeConfig) -> str | None:
        if torch.is_grad_enabled() and any(
            getattr(module, "checkpoint", False) for module in unet.modules()
        ):
            return RECOMPUTED
        return None


def _is_transformer(module: nn.Module) -> bool:
    blocks = getattr(module, "transformer_blocks", None)
    return isinstance(blocks, nn.ModuleList) and all(
        hasattr(block, name) for block in blocks for name in ("attn1", "attn2", "ff")
    )
