"""Reach into ComfyUI's attention: pass it merged tokens, and weigh merged keys.

The host calls one override function from the transformer options instead of its attention. Ours
merges first and then calls the override of another node, if there is one, on the merged tokens.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..patching.attention_call import merged_attention
from ..patching.blocks import Block
from ..patching.key_weights import CALLED_DIFFERENTLY, Attention, attend, has_keys
from ..patching.merge_attention import AttentionBlock

OVERRIDE = "optimized_attention_override"
"""The transformer option that the host calls instead of its attention."""

_SPARSE = "nodes_sparse_attention"
"""The module of the host whose functions attend to some keys only."""


def merge_attention(
    options: dict[str, Any], block_of: Callable[[], AttentionBlock | None], called: dict[str, Any]
) -> dict[str, Any]:
    """Transformer options under which attention runs on merged queries, keys and values.

    Args:
        options: the transformer options before; another node's override in them stays in effect
            and gets what is merged.
        block_of: the block that is running, None between blocks. It makes the plans, and notes what
            could not merge.
        called: the keyword arguments of the module that calls the attention.
    """
    theirs = options.get(OVERRIDE)

    def override(
        func: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        block = block_of()
        if block is None:
            attend = func if theirs is None else partial(theirs, func)
            return attend(q, k, v, heads, mask=mask, **kwargs)
        if theirs is None:
            func = block.stored_attention or func
        return merged_attention(block, called, func, theirs, q, k, v, heads, mask, kwargs)

    return options | {OVERRIDE: override}


def stored_attention(attention: nn.Module) -> Attention | None:
    """The function that is stored with the weights of an attention module, as of ComfyUI 0.38.

    The host calls it instead of its own where there is no override; None if there is none.
    """
    for module in attention.modules():
        stored = getattr(module, "comfy_attention", None)
        if stored is not None:
            return getattr(stored, "function", None)
    return None


def sparse_attention(options: Mapping[str, Any]) -> str | None:
    """Why nothing merges beside the host's sparse attention, None if that is not in use.

    It runs on as many keys as queries, and would say nothing where merging leaves fewer.
    """
    replaced = options.get("patches_replace", {}).get("dit", {})
    functions = (options.get(OVERRIDE), *replaced.values())
    if any(getattr(each, "__module__", "").endswith(_SPARSE) for each in functions):
        return (
            "Model Sparse Attention needs all keys, and is used instead; without that node, tokens "
            "merge"
        )
    return None


def weigh_attention(options: dict[str, Any], block: Block, log_sizes: Tensor) -> dict[str, Any]:
    """Transformer options under which an attention adds ``log_sizes`` to its logits.

    Args:
        options: the transformer options before; another node's override in them stays in effect.
        block: the one that attends, which notes why its keys are not weighed.
        log_sizes: ``[batch, keys]`` in the dtype of queries and keys.
    """
    theirs = options.get(OVERRIDE)

    def override(
        func: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        sizes: Tensor | None = log_sizes
        # A later host may wrap what it hands over.
        if mask is not None or not (isinstance(k, Tensor) and has_keys(k, log_sizes)):
            block.note_unweighted(CALLED_DIFFERENTLY)
            sizes = None
        return attend(block, func, theirs, mask, sizes, q, k, v, heads, kwargs)

    return options | {OVERRIDE: override}
