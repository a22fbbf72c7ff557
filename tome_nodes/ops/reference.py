"""The operations of a plan in plain torch, for any device.

A plan's arrays number tokens and slots over the whole batch: the tokens of sample ``b`` start at
``b * tokens``, and its slots at ``b * slots``.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

EXTRA_CHANNELS = 8
"""The number of channels that :func:`widen` adds to a head. Attention's fast path needs heads whose
channels are a multiple of this."""

# The mode of embedding_bag.
_MEAN = 1

# Devices on which embedding_bag sums a slot in a fixed order, without atomics.
_BAG_DEVICES = frozenset({"cpu", "cuda", "xpu"})


def merge(
    x: Tensor,
    slot_of_token: Tensor,
    order: Tensor,
    offsets: Tensor,
    window: Sequence[int] | None = None,
) -> Tensor:
    """The means of slots.

    Args:
        x: ``[batch, tokens, channels]``, any strides.
        slot_of_token: ``[batch, tokens]`` int64, the slot of each token.
        order: ``[batch * tokens]`` int64, tokens slot by slot.
        offsets: ``[batch * slots]`` int64, where the slots begin in ``order``.
        window: see :attr:`tome_nodes.strategies.plan.Plan.window`; not used here.

    Returns:
        ``[batch, slots, channels]`` of the dtype of ``x``, summed in float32 or better.
    """
    batch, _, channels = x.shape
    tokens = x.reshape(-1, channels)
    # Its gradients have no gradients themselves, and it has no forward mode.
    if x.device.type in _BAG_DEVICES and not torch.is_grad_enabled():
        # F.embedding_bag takes much longer to call.
        means = torch.embedding_bag(tokens, order, offsets, False, _MEAN)[0]
    else:
        wide = tokens.to(torch.promote_types(x.dtype, torch.float32))
        sizes = torch.diff(offsets, append=offsets.new_tensor([len(order)]))
        sums = wide.new_zeros(len(offsets), channels)
        sums = sums.index_add(0, slot_of_token.flatten(), wide)
        means = (sums / sizes[:, None]).to(x.dtype)
    return means.view(batch, -1, channels)


def merge_keys(
    x: Tensor,
    slot_of_token: Tensor,
    order: Tensor,
    offsets: Tensor,
    heads: int = 1,
    window: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The means of slots, and the means stretched, per head, to the mean length of their tokens.

    Args:
        x: ``[batch, tokens, heads * head_channels]``, any strides.
        slot_of_token: ``[batch, tokens]`` int64, the slot of each token.
        order: ``[batch * tokens]`` int64, tokens slot by slot.
        offsets: ``[batch * slots]`` int64, where the slots begin in ``order``.
        heads: number of heads, which are stretched separately.
        window: see :attr:`tome_nodes.strategies.plan.Plan.window`; not used here.

    Returns:
        Two ``[batch, slots, heads * head_channels]`` of the dtype of ``x``, as in :func:`merge`.
    """
    means = merge(x, slot_of_token, order, offsets)
    if heads == 1:
        lengths = merge(vector_norm(x, 2, 2, True), slot_of_token, order, offsets)
        return means, means * (lengths / vector_norm(means, 2, 2, True).clamp_min(1e-6))
    lengths = merge(vector_norm(x.unflatten(2, (heads, -1)), 2, 3), slot_of_token, order, offsets)
    by_head = means.unflatten(2, (heads, -1))
    stretch = lengths / vector_norm(by_head, 2, 3).clamp_min(1e-6)
    return means, (by_head * stretch[..., None]).flatten(2)


def unmerge(y: Tensor, slot_of_token: Tensor) -> Tensor:
    """Copy slots to their tokens: ``[batch, slots, channels]`` to ``[batch, tokens, channels]``.

    ``slot_of_token`` is ``[batch, tokens]`` int64, the slot of each token.
    """
    slots = y.reshape(-1, y.shape[2])
    return slots.index_select(0, slot_of_token.flatten()).view(*slot_of_token.shape, -1)


def add_change(x: Tensor, before: Tensor, after: Tensor, slot_of_token: Tensor) -> Tensor:
    """``x`` plus the change of each token's slot.

    Args:
        x: ``[batch, tokens, channels]``, any strides.
        before: ``[batch, slots, channels]`` of the same dtype.
        after: the same after the change.
        slot_of_token: ``[batch, tokens]`` int64, the slot of each token.

    Returns:
        ``[batch, tokens, channels]``, ``x + unmerge(after - before)``.
    """
    return x + unmerge(after - before, slot_of_token)


def widen(
    q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor, heads: int, scale: float, constant: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add channels to every head so that a logit gains ``constant`` times a log size.

    Args:
        q: ``[batch, queries, heads * channels]``, multiplied by ``scale``. The added channels hold
            ``constant``.
        k: ``[batch, keys, heads * channels]``. The first added channel holds ``log_sizes``, the
            others 0.
        v: the same shape as ``k``. The added channels hold 0.
        log_sizes: ``[batch, keys]`` of the dtype of ``k``.
        heads: number of heads.
        scale: factor for the channels of the queries.
        constant: see ``q``.

    Returns:
        ``q``, ``k`` and ``v`` with :data:`EXTRA_CHANNELS` more channels in every head.
    """
    q, k, v = (x.unflatten(2, (heads, -1)) for x in (q, k, v))
    logs = log_sizes[:, :, None, None].expand(-1, -1, heads, 1)
    q = F.pad(q * scale, (0, EXTRA_CHANNELS), value=constant)
    k = F.pad(torch.cat([k, logs], 3), (0, EXTRA_CHANNELS - 1))
    return q.flatten(2), k.flatten(2), F.pad(v, (0, EXTRA_CHANNELS)).flatten(2)
