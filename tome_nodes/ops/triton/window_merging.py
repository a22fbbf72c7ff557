"""The means of slots that lie in windows, as one matrix product per window.

A window takes the same time however many tokens its slots hold. Tokens are summed in the order of
the picture, so sums do not depend on the order of a plan's list.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Launch, launch, wrap_triton
from .shared import HALF, has_fast_products, padded, token_outside_windows

# The channels of a program that stretches no means.
_GROUP = 64


@triton.jit
def _load_window(x, token, channel, inside, is_channel, stride_token, stride_channel):
    return tl.load(
        x + (token.to(tl.int64) * stride_token)[:, None] + channel[None, :] * stride_channel,
        mask=inside[:, None] & is_channel[None, :],
        other=0.0,
    )


@triton.jit
def _means_of_slots(
    x, token, channel, inside, is_channel, stride_token, stride_channel, holds, size
):
    """The tokens of a window, and the means of its slots; ``holds`` says which slot holds which."""
    values = _load_window(x, token, channel, inside, is_channel, stride_token, stride_channel)
    members = holds.to(tl.float32).to(values.dtype)
    return values, tl.dot(members, values) / size[:, None]


@triton.jit(
    do_not_specialize=(
        "tokens",
        "slots",
        "width",
        "down",
        "across",
        "windows_down",
        "windows_across",
        "slots_of_window",
        "pieces",
    )
)
def merge_windows_kernel(
    x,
    slot_of_token,
    means,
    keys,
    stride_sample,
    stride_token,
    stride_channel,
    tokens,
    slots,
    width,
    down,
    across,
    windows_down,
    windows_across,
    slots_of_window,
    pieces,
    ALL_CHANNELS: tl.constexpr,
    HEAD_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The means of some slots of a window in one head, and with ``KEYS`` also the stretched means.

    The grid has three sides. The first is windows, each in ``pieces`` pieces of ``SLOTS`` slots,
    followed by the tokens that fill no window, in pieces of ``SLOTS`` tokens. The others are heads
    of ``HEAD_CHANNELS`` channels, and samples. A window is ``down`` by ``across`` tokens, padded to
    ``TOKENS``; ``CHANNELS`` of a head are loaded at once. ``means`` and ``keys`` are contiguous.
    """
    program = tl.program_id(0)
    sample = tl.program_id(2).to(tl.int64)
    windows = windows_down * windows_across
    first_channel = tl.program_id(1) * HEAD_CHANNELS
    lane = tl.arange(0, CHANNELS)
    # The last group of channels may be smaller, if groups are not heads.
    channels = tl.minimum(HEAD_CHANNELS, ALL_CHANNELS - first_channel)
    own = tl.arange(0, SLOTS)
    x += sample * stride_sample + first_channel * stride_channel

    if program >= windows * pieces:
        index = (program - windows * pieces) * SLOTS + own
        token = token_outside_windows(index, width, windows_down * down, windows_across * across)
        left = index < tokens - windows * down * across
        row = (sample * slots + windows * slots_of_window + index) * ALL_CHANNELS + first_channel
        for first in range(0, HEAD_CHANNELS, CHANNELS):
            channel = first + lane
            is_channel = channel < channels
            values = _load_window(x, token, channel, left, is_channel, stride_token, stride_channel)
            place = row[:, None] + channel[None, :]
            mask = left[:, None] & is_channel[None, :]
            tl.store(means + place, values.to(means.dtype.element_ty), mask=mask)
            if KEYS:
                tl.store(keys + place, values.to(keys.dtype.element_ty), mask=mask)
        return

    window = program // pieces
    place = tl.arange(0, TOKENS)
    inside = place < down * across
    first_in_map = window // windows_across * down * width + window % windows_across * across
    token = first_in_map + place // across * width + place % across
    first_own = window * slots_of_window + program % pieces * SLOTS
    slot = tl.load(slot_of_token + sample * tokens + token, mask=inside, other=-1)
    slot = tl.where(inside, slot - sample * slots - first_own, -1)
    holds = slot[None, :] == own[:, None]
    size = tl.maximum(tl.sum(holds.to(tl.int32), axis=1), 1).to(tl.float32)
    is_own = program % pieces * SLOTS + own < slots_of_window
    row = (sample * slots + first_own + own) * ALL_CHANNELS + first_channel
    token_length = tl.zeros((TOKENS,), tl.float32)
    length = tl.zeros((SLOTS,), tl.float32)
    for first in range(0, HEAD_CHANNELS, CHANNELS):
        channel = first + lane
        is_channel = channel < channels
        values, mean = _means_of_slots(
            x, token, channel, inside, is_channel, stride_token, stride_channel, holds, size
        )
        mask = is_own[:, None] & is_channel[None, :]
        at = row[:, None] + channel[None, :]
        tl.store(means + at, mean.to(means.dtype.element_ty), mask=mask)
        if KEYS:
            wide = values.to(tl.float32)
            token_length += tl.sum(wide * wide, axis=1)
            length += tl.sum(mean * mean, axis=1)
    if KEYS:
        lengths = tl.sum(tl.where(holds, tl.sqrt(token_length)[None, :], 0.0), axis=1)
        stretch = lengths / size / tl.maximum(tl.sqrt(length), 1e-6)
        for first in range(0, HEAD_CHANNELS, CHANNELS):
            channel = first + lane
            is_channel = channel < channels
            _, mean = _means_of_slots(
                x, token, channel, inside, is_channel, stride_token, stride_channel, holds, size
            )
            mask = is_own[:, None] & is_channel[None, :]
            at = row[:, None] + channel[None, :]
            tl.store(keys + at, (mean * stretch[:, None]).to(keys.dtype.element_ty), mask=mask)


