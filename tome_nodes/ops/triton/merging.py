"""The means of slots, and the means stretched to the mean length of their tokens."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .launching import Launch, launch, wrap_triton
from .operators import operator
from .shared import (
    BLOCK_CHANNELS,
    BLOCK_ROWS,
    BLOCK_WARPS,
    capability,
    padded,
    require_heads,
    require_tokens,
)
from .window_merging import launch_of_windows, merge_windows, suits

# The most tokens of a slot that are loaded at once.
_MEMBERS = 8

# Where means are stretched: the most slots of a program, the most values that it loads at once (64
# a thread, and 32 of float32), and its warps.
_SLOTS_OF_KEYS, _VALUES_OF_KEYS = 16, 8192
_WARPS_OF_KEYS, _WARPS_OF_FLOAT32 = 4, 8


@triton.jit(do_not_specialize=("tokens", "slots"))
def merge_kernel(
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
    channels,
    HEAD_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The means of ``SLOTS`` slots in one head, and with ``KEYS`` also the stretched means.

    The grid is blocks of slots by heads of ``HEAD_CHANNELS``, padded to ``CHANNELS``, by samples.
    Lengths need all channels of a head; without ``KEYS``, a head is any group of channels.
    ``means`` and ``keys`` are contiguous. A sample has ``tokens`` tokens and ``slots`` slots.
    """
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    is_slot = slot < slots
    sample = tl.program_id(2).to(tl.int64)
    first_channel = tl.program_id(1) * HEAD_CHANNELS
    lane = tl.arange(0, CHANNELS)
    channel = first_channel + lane
    # The last group of channels may be smaller, if groups are not heads.
    is_channel = lane < tl.minimum(HEAD_CHANNELS, channels - first_channel)
    row = sample * slots + slot
    start = tl.load(offsets + row, mask=is_slot, other=0)
    end = tl.load(offsets + row + 1, mask=slot + 1 < slots, other=0)
    end = tl.where(slot + 1 < slots, end, (sample + 1) * tokens)
    size = tl.where(is_slot, end - start, 0)
    first_token = sample * tokens
    x += sample * stride_sample
    total = tl.zeros((SLOTS, CHANNELS), tl.float32)
    lengths = tl.zeros((SLOTS,), tl.float32)
    # Not a range: the interpreter of Triton 3.6 cannot take its bound from a tensor.
    most = tl.max(size)
    index = most * 0
    while index < most:
        # Several tokens of every slot at once, so that a large slot takes hardly longer.
        member = index + tl.arange(0, MEMBERS)[None, :]
        is_held = member < size[:, None]
        token = tl.load(order + start[:, None] + member, mask=is_held, other=first_token)
        token -= first_token
        values = tl.load(
            x + (token * stride_token)[:, :, None] + channel[None, None, :] * stride_channel,
            mask=is_held[:, :, None] & is_channel[None, None, :],
            other=0.0,
        ).to(tl.float32)
        total += tl.sum(values, axis=1)
        if KEYS:
            lengths += tl.sum(tl.sqrt(tl.sum(values * values, axis=2)), axis=1)
        index += MEMBERS
    count = tl.maximum(size, 1).to(tl.float32)
    mean = total / count[:, None]
    place = row[:, None] * channels + channel[None, :]
    mask = is_slot[:, None] & is_channel[None, :]
    tl.store(means + place, mean.to(means.dtype.element_ty), mask=mask)
    if KEYS:
        length = tl.maximum(tl.sqrt(tl.sum(mean * mean, axis=1)), 1e-6)
        key = mean * (lengths / count / length)[:, None]
        tl.store(keys + place, key.to(keys.dtype.element_ty), mask=mask)


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
    """The means of slots, summed in float32, as :func:`tome_nodes.ops.reference.merge`.

    ``x`` is of float32, float16 or bfloat16. In half precision with a ``window``,
    :func:`merge_windows` merges.
    """
    return _merge(x, slot_of_token, order, offsets, None, window)[0]


def _shapes_of_keys(x, slot_of_token, order, offsets, heads=1, window=None):
    means = _shapes(x, slot_of_token, order, offsets)
    return means, torch.empty_like(means)


@operator(_shapes_of_keys, reference.merge_keys)
def merge_keys(
    x: Tensor,
    slot_of_token: Tensor,
    order: Tensor,
    offsets: Tensor,
    heads: int = 1,
    window: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Means, plain and stretched, as :func:`tome_nodes.ops.reference.merge_keys`.

    Dtypes, sums and ``window`` are as in :func:`merge`.
    """
    return _merge(x, slot_of_token, order, offsets, heads, window)


def _merge(
    x: Tensor,
    slot_of_token: Tensor,
    order: Tensor,
    offsets: Tensor,
    heads: int | None,
    window: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """Means, and means stretched per head; without ``heads``, the means twice."""
    batch_slots = offsets.shape[0]
    held = None if window is None else tuple(window)
    compute_capability = capability(x.device)
    how, in_windows = _launch_of(compute_capability, x.shape, x.dtype, batch_slots, heads, held)
    batch, _, channels = x.shape
    means = torch.empty(batch, batch_slots // batch, channels, dtype=x.dtype, device=x.device)
    keys = means if heads is None else torch.empty_like(means)
    if in_windows:
        merge_windows(how, x, slot_of_token, means, keys)
    else:
        launch(wrap_triton(merge_kernel), how, (x, order, offsets, means, keys), x.stride())
    return means, keys


@lru_cache(maxsize=64)
def _launch_of(
    compute_capability: int,
    shape: torch.Size,
    dtype: torch.dtype,
    batch_slots: int,
    heads: int | None,
    window: tuple[int, int, int] | None,
) -> tuple[Launch, bool]:
    """How to launch the kernel for some tokens, and whether it is that of windows."""
    require_tokens(shape, dtype, "x")
    if heads is not None:
        require_heads(shape, heads, "x")
    batch, tokens, channels = shape
    slots = batch_slots // batch
    if window is not None and suits(compute_capability, shape, dtype, heads):
        return launch_of_windows(compute_capability, shape, slots, window, heads), True
    if heads is None:
        head_channels = lanes = BLOCK_CHANNELS
        members, at_once, warps = _MEMBERS, BLOCK_ROWS, BLOCK_WARPS
    else:
        head_channels = channels // heads
        lanes = padded(head_channels)
        members = max(1, min(_MEMBERS, _VALUES_OF_KEYS // lanes))
        at_once = max(1, min(_SLOTS_OF_KEYS, _VALUES_OF_KEYS // (members * lanes)))
        warps = _WARPS_OF_FLOAT32 if dtype == torch.float32 else _WARPS_OF_KEYS
    grid = -(-slots // at_once), -(-channels // head_channels), batch
    constants = head_channels, lanes, at_once, members, heads is not None
    return Launch(grid, (tokens, slots, channels, *constants), warps), False
