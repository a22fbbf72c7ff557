"""The mean of each slot."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .shared import (
    BLOCK_CHANNELS,
    BLOCK_ROWS,
    BLOCK_WARPS,
    load_of_slots,
    operator,
    require_tokens,
    slot_extent,
    strides,
)
from .window_merging import merge_windows, suits

# Tokens of a slot that are loaded at once: 64 values a thread.
_MEMBERS = 8


@triton.jit(do_not_specialize=("tokens", "slots"))
def merge_kernel(
    x,
    order,
    offsets,
    means,
    stride_sample,
    stride_token,
    stride_channel,
    tokens,
    channels,
    slots,
    SLOTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """The mean of ``SLOTS`` slots in ``CHANNELS`` channels, summed in float32.

    The grid is blocks of slots by blocks of channels by samples. ``means`` is contiguous. There are
    ``tokens`` and ``slots`` in each sample.
    """
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sample = tl.program_id(2).to(tl.int64)
    is_channel = channel < channels
    start, size = slot_extent(offsets, slot, slots, sample, tokens)
    first = sample * tokens
    x += sample * stride_sample
    total = tl.zeros((SLOTS, CHANNELS), tl.float32)
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
        index += MEMBERS
    mean = total / tl.maximum(size, 1).to(tl.float32)[:, None]
    tl.store(
        means + (sample * slots + slot)[:, None] * channels + channel[None, :],
        mean.to(means.dtype.element_ty),
        mask=(slot < slots)[:, None] & is_channel[None, :],
    )


def _shapes(x, slot_of_token, order, offsets, window=None):
    return x.new_empty(x.shape[0], offsets.shape[0] // x.shape[0], x.shape[2])


@operator(_shapes, reference.merge)
def merge(
    x: Tensor,
    slot_of_token: Tensor,
    order: Tensor,
    offsets: Tensor,
    window: Sequence[int] | None = None,
) -> Tensor:
    """The mean of each slot; see :func:`tome_nodes.ops.reference.merge`.

    Args:
        x: ``[batch, tokens, channels]`` of float32, float16 or bfloat16, any strides.
        slot_of_token: ``[batch, tokens]`` int64, the slot of each token.
        order: ``[batch * tokens]`` int64, tokens slot by slot.
        offsets: ``[batch * slots]`` int64, where each slot begins in ``order``.
        window: see :attr:`tome_nodes.merging.plan.SlotPlan.window`; in half precision the tokens
            of a window are then summed together.

    Returns:
        ``[batch, slots, channels]`` of the dtype of ``x``, summed in float32.
    """
    require_tokens(x, "x")
    batch, tokens, channels = x.shape
    slots = len(offsets) // batch
    if window is not None and suits(x):
        return merge_windows(x, slot_of_token, slots, window)[0]
    means = torch.empty(batch, slots, channels, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        merge_kernel[(-(-slots // BLOCK_ROWS), -(-channels // BLOCK_CHANNELS), batch)](
            x=x,
            order=order,
            offsets=offsets,
            means=means,
            **strides(x),
            tokens=tokens,
            channels=channels,
            slots=slots,
            SLOTS=BLOCK_ROWS,
            CHANNELS=BLOCK_CHANNELS,
            MEMBERS=_MEMBERS,
            num_warps=BLOCK_WARPS,
        )
    return means
