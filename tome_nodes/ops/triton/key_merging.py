"""The mean of each slot, and that mean stretched to the mean length of its tokens."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .shared import load_of_slots, operator, padded, require_tokens, slot_extent, strides
from .window_merging import merge_windows, suits

# The most slots of a program, tokens of each that are loaded at once, and values of all of them:
# 64 a thread.
_SLOTS, _MEMBERS, _VALUES, _WARPS = 16, 8, 8192, 4


@triton.jit(do_not_specialize=("tokens", "slots"))
def merge_keys_kernel(
    x,
    order,
    offsets,
    means,
    keys,
    stride_sample,
    stride_token,
    stride_channel,
    tokens,
    slots,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """One head of the mean of ``SLOTS`` slots, and that mean stretched.

    The grid is blocks of slots by heads by samples. ``HEAD_CHANNELS`` are padded to ``PADDED``,
    because a length needs all of them. ``means`` and ``keys`` are contiguous. There are ``tokens``
    and ``slots`` in each sample.
    """
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    lane = tl.arange(0, PADDED)
    channel = tl.program_id(1) * HEAD_CHANNELS + lane
    sample = tl.program_id(2).to(tl.int64)
    is_channel = lane < HEAD_CHANNELS
    start, size = slot_extent(offsets, slot, slots, sample, tokens)
    first = sample * tokens
    x += sample * stride_sample
    total = tl.zeros((SLOTS, PADDED), tl.float32)
    lengths = tl.zeros((SLOTS,), tl.float32)
    # Not a range: the interpreter of Triton 3.6 cannot take its bound from a tensor.
    most = tl.max(size)
    index = most * 0
    while index < most:
        values = load_of_slots(
            x,
            order,
            start,
            size,
            index,
            first,
            channel,
            is_channel,
            stride_token,
            stride_channel,
            MEMBERS,
        )
        total += tl.sum(values, axis=1)
        lengths += tl.sum(tl.sqrt(tl.sum(values * values, axis=2)), axis=1)
        index += MEMBERS
    count = tl.maximum(size, 1).to(tl.float32)
    mean = total / count[:, None]
    length = tl.maximum(tl.sqrt(tl.sum(mean * mean, axis=1)), 1e-6)
    place = (sample * slots + slot)[:, None] * (HEADS * HEAD_CHANNELS) + channel[None, :]
    mask = (slot < slots)[:, None] & is_channel[None, :]
    tl.store(means + place, mean.to(means.dtype.element_ty), mask=mask)
    key = mean * (lengths / count / length)[:, None]
    tl.store(keys + place, key.to(keys.dtype.element_ty), mask=mask)


def _shapes(x, slot_of_token, order, offsets, heads=1, window=None):
    shape = x.shape[0], offsets.shape[0] // x.shape[0], x.shape[2]
    return x.new_empty(shape), x.new_empty(shape)


@operator(_shapes, reference.merge_keys)
def merge_keys(
    x: Tensor,
    slot_of_token: Tensor,
    order: Tensor,
    offsets: Tensor,
    heads: int = 1,
    window: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Means, plain and stretched; see :func:`tome_nodes.ops.reference.merge_keys`.

    Args:
        x: ``[batch, tokens, heads * head_channels]`` of float32, float16 or bfloat16, any strides.
        slot_of_token: ``[batch, tokens]`` int64, the slot of each token.
        order: ``[batch * tokens]`` int64, tokens slot by slot.
        offsets: ``[batch * slots]`` int64, where each slot begins in ``order``.
        heads: number of heads; each is stretched separately.
        window: see :attr:`tome_nodes.merging.plan.SlotPlan.window`; in half precision the tokens
            of a window are then summed together.

    Returns:
        Two ``[batch, slots, heads * head_channels]`` of the dtype of ``x``, summed in float32.
    """
    require_tokens(x, "x")
    batch, tokens, channels = x.shape
    if channels % heads:
        raise ValueError(f"x has {channels} channels, which {heads} heads cannot share evenly")
    slots = len(offsets) // batch
    if window is not None and suits(x, heads):
        return merge_windows(x, slot_of_token, slots, window, heads)
    shape = batch, slots, channels
    means, keys = (torch.empty(shape, dtype=x.dtype, device=x.device) for _ in range(2))
    head_channels = channels // heads
    lanes = padded(head_channels)
    members = max(1, min(_MEMBERS, _VALUES // lanes))
    at_once = max(1, min(_SLOTS, _VALUES // (members * lanes)))
    with torch.cuda.device_of(x):
        merge_keys_kernel[(-(-slots // at_once), heads, batch)](
            x=x,
            order=order,
            offsets=offsets,
            means=means,
            keys=keys,
            **strides(x),
            tokens=tokens,
            slots=slots,
            SLOTS=at_once,
            HEADS=heads,
            HEAD_CHANNELS=head_channels,
            PADDED=lanes,
            MEMBERS=members,
            num_warps=_WARPS,
        )
    return means, keys
