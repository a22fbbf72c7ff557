"""The operations of a plan in plain torch, for any device.

A plan's arrays count tokens and slots over the whole batch: sample b's tokens are ``b * tokens``
and on, its slots ``b * slots`` and on.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

FURTHER = 8
"""Channels that :func:`widen` adds: attention's fast path wants heads of a multiple of this."""

# Devices whose embedding_bag sums each slot in a fixed order, without atomics.
_BAG_DEVICES = frozenset({"cpu", "cuda", "xpu"})


def merge(x: Tensor, rows: Tensor, members: Tensor, starts: Tensor) -> Tensor:
    """The mean of each slot.

    Args:
        x: ``[batch, tokens, channels]``, any strides.
        rows: ``[batch, tokens]`` int64, the slot of each token.
        members: ``[batch * tokens]`` int64, tokens slot by slot.
        starts: ``[batch * slots]`` int64, where each slot begins in ``members``.

    Returns:
        ``[batch, slots, channels]`` of the dtype of ``x``, added up in float32 at least.
    """
    batch, _, channels = x.shape
    tokens = x.reshape(-1, channels)
    if x.device.type in _BAG_DEVICES:
        means = F.embedding_bag(members, tokens, starts, mode="mean")
    else:
        sums = tokens.new_zeros(len(starts), channels, dtype=torch.float32)
        sizes = torch.diff(starts, append=starts.new_tensor([len(members)]))
        sums.index_add_(0, rows.flatten(), tokens.float())
        means = (sums / sizes[:, None]).to(x.dtype)
    return means.view(batch, -1, channels)


def merge_keys(x: Tensor, rows: Tensor, members: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each slot, and the same stretched to the mean length of its tokens.

    It takes what :func:`merge` takes, and gives two of what that gives.
    """
    means = merge(x, rows, members, starts)
    lengths = merge(x.norm(dim=2, keepdim=True), rows, members, starts)
    return means, means * (lengths / means.norm(dim=2, keepdim=True).clamp_min(1e-6))


def unmerge(y: Tensor, rows: Tensor) -> Tensor:
    """Each token's slot: ``[batch, slots, channels]`` to ``[batch, tokens, channels]``.

    ``rows`` is ``[batch, tokens]`` int64, the slot of each token.
    """
    channels = y.shape[2]
    return y.reshape(-1, channels).index_select(0, rows.flatten()).view(*rows.shape, channels)


def add_change(x: Tensor, before: Tensor, after: Tensor, rows: Tensor) -> Tensor:
    """``x`` and what changed in the slot of each token.

    Args:
        x: ``[batch, tokens, channels]``, any strides.
        before: ``[batch, slots, channels]`` of the same dtype.
        after: the same, some change later.
        rows: ``[batch, tokens]`` int64, the slot of each token.

    Returns:
        ``[batch, tokens, channels]``, ``x + unmerge(after - before)``.
    """
    return x + unmerge(after - before, rows)


def widen(
    q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor, heads: int, scale: float, constant: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads with further channels through which each logit gains ``constant`` times a log size.

    Args:
        q: ``[batch, queries, heads * channels]``; scaled by ``scale``, ``constant`` in the further
            channels.
        k: ``[batch, keys, heads * channels]``; ``log_sizes`` in the first further channel.
        v: the same; the further channels are 0.
        log_sizes: ``[batch, keys]`` of the dtype of ``k``.
        heads: number of heads.
        scale: for the channels of the queries.
        constant: see ``q``.

    Returns:
        The three with :data:`FURTHER` more channels in each head.
    """
    q, k, v = (x.unflatten(2, (heads, -1)) for x in (q, k, v))
    logs = log_sizes[:, :, None, None].expand(-1, -1, heads, 1)
    q = F.pad(q * scale, (0, FURTHER), value=constant)
    k = F.pad(torch.cat([k, logs], 3), (0, FURTHER - 1))
    return q.flatten(2), k.flatten(2), F.pad(v, (0, FURTHER)).flatten(2)
