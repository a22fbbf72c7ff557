"""The transformer blocks of ComfyUI's UNets: Stable Diffusion 1.x, 2.x, XL and related models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor, nn

from ... import reasons
from ...merging.plan import Grid
from ...patching.attention_trial import Attention
from ...patching.blocks import Stack
from ...patching.key_weights import KeyWeights, attend, fits
from ...patching.merge_modules import UNetRecord, layers_by_level
from ...settings.config import ToMeConfig
from .base import OVERRIDE, host_attentions, stored_attention, takes

_BLOCK_PATCHES = (
    "attn1_patch",
    "attn1_output_patch",
    "attn2_patch",
    "attn2_output_patch",
    "middle_patch",
)
"""Patches of other nodes that see the tokens inside a block."""

Options = dict[str, Any] | None
Shape = Sequence[int] | None


# A later block may take more arguments than these.
def _shapes(
    context: Any = None, transformer_options: Options = None, *args: Any, **kwargs: Any
) -> tuple[Shape, Shape]:
    options = transformer_options or {}
    return options.get("activations_shape"), options.get("original_shape")


def _needs_all_tokens(
    block: nn.Module,
    index: int,
    context: Any = None,
    transformer_options: Options = None,
    *args: Any,
    **kwargs: Any,
) -> bool:
    """Whether another node patches the inside of this block, or of all blocks."""
    options = transformer_options or {}
    if _has_block_patches(options):
        return True
    replaced = options.get("patches_replace")
    if not replaced:
        return False
    spatial_transformer = tuple(options.get("block", ()))
    return any(
        name in replaced.get(attention, {})
        for attention in ("attn1", "attn2")
        for name in (spatial_transformer, (*spatial_transformer, index))
    )


def is_unpatched(options: Mapping[str, Any]) -> bool:
    """Whether no other node patches the inside of any block; ``options`` are the transformer's."""
    replaced = options.get("patches_replace") or {}
    return not (_has_block_patches(options) or replaced.get("attn1") or replaced.get("attn2"))


def _has_block_patches(options: Mapping[str, Any]) -> bool:
    patches: Any = options.get("patches")
    return bool(patches) and any(patches.get(name) for name in _BLOCK_PATCHES)


def _changed_part(block: Any) -> str | None:
    """The part of a block that has changed in ComfyUI, None if none has."""
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


def weigh_keys(
    called: dict[str, Any], weights: KeyWeights, stored: Attention | None = None
) -> dict[str, Any]:
    """Keyword arguments of a self-attention under which it weighs its keys.

    Args:
        called: the keyword arguments so far. Another node's override in them stays in effect.
        weights: what the keys weigh.
        stored: the attention function that the host would call instead of its own; None if none.
    """
    options = called.get("transformer_options") or {}
    theirs = options.get(OVERRIDE)
    if not weights.masked:
        # The override takes it back, if it is called.
        weights.note(reasons.OTHER_ATTENTION)

    def override(
        func: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if theirs is None and stored is not None:
            func = stored
        if mask is None and fits(weights, k):
            return attend(weights, func, theirs, None, q, k, v, heads, kwargs)
        weights.note(reasons.CALLED_DIFFERENTLY)
        return attend(None, func, theirs, mask, q, k, v, heads, kwargs)

    return called | {"transformer_options": options | {OVERRIDE: override}}


class StackOverride:
    """An override of attention that weighs the keys of all self-attentions of a stack.

    No other node patches the inside of its blocks, so the keys of every cross-attention are the
    tokens of the prompt.
    """

    def __init__(self, stored: Attention | None):
        """``stored`` is the attention function that is stored with all its attentions."""
        self._stored = stored

    def put_on(self, called: dict[str, Any], weights: KeyWeights) -> None:
        """See :class:`tome_nodes.patching.blocks.StackWeights`."""
        options, context = called["transformer_options"], called.get("context")
        self._weights = weights
        # If a prompt has as many tokens as the stack, its attention is every second one.
        self._takes_turns = context is not None and context.shape[1] == weights.sizes.shape[1]
        self._is_cross = False
        self._theirs = options.get(OVERRIDE)
        weights.note(reasons.OTHER_ATTENTION)
        options[OVERRIDE] = self.override

    def take_off(self, called: dict[str, Any]) -> None:
        """See :class:`tome_nodes.patching.blocks.StackWeights`."""
        options = called["transformer_options"]
        if self._theirs is None:
            del options[OVERRIDE]
        else:
            options[OVERRIDE] = self._theirs
        # The blocks, which are kept for the run, hold this.
        del self._weights, self._theirs

    def override(
        self,
        func: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        weights, theirs = self._weights, self._theirs
        if theirs is None and self._stored is not None:
            func = self._stored
        is_cross = self._is_cross
        if self._takes_turns:
            self._is_cross = not is_cross
        if is_cross or mask is not None or not fits(weights, k):
            return attend(None, func, theirs, mask, q, k, v, heads, kwargs)
        return attend(weights, func, theirs, None, q, k, v, heads, kwargs)


def _weigh_stack(stack: Stack) -> StackOverride | None:
    """None if not all attentions of a stack are stored with the same function."""
    blocks: Any = stack.blocks
    attentions = [module for block in blocks for module in (block.attn1, block.attn2)]
    stored = {stored_attention(module) for module in attentions if module is not None}
    return StackOverride(*stored) if len(stored) == 1 else None


@dataclass(frozen=True)
class ComfyUNet(UNetRecord):
    """``UNetModel``, whose blocks are ``BasicTransformerBlock`` and read the tokens' shape."""

    is_unet: ClassVar[bool] = True

    def matches(self, model: nn.Module) -> bool:
        return isinstance(model, UNetModel)

    def grid(self, model: Any, shape: Sequence[int]) -> Grid:
        return Grid(*shape[-2:])

    def in_effect(self, config: ToMeConfig) -> ToMeConfig:
        return config

    def changed_part(self, model: Any) -> str | None:
        for stack in self.stacks(model):
            for block in stack.blocks:
                if (part := _changed_part(block)) is not None:
                    return f"{type(block).__name__}{part}"
        return None

    def obstacle(self, model: nn.Module, conditions: Mapping[str, Any]) -> str | None:
        return None


UNET = ComfyUNet(
    layers=layers_by_level,
    is_stack=lambda module: isinstance(module, SpatialTransformer),
    attends_to_text=lambda block: block.disable_self_attn,
    needs_all_tokens=_needs_all_tokens,
    masks=("mask",),
    weigh_keys=weigh_keys,
    shapes=_shapes,
    weigh_stack=_weigh_stack,
    stored=stored_attention,
    attentions=host_attentions,
)
