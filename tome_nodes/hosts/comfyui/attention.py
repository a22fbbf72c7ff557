"""Reach into ComfyUI's attention: pass it merged tokens, and weigh merged keys.

The host calls one override function from the transformer options instead of its attention. Ours
merges first and then calls the override of another node, if there is one, on the merged tokens.

If key j stands for n_j equal keys, softmax over all of them is softmax over the merged keys with
log n_j added to the logits. The logarithms are added in whatever attention function runs in the
end. The override of another node may ignore the function that it is given, so it also gets them as
a mask.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...core.plan import Plan
from ...ops import Operations
from ...ops.reference import FURTHER

_OVERRIDE = "optimized_attention_override"

# Attention functions of the host that add a bias cheaply.
_TAKE_BIAS = frozenset(
    {"attention_basic", "attention_split", "attention_sub_quad", "attention_pytorch"}
)
# Those that take no bias, or are slow with one.
_TAKE_CHANNELS = frozenset({"attention_flash", "attention_xformers"})

Attention = Callable[..., Tensor]
Note = Callable[[str | None], None]


class MergesCalls(Protocol):
    """Merges calls of attention; see :class:`tome_nodes.core.call_site.CallSite`."""

    @property
    def ops(self) -> Operations: ...

    def call_plans(
        self, k: Tensor, queries: int, kwargs: dict[str, Any]
    ) -> tuple[Plan | None, Plan | None]: ...

    def log_sizes(self, plan: Plan, like: Tensor) -> Tensor | None: ...

    @property
    def is_merged(self) -> bool: ...

    def outer_log_sizes(self, keys: int, like: Tensor) -> Tensor | None: ...

    def note_masked(self) -> None: ...

    def note_unweighted(self, reason: str | None) -> None: ...


def merge_attention(
    options: dict[str, Any], merges: MergesCalls, called: dict[str, Any]
) -> dict[str, Any]:
    """Transformer options under which an attention runs on merged queries, keys and values.

    Args:
        options: the transformer options before; another node's override in them stays in effect
            and gets what is merged.
        merges: makes the plans, and notes what could not merge.
        called: the keyword arguments of the module that calls the attention.
    """
    theirs = options.get(_OVERRIDE)

    def override(
        func: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        attend = func if theirs is None else partial(theirs, func)
        # A later host may wrap what it hands over.
        if not isinstance(k, Tensor):
            merges.note_masked()
            return attend(q, k, v, heads, mask=mask, **kwargs)
        by_head = bool(kwargs.get("skip_reshape"))
        tokens = q.shape[-2]
        bias = None if mask is None else _bias(mask, tokens, k)
        if mask is not None and bias is None:
            merges.note_masked()
            return attend(q, k, v, heads, mask=mask, **kwargs)
        if merges.is_merged:
            outer = merges.outer_log_sizes(k.shape[-2], k)
            rest = (q, k, v, heads, kwargs)
            return _attend(func, theirs, bias, outer, merges.ops, merges.note_unweighted, *rest)
        flat_k = _flat(k, by_head)
        queries, keys = merges.call_plans(flat_k, tokens, called)
        if queries is None and keys is None:
            return attend(q, k, v, heads, mask=mask, **kwargs)
        log_sizes = None
        if keys is not None:
            # Queries may have more heads than keys.
            key_heads = k.shape[1] if by_head else heads
            k = _like(keys.merge_keys(flat_k, key_heads), k, by_head)
            # Keep only one flat copy in memory at a time.
            del flat_k
            v = _like(keys.merge_values(_flat(v, by_head)), v, by_head)
            log_sizes = merges.log_sizes(keys, k)
            bias = None if bias is None else _merged_keys(bias, keys, len(k))
        if queries is not None:
            q = _like(queries.merge(_flat(q, by_head)), q, by_head)
            bias = None if bias is None else _merged_queries(bias, queries, len(q))
        out = _attend(
            func,
            theirs,
            bias,
            log_sizes,
            merges.ops,
            merges.note_unweighted,
            q,
            k,
            v,
            heads,
            kwargs,
        )
        if queries is None:
            return out
        out_by_head = bool(kwargs.get("skip_output_reshape"))
        return _like(queries.unmerge(_flat(out, out_by_head)), out, out_by_head)

    return options | {_OVERRIDE: override}


def weigh_attention(
    options: dict[str, Any], log_sizes: Tensor, ops: Operations, note: Note
) -> dict[str, Any]:
    """Transformer options under which an attention adds ``log_sizes`` to its logits.

    Args:
        options: the transformer options before; another node's override in them stays in effect.
        log_sizes: ``[batch, keys]`` in the dtype of queries and keys.
        ops: the operations of the backend.
        note: called with None once the logits are weighed, or with the reason why they are not.
    """
    theirs = options.get(_OVERRIDE)

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
        if mask is not None or not _has_keys(k, log_sizes):
            note("another node changes how the attention is called")
            sizes = None
        return _attend(func, theirs, mask, sizes, ops, note, q, k, v, heads, kwargs)

    return options | {_OVERRIDE: override}


def _attend(
    func: Attention,
    theirs: Callable[..., Tensor] | None,
    bias: Tensor | None,
    log_sizes: Tensor | None,
    ops: Operations,
    note: Note,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    kwargs: dict[str, Any],
) -> Tensor:
    """Call the host's attention, through another node's override if there is one."""
    if log_sizes is not None:
        func = partial(_weighed, func, bias, log_sizes, ops, note)
        sizes = log_sizes[:, None, None]
        bias = sizes if bias is None else bias + sizes.to(bias.dtype)
    if theirs is None:
        return func(q, k, v, heads, mask=bias, **kwargs)
    if log_sizes is not None:
        note(None)
    return theirs(func, q, k, v, heads, mask=bias, **kwargs)


def _weighed(
    func: Attention,
    bias: Tensor | None,
    log_sizes: Tensor,
    ops: Operations,
    note: Note,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """``func`` with ``log_sizes`` added to its logits, in the way that is fastest for it.

    Queries, keys and values are in the host's layouts: ``[batch, tokens, heads * channels]``, or
    with ``skip_reshape`` ``[batch, heads, tokens, channels]``. ``bias`` is the mask without the
    sizes, and ``mask`` the one with them, unless the override that calls this passes another.
    """
    name = getattr(func, "__name__", "an unknown attention function")
    by_head = bool(kwargs.get("skip_reshape"))
    on_gpu = name == "attention_pytorch" and q.device.type == "cuda" and not by_head
    if not _has_keys(k, log_sizes):
        note("another node changes how the attention is called")
        return func(q, k, v, heads, mask=bias, **kwargs)
    if (name in _TAKE_CHANNELS or on_gpu) and bias is None and _same_heads(q, k, by_head):
        note(None)
        return _in_channels(func, log_sizes, ops, q, k, v, heads, **kwargs)
    if name in _TAKE_BIAS:
        note(None)
        return func(
            q, k, v, heads, mask=log_sizes[:, None, None] if mask is None else mask, **kwargs
        )
    note(f"{name} takes no weights")
    return func(q, k, v, heads, mask=bias, **kwargs)


def _in_channels(
    func: Attention,
    log_sizes: Tensor,
    ops: Operations,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Attention whose logits get ``log_sizes`` from extra channels of queries and keys.

    ``func`` divides the logits by the root of the head dimension, which is now larger. Queries are
    scaled to make up for it.
    """
    q, k, v = (_flat(x, skip_reshape) for x in (q, k, v))
    channels = q.shape[2] // heads
    wider = channels + FURTHER
    if "scale" in kwargs:
        scale, constant = 1.0, 1 / kwargs["scale"]
    else:
        scale, constant = (wider / channels) ** 0.5, wider**0.5
    q, k, v = ops.widen(q, k, v, log_sizes, heads, scale, constant)
    out = func(q, k, v, heads, **kwargs).unflatten(2, (heads, wider))[..., :channels]
    return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)


