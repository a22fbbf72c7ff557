"""Reach into ComfyUI's attention.

ComfyUI calls an override function from the transformer options, if there is one, instead of its
attention.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..patching.key_weights import CALLED_DIFFERENTLY, Attention, KeyWeights, attend

OVERRIDE = "optimized_attention_override"
"""The transformer option that holds the override function."""

_SPARSE = "nodes_sparse_attention"
"""The module of ComfyUI that has the node Model Sparse Attention."""

_REPLACED = "another node replaces the attention function"
"""The reason for unweighted keys if another node's attention runs instead."""


def stored_attention(attention: nn.Module) -> Attention | None:
    """The attention function that is stored with the weights of an attention module, if any.

    From version 0.38 on, ComfyUI calls it instead of its own attention if there is no override.
    """
    for module in attention.modules():
        stored = getattr(module, "comfy_attention", None)
        if stored is not None:
            return getattr(stored, "function", None)
    return None


def sparse_attention(options: Mapping[str, Any]) -> str | None:
    """Why nothing merges if ComfyUI's sparse attention is in use, None if it is not.

    It needs as many keys as queries, and raises no error if merging leaves fewer.
    """
    replaced = options.get("patches_replace", {}).get("dit", {})
    functions = (options.get(OVERRIDE), *replaced.values())
    if any(getattr(each, "__module__", "").endswith(_SPARSE) for each in functions):
        return (
            "Model Sparse Attention needs all keys, and is used instead; without that node, tokens "
            "merge"
        )
    return None


def weigh_attention(called: dict[str, Any], weights: KeyWeights) -> dict[str, Any]:
    """Keyword arguments of a self-attention under which it weighs its keys.

    Args:
        called: the keyword arguments so far. Another node's override in them stays in effect.
        weights: what the keys weigh.
    """
    options = called.get("transformer_options") or {}
    theirs = options.get(OVERRIDE)
    # The override takes it back, if it is called.
    weights.note(_REPLACED)

    def override(
        func: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        fits = mask is None and weights.fit(k)
        if not fits:
            weights.note(CALLED_DIFFERENTLY)
        return attend(weights if fits else None, func, theirs, mask, q, k, v, heads, kwargs)

    return called | {"transformer_options": options | {OVERRIDE: override}}
