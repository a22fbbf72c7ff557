"""One call of attention on merged queries, keys and values, in any host.

The logarithms of the sizes of merged keys are added in whatever attention function runs in the end
(:mod:`tome_nodes.patching.key_weights`). The override of other code may ignore the function that
it is given, so it also gets them as a mask.
"""

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
    """The attention of a block on what of its queries, keys and values is merged.

    Args:
        block: makes the plans, and notes what could not merge.
        called: the keyword arguments of the module that calls the attention.
        func: the attention function.
        theirs: the override of other code, which is called with ``func`` in front of its arguments;
            None for none.
        q: queries, ``[batch, tokens, heads * channels]``, or with ``skip_reshape`` among ``kwargs``
            ``[batch, heads, tokens, channels]``; so are keys and values.
        k: keys.
        v: values.
        heads: the number of heads of the queries.
        mask: bool, or to add to the logits.
        kwargs: the other arguments of the function.
    """
    plain = func if theirs is None else partial(theirs, func)
    # A later host may wrap what it hands over.
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
    if queries is None and keys is None:
        return plain(q, k, v, heads, mask=mask, **kwargs)
    log_sizes = None
    if keys is not None:
        # Queries may have more heads than keys.
        key_heads = k.shape[1] if by_head else heads
        # As in the paper, keys are means and count once, unless they are to weigh as their tokens.
        weighs = block.model.config.proportional_attn
        merged = keys.merge_keys(flat_k, key_heads) if weighs else keys.merge(flat_k)
        k = _like(merged, k, by_head)
        # Keep only one flat copy in memory at a time.
        del flat_k, merged
        flat_v = flat(v, by_head)
        v = _like(keys.merge_values(flat_v) if weighs else keys.merge(flat_v), v, by_head)
        log_sizes = block.log_sizes(keys, k)
        bias = None if bias is None else _merged_keys(bias, keys, len(k))
    if queries is not None:
        q = _like(queries.merge(flat(q, by_head)), q, by_head)
        bias = None if bias is None else _merged_queries(bias, queries, len(q))
    out = attend(block, func, theirs, bias, log_sizes, q, k, v, heads, kwargs)
    if queries is None:
        return out
    out_by_head = bool(kwargs.get("skip_output_reshape"))
    return _like(queries.unmerge(flat(out, out_by_head)), out, out_by_head)


def _like(merged: Tensor, x: Tensor, by_head: bool) -> Tensor:
    """Undo :func:`tome_nodes.patching.key_weights.flat`: ``merged`` in the layout of ``x``."""
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
