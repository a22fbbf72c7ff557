"""Run a module or a block on merged tokens, which are the slots of a plan."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..merging.plan import Plan


def module_on_merged(
    module: Callable[..., Tensor], plan: Plan, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Run a module whose only merged tokens are ``x``: cross-attention or a feed-forward network.

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


def block_on_merged(
    block: Callable[..., Tensor], plan: Plan, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Run a residual block on merged tokens and add its change to all tokens.

    The change is unmerged, not the result, so each token keeps its difference from the mean of its
    slot.

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


def attention_on_merged(
    attention: Callable[..., Tensor],
    queries: Plan | None,
    keys: Plan | None,
    weigh: Callable[[Plan, Tensor, dict[str, Any]], dict[str, Any]] | None,
    x: Tensor,
    context: Tensor | None = None,
    value: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run self-attention on merged tokens, which are merged before its projections (section 4).

    Args:
        attention: called with ``x``, ``context`` and ``value``, like the host's attention.
        queries: a plan that fits ``x``; None leaves the queries as they are.
        keys: the same for keys and values.
        weigh: takes the plan of the keys, their source and ``kwargs``; returns keyword arguments
            that make the attention count each key once for every token it stands for. None is the
            paper's attention: keys are means and count once.
        x: ``[batch, tokens, channels]``, the source of the queries.
        context: the source of the keys, ``x`` if None.
        value: the source of the values, that of the keys if None.
        kwargs: passed on.

    Returns:
        ``[batch, tokens, channels]``. Keys and values from a source that the plan does not fit are
        not merged.
    """
    if keys is not None and not all(
        source is None or keys.fits(source) for source in (context, value)
    ):
        keys = None
    own_keys = context is None or context is x
    own_value = None if value is context else value
    tokens = x if context is None else context
    merged = x if queries is None else None
    if keys is None:
        context = tokens
    else:
        if weigh is None:
            means = context = values = keys.merge(tokens)
        else:
            means, context, values = keys.merge_inputs(tokens)
            kwargs = weigh(keys, tokens, kwargs)
        value = values if own_value is None else keys.merge(own_value)
        if own_keys and keys is queries:
            merged = means
    if merged is None:
        assert queries is not None
        merged = queries.merge(x)
    result = attention(merged, context=context, value=value, **kwargs)
    return result if queries is None else queries.unmerge(result)
