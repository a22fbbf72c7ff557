"""The transformer blocks of ComfyUI's UNets: Stable Diffusion 1.x, 2.x, XL and related models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor, nn

from ... import reasons
from ...merging.attention_trial import Attention
from ...merging.deep_blocks import DeepBlocks, no_channels
from ...merging.key_weights import KeyWeights, attend, fits
from ...merging.stack import StackPass
from ...merging.unet import UNetFamily, layers_by_level
from ...settings.config import ToMeConfig
from ...strategies.plan import Grid
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


def has_patches(options: Mapping[str, Any]) -> bool:
    """Whether another node patches the inside of any block; ``options`` are the transformer's."""
    replaced = options.get("patches_replace") or {}
    return bool(_has_block_patches(options) or replaced.get("attn1") or replaced.get("attn2"))


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
    """The keyword arguments with which a self-attention weighs its keys.

    Args:
        called: the keyword arguments so far. Another node's override in them stays in effect.
        weights: what the keys weigh.
        stored: the attention function that the host would call instead of its own; None if none.
    """
    options = called.get("transformer_options") or {}
    other = options.get(OVERRIDE)
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
        if other is None and stored is not None:
            func = stored
        if mask is None and fits(weights, k):
            return attend(weights, func, other, None, q, k, v, heads, kwargs)
        weights.note(reasons.CALLED_DIFFERENTLY)
        return attend(None, func, other, mask, q, k, v, heads, kwargs)

    return called | {"transformer_options": options | {OVERRIDE: override}}


class _StackAttention:
    """An override of attention that weighs the keys of all self-attentions of a stack.

    No other node patches the inside of its blocks, so the keys of every cross-attention are the
    tokens of the prompt.
    """

    def __init__(
        self,
        shared: StackPass,
        stored: Attention | None,
        other: Callable[..., Tensor] | None,
        prompt: Tensor | None,
    ):
        """``other`` is the override of another node, and ``prompt`` the text; None if none."""
        self._shared = shared
        self._stored = stored
        self._other = other
        self._text_tokens = None if prompt is None else prompt.shape[1]
        self._is_cross = False

    def attend(
        self,
        func: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        weights, other = self._shared.keys, self._other
        if other is None and self._stored is not None:
            func = self._stored
        if weights is not None:
            is_cross = self._is_cross
            # If a prompt has as many tokens as the stack, its attention is every second one.
            if self._text_tokens == weights.sizes.shape[1]:
                self._is_cross = not is_cross
            if is_cross or mask is not None or not fits(weights, k):
                weights = None
        return attend(weights, func, other, mask, q, k, v, heads, kwargs)


# A later stack may take more arguments than these.
def _weigh_stack(
    shared: StackPass,
    stored: Attention | None,
    context: Any = None,
    transformer_options: Options = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a stack with which all its self-attentions weigh their keys."""
    options = transformer_options or {}
    prompt = context[0] if isinstance(context, list) else context
    override = _StackAttention(shared, stored, options.get(OVERRIDE), prompt).attend
    return (context, options | {OVERRIDE: override}, *args), kwargs


def deep_blocks(model: Any) -> DeepBlocks | None:
    """All blocks of a UNet except its first input block and its last output block.

    None if the blocks are not as known, so that none can be left out.
    """
    layers = deep_layers(model)
    if not layers:
        return None
    *others, last = layers
    return DeepBlocks([(layer, "forward", no_channels) for layer in others], last)


def deep_layers(model: Any) -> list[nn.Module]:
    """The layers of the deep blocks, in running order; none if the blocks are not as known."""
    if not isinstance(model, UNetModel):
        return []
    inputs, outputs = model.input_blocks, model.output_blocks
    if len(inputs) != len(outputs) or len(inputs) < 2 or len(inputs[0]) != 1:
        return []
    deep = (*inputs[1:], model.middle_block or (), *outputs[:-1])
    return [layer for block in deep for layer in block]


@dataclass(frozen=True)
class ComfyUNet(UNetFamily):
    """``UNetModel``, whose blocks are ``BasicTransformerBlock`` and read the tokens' shape."""

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

    def obstacle(self, model: nn.Module, conditions: Mapping[str, Any]) -> reasons.Reason | None:
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
