"""The transformer blocks of ComfyUI's UNets."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from comfy.ldm.modules.attention import SpatialTransformer, SpatialVideoTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor, nn

from ...merging.grid import Grid
from ...merging.layout import Layout
from ...patching.blocks import StackParts
from ...patching.merge_modules import InputSite, InputStack, Part
from ...patching.unet_levels import stacks_by_level
from ..attention import weigh_attention
from .base import ComfyBlock, ComfyFamily, patches_blocks, takes

REPLACED = "another node replaces the attention function"
"""The reason for unweighted keys, until our attention override runs."""


class UNetBlock(ComfyBlock, InputSite):
    """A ``BasicTransformerBlock``: its tokens are one feature map."""

    def is_masked(self, kwargs: Mapping[str, Any]) -> bool:
        return kwargs.get("mask") is not None

    def weigh_keys(self, kwargs: dict[str, Any], log_sizes: Tensor) -> dict[str, Any]:
        self.note_unweighted(REPLACED)
        options = kwargs.get("transformer_options") or {}
        weighed = weigh_attention(options, log_sizes, self.ops, self.note_unweighted)
        return kwargs | {"transformer_options": weighed}

    def parts(self) -> Sequence[Part]:
        block = self.module
        # If attn1 attends to text, as in the x4 upscaler, only queries merge.
        parts = [Part(block.attn1, "merge_attn", attends_to_itself=not block.disable_self_attn)]
        if block.attn2 is not None:
            parts.append(Part(block.attn2, "merge_crossattn"))
        return [*parts, Part(block.ff, "merge_mlp")]

    def layout(
        self, x: Tensor, context: Any = None, transformer_options: dict[str, Any] | None = None
    ) -> Layout | None:
        shape = (transformer_options or {}).get("activations_shape")
        if shape is None or shape[0] != x.shape[0] or shape[-2] * shape[-1] != x.shape[1]:
            return None
        return Layout.filled_by(Grid(*shape[-2:]))

    def latent(
        self, context: Any = None, transformer_options: dict[str, Any] | None = None
    ) -> Grid:
        shape = (transformer_options or {}).get("original_shape")
        return super().latent() if shape is None else Grid(*shape[-2:])

    def needs_all_tokens(
        self, context: Any = None, transformer_options: dict[str, Any] | None = None
    ) -> bool:
        """Whether another node patches the inside of this block, or of all blocks."""
        options = {} if transformer_options is None else transformer_options
        if patches_blocks(options):
            return True
        replaced = options.get("patches_replace")
        if not replaced:
            return False
        spatial_transformer = tuple(options.get("block", ()))
        return any(
            name in replaced.get(attention, {})
            for attention in ("attn1", "attn2")
            for name in (spatial_transformer, (*spatial_transformer, self.index))
        )


class UNetStack(InputStack):
    """A ``SpatialTransformer``."""

    block_class = UNetBlock

    @property
    def runs_as_one(self) -> bool:
        # A video model runs a temporal block, which needs all tokens, after each spatial one.
        return not isinstance(self.module, SpatialVideoTransformer)


def _changed_part(block: Any) -> str | None:
    """The part of a block that is not as :class:`UNetBlock` knows it, None if all are."""
    if not takes(block, "x", "context", "transformer_options"):
        return ".forward"
    for name in ("attn1", "attn2", "ff", "disable_self_attn"):
        if not hasattr(block, name):
            return f".{name}"
    arguments = "x", "context", "value", "mask", "transformer_options"
    for name in ("attn1", "attn2"):
        module = getattr(block, name)
        if module is not None and not takes(module, *arguments):
            return f".{name}.forward"
    return None


class UNet(ComfyFamily):
    """``UNetModel``: Stable Diffusion 1.x, 2.x, XL and related models."""

    stack_class = UNetStack

    def matches(self, model: nn.Module) -> bool:
        return isinstance(model, UNetModel)

    def changed_part(self, model: Any) -> str | None:
        for _, _, blocks, _ in self.stacks(model):
            for block in blocks:
                if (part := _changed_part(block)) is not None:
                    return f"{type(block).__name__}{part}"
        return None

    def stacks(self, model: nn.Module) -> Iterator[StackParts]:
        return stacks_by_level(model, lambda module: isinstance(module, SpatialTransformer))
