"""One call of attention on merged queries, keys and values, in any host."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..merging.plan import Plan
from .key_weights import Attention, attend, flat
from .merge_attention import Arguments, AttentionBlock


def merged_attention(
    block: AttentionBlock,
    called: Arguments,
    func: Attention,
    theirs: Callable[..., Tensor] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None,
    kwargs: Arguments,
) -> Tensor:
    """One call of attention by a block; merges what the block's plans say.

    Args:
        block: makes the plans, and notes what could not merge.
        called: the keyword arguments of the module that calls the attention.
        func: the attention function.
        theirs: an override by other code, called with ``func`` before the other arguments; None if
            there is none.
        q: queries, ``[batch, tokens, heads * channels]``, or with ``skip_reshape`` among ``kwargs``
            ``[batch, heads, tokens, channels]``. Keys and values have the same layout.
        k: keys.
        v: values.
        heads: the number of heads of the queries.
        mask: a bool mask, or one that is added to the logits; None for none.
        kwargs: the other arguments of the function.
    """
    plain = func if theirs is None else partial(theirs, func)
    # Later hosts may wrap tensors in containers.
    if not isinstance(k, Tensor):
        block.note_masked()
        return plain(q, k, v, heads, mask=mask, **kwargs)
    by_head = bool(kwargs.get("skip_reshape"))
    tokens = q.shape[-2]
    bias = None if mask is None else _bias(mask, tokens, k)
    if mask is not None and bias is None:
        block.note_masked()
        return plain(q, k, v, heads, mask=mask, **kwargs)
    flat_k = flat(k, by_head)
    queries, keys = block.call_plans(flat_k, tokens, called)
    if keys is None:
        return plain(q, k, v, heads, mask=mask, **kwargs)
    # Queries may have more heads than keys.
    key_heads = k.shape[1] if by_head else heads
    # Without proportional_attn, keys are plain means that count once, as in the paper.
    weighs = block.model.config.proportional_attn
    merged = keys.merge_keys(flat_k, key_heads) if weighs else keys.merge(flat_k)
    k = _like(merged, k, by_head)
    # Keep only one flat copy in memory at a time.
    del flat_k, merged
    v = _like(keys.merge(flat(v, by_head)), v, by_head)
    weights = block.weights(keys, k)
    bias = None if bias is None else _merged_keys(bias, keys, len(k))
    if queries is not None:
        q = _like(queries.merge(flat(q, by_head)), q, by_head)
        bias = None if bias is None else _merged_queries(bias, queries, len(q))
    out = attend(weights, func, theirs, bias, q, k, v, heads, kwargs)
    if queries is None:
        return out
    out_by_head = bool(kwargs.get("skip_output_reshape"))
    return _like(queries.unmerge(flat(out, out_by_head)), out, out_by_head)


def _like(merged: Tensor, x: Tensor, by_head: bool) -> Tensor:
    """``merged`` in the layout of ``x``: undoes :func:`tome_nodes.patching.key_weights.flat`."""
    return merged.unflatten(2, (x.shape[1], -1)).transpose(1, 2) if by_head else merged


def _bias(mask: Tensor, queries: int, keys: Tensor) -> Tensor | None:
    """A mask as ``[batch or 1, heads or 1, queries or 1, keys]`` to add to the logits.

    None if the mask has another shape.
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
    """A bias for merged keys: its mean over the keys of each slot."""
    rows = _finite(bias).expand(batch, -1, -1, -1).flatten(1, 2)
    merged = plan.merge(rows.mT).mT.clamp_min(torch.finfo(bias.dtype).min)
    return merged.unflatten(1, bias.shape[1:3])


def _merged_queries(bias: Tensor, plan: Plan, batch: int) -> Tensor:
    """A bias for merged queries: its mean over the queries of each slot."""
    if bias.shape[2] == 1:
        return bias
    columns = _finite(bias).expand(batch, -1, -1, -1).transpose(1, 2).flatten(2)
    merged = plan.merge(columns).clamp_min(torch.finfo(bias.dtype).min)
    return merged.unflatten(2, (bias.shape[1], bias.shape[3])).transpose(1, 2)


def _finite(bias: Tensor) -> Tensor:
    """A bias without infinity, which the merging of whole windows would spread."""
    return bias.clamp_min(torch.finfo(bias.dtype).min)