def _flat(x: Tensor, by_head: bool) -> Tensor:
    """``x`` as ``[batch, tokens, heads * channels]``, from any layout of the host."""
    if by_head:
        x = x.transpose(1, 2)
    # Values may be [batch, tokens, heads, channels] although queries and keys are flat.
    return x if x.ndim == 3 else x.flatten(2)


def _like(merged: Tensor, x: Tensor, by_head: bool) -> Tensor:
    """Undo :func:`_flat`: ``merged`` in the layout of ``x``."""
    return merged.unflatten(2, (x.shape[1], -1)).transpose(1, 2) if by_head else merged


def _has_keys(k: Tensor, log_sizes: Tensor) -> bool:
    """Whether there is a size for each key, in the host's layouts."""
    return (len(k), k.shape[-2]) == tuple(log_sizes.shape)


def _same_heads(q: Tensor, k: Tensor, by_head: bool) -> bool:
    return q.shape[1] == k.shape[1] if by_head else q.shape[2] == k.shape[2]


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
    rows = bias.expand(batch, -1, -1, -1).flatten(1, 2)
    merged = plan.merge(rows.mT).mT.clamp_min(torch.finfo(bias.dtype).min)
    return merged.unflatten(1, bias.shape[1:3])


def _merged_queries(bias: Tensor, plan: Plan, batch: int) -> Tensor:
    """A bias for the slots of the queries: the mean over the tokens of each."""
    if bias.shape[2] == 1:
        return bias
    columns = bias.expand(batch, -1, -1, -1).transpose(1, 2).flatten(2)
    merged = plan.merge(columns).clamp_min(torch.finfo(bias.dtype).min)
    return merged.unflatten(2, (bias.shape[1], bias.shape[3])).transpose(1, 2)
