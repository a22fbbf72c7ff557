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


def self_attention_on_merged(
    attention: Callable[..., Tensor],
    plan: Plan,
    x: Tensor,
    context: Tensor | None = None,
    value: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run self-attention with queries, keys and values merged by the same plan (paper, section 4).

    Args:
        attention: called with ``x``, ``context`` and ``value`` as the host's attention is.
        plan: a plan that fits ``x``.
        x: ``[batch, tokens, channels]``, the source of the queries.
        context: source of the keys, ``x`` if None.
        value: source of the values, the source of the keys if None.
        kwargs: passed on.

    Returns:
        ``[batch, tokens, channels]``. Where other code gave keys or values that are not the grid,
        only the queries are merged.
    """
    if not all(source is None or plan.fits(source) for source in (context, value)):
        return on_merged(attention, plan, x, context=context, value=value, **kwargs)
    queries = plan.merge(x)
    keys = queries if context is x else _merged(plan, context)
    values = keys if value is context else _merged(plan, value)
    return plan.unmerge(attention(queries, context=keys, value=values, **kwargs))


def _merged(plan: Plan, source: Tensor | None) -> Tensor | None:
    return None if source is None else plan.merge(source)
