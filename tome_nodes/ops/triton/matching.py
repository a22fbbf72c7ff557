"""Matching within windows: from the features of tokens to the arrays of a plan."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Launch, launch, wrap_triton
from .operators import operator
from .shared import capability, has_fast_products, padded, require_tokens, token_outside_windows

# The pairs of token and cell that a warp matches: each value of a pair takes 32 registers a thread.
_PAIRS_OF_A_WARP = 1024

# The fewest channels that are loaded in larger groups.
_MANY = 48

# Warps of a program, and channels loaded at once. Registers suffice on every GPU: warps of AMD's
# data centre GPUs have twice as many threads, and elsewhere float32 does not use tensor cores.
_WARPS, _WARPS_OF_FLOAT32 = 8, 16
_CHANNELS, _FEW_CHANNELS = 32, 16


@triton.jit
def _scramble(bits):
    """:func:`tome_nodes.ops.random_picks.scramble` of uint32 values."""
    # Literals, since Triton compares the globals that a kernel reads at every launch.
    bits = (bits ^ (bits >> 16)) * tl.full((), 0x7C3A95D3, tl.uint32)
    bits = (bits ^ (bits >> 16)) * tl.full((), 0x5D1B6E4B, tl.uint32)
    bits = (bits ^ (bits >> 16)) * tl.full((), 0x6A09E667, tl.uint32)
    return bits ^ (bits >> 15)


@triton.jit
def _pick(stream, cell, CHOICES: tl.constexpr, RANDOM: tl.constexpr):
    """:func:`tome_nodes.ops.random_picks.pick_per_cell` for some cells; 0 if not random."""
    if RANDOM:
        bits = _scramble(stream + cell.to(tl.uint32))
        return ((bits.to(tl.uint64) * CHOICES) >> 32).to(tl.int32)
    else:
        return cell * 0


@triton.jit
def _rank(x):
    """Map float32 to int32, keeping the order; there must be no NaN."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _greatest_reached(rank, quota):
    """The greatest int32 that at least ``quota`` values of ``rank`` reach, found bit by bit."""
    enough = tl.sum((rank >= 0).to(tl.int32)) >= quota
    greatest = tl.where(enough, 0, -0x80000000).to(tl.int32)
    for index in range(31):
        candidate = greatest + (1 << (30 - index))
        enough = tl.sum((rank >= candidate).to(tl.int32)) >= quota
        greatest = tl.where(enough, candidate, greatest)
    return greatest