def _shape_of_program(
    compute_capability: int, has_keys: bool, channels: int
) -> tuple[int, int, int]:
    """Slots of a program, tokens times channels that it loads at once, and its warps.

    These are the fastest on an H200. No other GPU was measured. Other GPUs have too few registers
    for four warps, and AMD's have too few for as many slots.
    """
    if compute_capability == 0:
        return 32 if has_keys else 64, 8192, 8
    return 64, 8192 if has_keys else 16384, 4 if compute_capability == 90 and channels <= 128 else 8


def suits(
    compute_capability: int, shape: torch.Size, dtype: torch.dtype, heads: int | None
) -> bool:
    """Whether :func:`merge_windows` should merge tokens of this shape and dtype."""
    # Masks of padded channels take too many registers on some GPUs.
    is_whole = heads is None or shape[2] // heads % 16 == 0
    return is_whole and dtype in HALF and has_fast_products(compute_capability)


def launch_of_windows(
    compute_capability: int,
    shape: torch.Size,
    slots: int,
    window: tuple[int, int, int],
    heads: int | None,
) -> Launch:
    """How :func:`merge_windows` is launched for tokens ``[batch, tokens, channels]``.

    A sample has ``slots`` slots. For ``window``, see
    :attr:`tome_nodes.strategies.plan.Plan.window`; without ``heads``, nothing is stretched.
    """
    batch, tokens, channels = shape
    width, down, across = window
    windows_down, windows_across = tokens // width // down, width // across
    windows = windows_down * windows_across
    beside = tokens - windows * down * across
    slots_of_window = (slots - beside) // windows
    inside = padded(down * across)
    head_channels = channels // heads if heads else min(channels, _GROUP)
    most, values, warps = _shape_of_program(compute_capability, heads is not None, head_channels)
    pieces = -(-slots_of_window // most)
    programs = windows * pieces + -(-beside // most)
    numbers = tokens, slots, *window, windows_down, windows_across, slots_of_window, pieces
    at_once = min(padded(head_channels), max(16, values // inside))
    constants = channels, head_channels, at_once, most, inside, heads is not None
    grid = programs, -(-channels // head_channels), batch
    return Launch(grid, (*numbers, *constants), warps)


def merge_windows(
    how: Launch, x: Tensor, slot_of_token: Tensor, means: Tensor, keys: Tensor
) -> None:
    """Write the means of slots in windows, and the stretched means unless ``keys`` is ``means``.

    Args:
        how: from :func:`launch_of_windows`.
        x: ``[batch, tokens, channels]`` of float16 or bfloat16, any strides.
        slot_of_token: ``[batch, tokens]`` int64; slots are numbered window by window, followed by
            the tokens that fill no window.
        means: ``[batch, slots, channels]`` of the dtype of ``x``, contiguous.
        keys: the same for means stretched as by :func:`..reference.merge_keys`.
    """
    tensors = x, slot_of_token, means, keys
    launch(wrap_triton(merge_windows_kernel), how, tensors, x.stride())
