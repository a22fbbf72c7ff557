"""Find what to merge in a UNet of latent-diffusion and its descendants.

Their modules are known by their shape, not their class, since each code base carries its own copy:
a spatial transformer holds ``transformer_blocks``, and these ``attn1``, ``attn2`` and ``ff``.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .hooked import RECOMPUTED, Attachment, HookedBlock, HookedStack


class LdmBlock(HookedBlock):
    """A ``BasicTransformerBlock``."""

    context_name = "context"
    mask_names = ("mask",)

    def attends_to_text(self, block: nn.Module) -> bool:
        # Blocks of Stable Diffusion 1 have no such switch.
        return getattr(block, "disable_self_attn", False)

    def needs_all_tokens(self, *args: Any, **kwargs: Any) -> bool:
        return False


class LdmStack(HookedStack):
    """A ``SpatialTransformer``."""

    block_class = LdmBlock

    @property
    def runs_as_one(self) -> bool:
        # Video models run a temporal block, which needs all tokens, after each spatial one.
        return not hasattr(self.module, "time_stack")


class LdmAttachment(Attachment):
    """Hooks for a ``UNetModel``."""

    stack_class = LdmStack

    @staticmethod
    def transformers(unet: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, module in unet.named_modules():
            if _is_transformer(module):
                yield name, module

    @staticmethod
    def blocks_by_level(unet: nn.Module) -> Counter[int]:
        blocks: Counter[int] = Counter()
        downsample = 1
        for part in [*unet.input_blocks, unet.middle_block or ()]:
            for layer in part:
                if _is_transformer(layer):
                    blocks[downsample] += len(layer.transformer_blocks)
                elif type(layer).__name__ == "Downsample" or getattr(layer, "updown", False):
                    downsample *= 2
        return blocks

    def obstacle(self, unet: nn.Module) -> str | None:
        if torch.is_grad_enabled() and any(
            getattr(module, "checkpoint", False) for module in unet.modules()
        ):
            return RECOMPUTED
        return None


def find_unet(model: object) -> tuple[nn.Module, int | None] | None:
    """The UNet at ``model.model.diffusion_model``, or higher, or the model itself.

    Returns:
        The UNet and the model's number of noise levels, None where it tells none; None where there
        is no such UNet.
    """
    inner = getattr(model, "model", model)
    unet = getattr(inner, "diffusion_model", inner)
    unet = getattr(unet, "_orig_mod", unet)
    if not (
        isinstance(unet, nn.Module)
        and all(hasattr(unet, name) for name in ("input_blocks", "middle_block", "output_blocks"))
    ):
        return None
    return unet, getattr(model, "num_timesteps", None)


def _is_transformer(module: nn.Module) -> bool:
    blocks = getattr(module, "transformer_blocks", None)
    return isinstance(blocks, nn.ModuleList) and all(
        hasattr(block, name) for block in blocks for name in ("attn1", "attn2", "ff")
    )
