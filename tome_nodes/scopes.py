"""What runs on merged tokens: a module is called on the slots of a plan, its result is unmerged."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .plan import Plan


def on_merged(
    module: Callable[..., Tensor], plan: Plan, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Run a module whose only grid tokens are ``x``: cross-attention or a feed-forward network.

    Args:
        module: maps ``[batch, slots, channels]`` to ``[batch, slots, channels]``.
        plan: a plan that fits ``x``.
        x: ``[batch, tokens, channels]``.
        args: passed on.
        kwargs: passed on.

    Returns:
        ``[batch, tokens, channels]``.
    """
    return plan.unmerge(module(plan.merge(x), *args, **kwargs))


def change_on_merged(
    block: Callable[..., Tensor], plan: Plan, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Run a residual block on merged tokens and add its change to all tokens.

    The change, not the result, is unmerged, so what ``x`` holds beyond the mean of its slot stays.

    Args:
        block: maps ``[batch, slots, channels]`` to ``[batch, slots, channels]``.
        plan: a plan that fits ``x``.
        x: ``[batch, tokens, channels]``.
        args: passed on.
        kwargs: passed on.

    Returns:
        ``[batch, tokens, channels]``.
    """
    merged = plan.merge(x)
    return plan.add_change(x, merged, block(merged, *args, **kwargs))


def self_attention_on_merged(
    attention: Callable[..., Tensor],
    plan: Plan,
    x: Tensor,
    context: Tensor | None = None,
    value: Tensor | None = None,
    attn_tokens: str = "q,k,v",
    **kwargs: Any,
) -> Tensor:
    """Run self-attention with queries, keys and values merged by the same plan (paper, section 4).

    Args:
        attention: called with ``x``, ``context`` and ``value`` as the host's attention is.
        plan: a plan that fits ``x``.
        x: ``[batch, tokens, channels]``, the source of the queries.
        context: source of the keys, ``x`` if None.
        value: source of the values, the source of the keys if None.
        attn_tokens: which of them to merge: ``q,k,v``, ``q`` or ``k,v``.
        kwargs: passed on.

    Returns:
        ``[batch, tokens, channels]``. Where other code gave keys or values that are not the grid,
        they are not merged.
    """
    foreign = not all(source is None or plan.fits(source) for source in (context, value))
    if foreign and attn_tokens == "k,v":
        return attention(x, context=context, value=value, **kwargs)
    if attn_tokens == "q" and context is None:
        context = x
    if foreign or attn_tokens == "q":
        return on_merged(attention, plan, x, context=context, value=value, **kwargs)
    merged = plan.merge(x)
    keys = merged if context is None or context is x else plan.merge(context)
    values = keys if value is None or value is context else plan.merge(value)
    if attn_tokens == "k,v":
        return attention(x, context=keys, value=values, **kwargs)
    return plan.unmerge(attention(merged, context=keys, value=values, **kwargs))