@triton.jit
def _dst_place(pick, row, column, across, SY: tl.constexpr, SX: tl.constexpr):
    """The place in the window of the dst of the cell at ``row`` and ``column``."""
    return (row * SY + pick // SX) * across + column * SX + pick % SX


@triton.jit
def _load_channels(
    tokens, inside, first, stride_channel, CHANNELS: tl.constexpr, ALL_CHANNELS: tl.constexpr
):
    """Channels from ``first`` on of the tokens that ``tokens`` points at; 0 past the last."""
    channel = first + tl.arange(0, CHANNELS)
    mask = inside[:, None] & (channel < ALL_CHANNELS)[None, :]
    return tl.load(tokens + channel[None, :] * stride_channel, mask=mask, other=0.0)


@triton.jit(
    do_not_specialize=(
        "tokens",
        "width",
        "cells_down",
        "cells_across",
        "windows_down",
        "windows_across",
        "high",
        "wide",
        "quota",
    )
)
def match_windows_kernel(
    features,
    key,
    slot_of_token,
    order,
    offsets,
    log_sizes,
    stride_sample,
    stride_token,
    stride_channel,
    tokens,
    width,
    cells_down,
    cells_across,
    windows_down,
    windows_across,
    high,
    wide,
    quota,
    SY: tl.constexpr,
    SX: tl.constexpr,
    RANDOM: tl.constexpr,
    TOKENS: tl.constexpr,
    CELLS: tl.constexpr,
    ALL_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDENS: tl.constexpr,
):
    """Match the tokens of one window of one sample, and write its part of the plan.

    The grid is windows, followed by pieces of the tokens that fill no window, by samples. A window
    is ``high`` by ``wide`` cells of ``SY`` by ``SX`` tokens, padded to ``TOKENS`` tokens and
    ``CELLS`` cells. ``CHANNELS`` of ``ALL_CHANNELS`` channels are loaded at once, and with
    ``WIDENS`` multiplied in float32. Every window merges ``quota`` tokens, so a program knows
    where the slots of its window and its part of ``order`` begin.
    """
    across = wide * SX
    down = high * SY
    size_of_window = down * across
    program = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    windows = windows_down * windows_across
    slots = tokens - windows * quota
    first_token = sample * tokens
    first_slot = sample * slots
    place = tl.arange(0, TOKENS)

    if program >= windows:
        index = (program - windows) * TOKENS + place
        token = token_outside_windows(index, width, windows_down * down, windows_across * across)
        left = index < tokens - windows * size_of_window
        slot = first_slot + windows * (size_of_window - quota) + index
        offset = first_token + windows * size_of_window + index
        tl.store(slot_of_token + first_token + token, slot, mask=left)
        tl.store(order + offset, first_token + token, mask=left)
        tl.store(offsets + slot, offset, mask=left)
        tl.store(log_sizes + slot, tl.zeros((TOKENS,), log_sizes.dtype.element_ty), mask=left)
        return

    window_row = program // windows_across
    window_column = program % windows_across
    # A place is a number within the window, row by row; a token is a number within the map.
    inside = place < size_of_window
    row = place // across
    column = place % across
    first_in_map = window_row * down * width + window_column * across
    token = first_in_map + row * width + column

    cell = tl.arange(0, CELLS)
    is_cell = cell < high * wide
    cell_row = cell // wide
    cell_column = cell % wide
    first_cell = window_row * high * cells_across + window_column * wide

    if RANDOM:
        # Not ``.to``: for torch.compile, these may be constants.
        shape = (tl.cast(cells_down, tl.uint32) << 16) ^ tl.cast(cells_across, tl.uint32)
        stream = _scramble(tl.load(key).to(tl.uint32) ^ _scramble(shape))
    else:
        stream = 0
    in_cells = first_cell + row // SY * cells_across + column // SX
    is_dst = (row % SY) * SX + column % SX == _pick(stream, in_cells, SY * SX, RANDOM)
    pick = _pick(stream, first_cell + cell_row * cells_across + cell_column, SY * SX, RANDOM)
    dst = _dst_place(pick, cell_row, cell_column, across, SY, SX)
    dst_token = first_in_map + dst // across * width + dst % across

    map_start = features + sample * stride_sample
    products = tl.zeros((CELLS, TOKENS), tl.float32)
    token_norm = tl.zeros((TOKENS,), tl.float32)
    dst_norm = tl.zeros((CELLS,), tl.float32)
    tokens_of_window = map_start + token[:, None] * stride_token
    dst_of_window = map_start + dst_token[:, None] * stride_token
    x = _load_channels(tokens_of_window, inside, 0, stride_channel, CHANNELS, ALL_CHANNELS)
    y = _load_channels(dst_of_window, is_cell, 0, stride_channel, CHANNELS, ALL_CHANNELS)
    # Load the next channels while these are multiplied. Triton would pipeline loads by itself, but
    # loads for more than a product would go to shared memory with bank conflicts.
    for first in range(CHANNELS, ALL_CHANNELS + CHANNELS, CHANNELS):
        next_x = _load_channels(
            tokens_of_window, inside, first, stride_channel, CHANNELS, ALL_CHANNELS
        )
        next_y = _load_channels(
            dst_of_window, is_cell, first, stride_channel, CHANNELS, ALL_CHANNELS
        )
        if WIDENS:
            x, y = x.to(tl.float32), y.to(tl.float32)
        products += tl.dot(y, tl.trans(x), input_precision="ieee")
        token_norm += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        dst_norm += tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
        x, y = next_x, next_y
    similarity = products / tl.sqrt(tl.maximum(dst_norm, 1e-24))[:, None]
    similarity = similarity / tl.sqrt(tl.maximum(token_norm, 1e-24))[None, :]
    # NaN ranks last among the src tokens, so that exactly the quota merges in any case.
    similarity = tl.where(similarity == similarity, similarity, -2.0)
    similarity = tl.where(is_cell[:, None], similarity, float("-inf"))
    best, nearest = tl.max(similarity, axis=0, return_indices=True)

    is_src = inside & (is_dst == 0)
    rank = _rank(tl.where(is_src, best, float("-inf")))
    least = _greatest_reached(rank, quota)
    # Among tokens exactly as similar as the last one that merges, the first in the window merge.
    level = rank == least
    ahead = quota - tl.sum((rank > least).to(tl.int32))
    merged = is_src & ((rank > least) | (level & (tl.cumsum(level.to(tl.int32), 0) <= ahead)))

    # Slots are in the order of the tokens that stay. Tokens of a slot are in the order of the
    # window.
    row, column = nearest // wide, nearest % wide
    pick = _pick(stream, first_cell + row * cells_across + column, SY * SX, RANDOM)
    owner = tl.where(merged, _dst_place(pick, row, column, across, SY, SX), place)
    stays = (inside & (merged == 0)).to(tl.int32)
    slot = tl.gather(tl.cumsum(stays, 0) - stays, owner, 0)
    size = tl.histogram(tl.where(inside, slot, place), TOKENS)
    offset = tl.cumsum(size, 0) - size
    member = tl.sort(tl.where(inside, slot, TOKENS) * TOKENS + place) % TOKENS
    member_token = first_in_map + member // across * width + member % across

    slots_of_window = size_of_window - quota
    window_slot = first_slot + program * slots_of_window
    window_offset = first_token + program * size_of_window
    tl.store(slot_of_token + first_token + token, window_slot + slot, mask=inside)
    tl.store(order + window_offset + place, first_token + member_token, mask=inside)
    is_slot = place < slots_of_window
    tl.store(offsets + window_slot + place, window_offset + offset, mask=is_slot)
    logarithm = tl.log(tl.maximum(size, 1).to(tl.float32)).to(log_sizes.dtype.element_ty)
    tl.store(log_sizes + window_slot + place, logarithm, mask=is_slot)


def _shapes(features, key, height, width, sy, sx, high, wide, quota):
    batch, tokens, _ = features.shape
    slots = tokens - (height // sy // high) * (width // sx // wide) * quota
    return (
        features.new_empty(batch, tokens, dtype=torch.int64),
        features.new_empty(batch * tokens, dtype=torch.int64),
        features.new_empty(batch * slots, dtype=torch.int64),
        features.new_empty(batch, slots),
    )


@operator(_shapes)
def match_windows(
    features: Tensor,
    key: Tensor | None,
    height: int,
    width: int,
    sy: int,
    sx: int,
    high: int,
    wide: int,
    quota: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In windows, merge the ``quota`` src tokens most similar to a dst into their nearest dst.

    Groups as :func:`tome_nodes.strategies.window.match_windows` does with the picks of
    :func:`tome_nodes.ops.random_picks.pick_per_cell`. Slots are numbered window by window.

    Args:
        features: ``[batch, height * width, channels]`` of float32, float16 or bfloat16, any
            strides, compared by cosine similarity.
        key: scalar int64 key of the random picks, None for the top left token of every cell.
        height: height of the grid in tokens.
        width: width of the grid in tokens.
        sy: height of a cell in tokens.
        sx: width of a cell in tokens.
        high: height of a window in cells.
        wide: width of a window in cells.
        quota: merges in a window, at most its tokens minus its cells.

    Returns:
        The arrays of a :class:`tome_nodes.strategies.plan.Plan`:
        ``slot_of_token``: ``[batch, tokens]`` int64, the slot of each token.
        ``order``: ``[batch * tokens]`` int64, tokens slot by slot.
        ``offsets``: ``[batch * slots]`` int64, where the slots begin in ``order``.
        ``log_sizes``: ``[batch, slots]``, of the features' dtype, as attention takes it; the
        logarithm of how many tokens a slot holds.
    """
    cut = height, width, sy, sx, high, wide, quota
    compute_capability = capability(features.device)
    how = _launch_of(compute_capability, features.shape, features.dtype, key is not None, cut)
    slot_of_token, order, offsets, log_sizes = _shapes(features, key, *cut)
    tensors = features, key, slot_of_token, order, offsets, log_sizes
    launch(wrap_triton(match_windows_kernel), how, tensors, features.stride())
    return slot_of_token, order, offsets, log_sizes


@lru_cache(maxsize=64)
def _launch_of(
    compute_capability: int,
    shape: torch.Size,
    dtype: torch.dtype,
    is_random: bool,
    cut: tuple[int, ...],
) -> Launch:
    """How the kernel is launched for features of this shape and dtype.

    ``cut`` is the arguments of the launcher from ``height`` to ``quota``.
    """
    require_tokens(shape, dtype, "features")
    batch, tokens, channels = shape
    is_float32 = dtype == torch.float32
    height, width, sy, sx, high, wide, quota = cut
    down, across = height // sy // high, width // sx // wide
    inside = high * sy * wide * sx
    block, cells = padded(inside), padded(high * wide)
    left_over = -(-(tokens - down * across * inside) // block)
    cells_down, cells_across = height // sy, width // sx
    numbers = tokens, width, cells_down, cells_across, down, across, high, wide, quota
    at_once = _FEW_CHANNELS if is_float32 or channels < _MANY else _CHANNELS
    # Without tensor cores, products of half precision are less exact.
    widens = not has_fast_products(compute_capability)
    constants = sy, sx, is_random, block, cells, channels, at_once, widens
    # Products of widened values need twice as many registers.
    pairs = _PAIRS_OF_A_WARP // 2 if widens else _PAIRS_OF_A_WARP
    most_warps = _WARPS_OF_FLOAT32 if is_float32 or widens else _WARPS
    warps = min(most_warps, max(4, block * cells // pairs))
    return Launch((down * across + left_over, batch, 1), (*numbers, *constants), warps)
