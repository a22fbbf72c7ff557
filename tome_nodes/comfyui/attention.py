"""Reach into ComfyUI's attention: pass it merged tokens, and weigh merged keys.

The host calls one override function from the transformer options instead of its attention. Ours
merges first and then calls the override of another node, if there is one, on the merged tokens.

The logarithms of the sizes are added in whatever attention function runs in the end
(:mod:`tome_nodes.comfyui.key_weights`). The override of another node may ignore the function
that it is given, so it also gets them as a mask.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..merging.plan import Plan
from ..ops import Operations
from ..ops.autotune import Tuner
from ..patching.merge_attention import AttentionBlock
from .key_weights import Attention, Note, flat, has_keys, weighed, with_sizes

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
        if theirs is None and block is not None:
            func = block.stored_attention or func
        attend = func if theirs is None else partial(theirs, func)
        if block is None:
            return attend(q, k, v, heads, mask=mask, **kwargs)
        # A later host may wrap what it hands over.
        if not isinstance(k, Tensor):
            block.note_masked()
            return attend(q, k, v, heads, mask=mask, **kwargs)
        by_head = bool(kwargs.get("skip_reshape"))
        tokens = q.shape[-2]
        bias = None if mask is None else _bias(mask, tokens, k)
        if mask is not None and bias is None:
            block.note_masked()
            return attend(q, k, v, heads, mask=mask, **kwargs)
        tools = block.ops, block.tuner, block.note_unweighted
        if block.is_merged:
            outer = block.outer_log_sizes(k.shape[-2], k)
            return _attend(func, theirs, bias, outer, *tools, q, k, v, heads, kwargs)
        flat_k = flat(k, by_head)
        queries, keys = block.call_plans(flat_k, tokens, called)
        if queries is None and keys is None:
            return attend(q, k, v, heads, mask=mask, **kwargs)
        log_sizes = None
        if keys is not None:
            # Queries may have more heads than keys.
            key_heads = k.shape[1] if by_head else heads
            k = _like(keys.merge_keys(flat_k, key_heads), k, by_head)
            # Keep only one flat copy in memory at a time.
            del flat_k
            v = _like(keys.merge_values(flat(v, by_head)), v, by_head)
            log_sizes = block.log_sizes(keys, k)
            bias = None if bias is None else _merged_keys(bias, keys, len(k))
        if queries is not None:
            q = _like(queries.merge(flat(q, by_head)), q, by_head)
            bias = None if bias is None else _merged_queries(bias, queries, len(q))
        out = _attend(func, theirs, bias, log_sizes, *tools, q, k, v, heads, kwargs)
        if queries is None:
            return out
        out_by_head = bool(kwargs.get("skip_output_reshape"))
        return _like(queries.unmerge(flat(out, out_by_head)), out, out_by_head)

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


def weigh_attention(
    options: dict[str, Any],
    log_sizes: Tensor,
    ops: Operations,
    tuner: Tuner | None,
    note: Note,
) -> dict[str, Any]:
    """Transformer options under which an attention adds ``log_sizes`` to its logits.

    Args:
        options: the transformer options before; another node's override in them stays in effect.
        log_sizes: ``[batch, keys]`` in the dtype of queries and keys.
        ops: the operations of the backend.
        tuner: chooses among the ways to add them; None for the default.
        note: called with None once the logits are weighed, or with the reason why they are not.
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
            note("another node changes how the attention is called")
            sizes = None
        return _attend(func, theirs, mask, sizes, ops, tuner, note, q, k, v, heads, kwargs)

    return options | {OVERRIDE: override}


def _attend(
    func: Attention,
    theirs: Callable[..., Tensor] | None,
    bias: Tensor | None,
    log_sizes: Tensor | None,
    ops: Operations,
    tuner: Tuner | None,
    note: Note,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    kwargs: dict[str, Any],
) -> Tensor:
    """Call the host's attention, through another node's override if there is one."""
    if theirs is None:
        if log_sizes is None:
            return func(q, k, v, heads, mask=bias, **kwargs)
        return weighed(func, bias, log_sizes, ops, tuner, note, q, k, v, heads, **kwargs)
    mask = bias
    if log_sizes is not None:
        mask = with_sizes(bias, log_sizes)
        note(None)
        func = partial(weighed, func, bias, log_sizes, ops, tuner, note)
    return theirs(func, q, k, v, heads, mask=mask, **kwargs)


def _like(merged: Tensor, x: Tensor, by_head: bool) -> Tensor:
    """Undo :func:`tome_nodes.comfyui.key_weights.flat`: ``merged`` in the layout of ``x``."""
    return merged.unflatten(2, (x.shape[1], -1)).transpose(1, 2) if by_head else merged


def _bias(mask: Tensor, queries: int, keys: Tensor) -> Tensor | None:
    """A mask as ``[batch or 1, heads or 1, queries or 1, keys]`` to add to the logits.

    None if its shape does not allow that.
    """
    if mask.ndim in (2, 3):
        mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    if mask.ndim != 4 or mask.shape[-1] != keys.shape[-2] or mask.shape[-2] not in (1, queries):
        return None
    if mask.dtype != torch.bool:
        return mask
    bias = torch.zeros_like(mask, dtype=keys.dtype)
    return bias.masked_fill(~mask, torch.finfo(keys.dtype).min)


def _merged_keys(bias: Tensor, plan: Plan, batch: int) -> Tensor:
    """A bias for the slots of the keys: the mean over the tokens of each."""
    rows = _finite(bias).expand(batch, -1, -1, -1).flatten(1, 2)
    merged = plan.merge(rows.mT).mT.clamp_min(torch.finfo(bias.dtype).min)
    return merged.unflatten(1, bias.shape[1:3])


def _merged_queries(bias: Tensor, plan: Plan, batch: int) -> Tensor:
    """A bias for the slots of the queries: the mean over the tokens of each."""
    if bias.shape[2] == 1:
        return bias
    columns = _finite(bias).expand(batch, -1, -1, -1).transpose(1, 2).flatten(2)
    merged = plan.merge(columns).clamp_min(torch.finfo(bias.dtype).min)
    return merged.unflatten(2, (bias.shape[1], bias.shape[3])).transpose(1, 2)


def _finite(bias: Tensor) -> Tensor:
    """A bias without infinity, which a sum over a window would spread."""
    return bias.clamp_min(torch.finfo(bias.dtype).min)
