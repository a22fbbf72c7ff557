"""Triton kernels of matching, merge and unmerge.

Each does in one launch, without atomics and so in a fixed order, what a function of
:mod:`tome_nodes.ops.reference` does in several. :mod:`tome_nodes.ops.fused` launches them.
"""

import triton
import triton.language as tl

from ..picks import MULTIPLIERS

_FIRST, _SECOND, _THIRD = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


@triton.jit
def _scramble(bits):
    """:func:`tome_nodes.picks._scramble` of uint32 values."""
    bits = (bits ^ (bits >> 16)) * tl.full((), _FIRST, tl.uint32)
    bits = (bits ^ (bits >> 16)) * tl.full((), _SECOND, tl.uint32)
    bits = (bits ^ (bits >> 16)) * tl.full((), _THIRD, tl.uint32)
    return bits ^ (bits >> 15)


@triton.jit
def _pick(stream, cell, CHOICES: tl.constexpr, RANDOM: tl.constexpr):
    """:func:`tome_nodes.picks.pick_per_cell` for some cells, 0 where picks are not random."""
    if RANDOM:
        bits = _scramble(stream + cell.to(tl.uint32))
        return ((bits.to(tl.uint64) * CHOICES) >> 32).to(tl.int32)
    else:
        return cell * 0


@triton.jit
def _order(x):
    """An int32 for each float32, ordered as they are; there must be no NaN."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _greatest_reached(order, quota):
    """The greatest int32 that ``quota`` of ``order`` reach, found bit by bit."""
    enough = tl.sum((order >= 0).to(tl.int32)) >= quota
    greatest = tl.where(enough, 0, -0x80000000).to(tl.int32)
    for index in range(31):
        candidate = greatest + (1 << (30 - index))
        enough = tl.sum((order >= candidate).to(tl.int32)) >= quota
        greatest = tl.where(enough, candidate, greatest)
    return greatest


@triton.jit
def _before_owner(count, earlier, absorbed, merged):
    """The sum of ``count`` over the places before the one that each token merges into or stays at.

    ``earlier`` and ``absorbed`` are cells by places: which are before the dst of a cell, and which
    merge into it.
    """
    of_cell = tl.sum(earlier * count[None, :], axis=1)
    of_merged = tl.sum(absorbed * of_cell[:, None], axis=0)
    return tl.where(merged, of_merged, tl.cumsum(count, 0) - count)


@triton.jit
def match_windows(
    features,
    key,
    rows,
    members,
    starts,
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
    quota,
    SY: tl.constexpr,
    SX: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    RANDOM: tl.constexpr,
    TOKENS: tl.constexpr,
    CELLS: tl.constexpr,
    ALL_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Match the tokens of one window of one sample, and write its part of the plan.

    Programs are windows, then pieces of the tokens that fill no window, by samples. A window is
    ``HIGH`` by ``WIDE`` cells of ``SY`` by ``SX`` tokens, padded to ``TOKENS`` tokens and ``CELLS``
    cells; ``CHANNELS`` of ``ALL_CHANNELS`` channels are loaded at once. All windows merge ``quota``
    tokens, so where a window's slots and members begin is known without looking at the others.
    """
    ACROSS: tl.constexpr = WIDE * SX
    INSIDE: tl.constexpr = HIGH * SY * ACROSS
    program = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    windows = windows_down * windows_across
    slots = tokens - windows * quota
    first_token = sample * tokens
    first_slot = sample * slots
    place = tl.arange(0, TOKENS)

    if program >= windows:
        # Row by row: what is right of the windows, then what is below them.
        index = (program - windows) * TOKENS + place
        covered_rows = windows_down * HIGH * SY
        covered_columns = windows_across * ACROSS
        beside = width - covered_columns
        right = index < covered_rows * beside
        columns = tl.maximum(beside, 1)
        token = tl.where(
            right,
            index // columns * width + covered_columns + index % columns,
            index + covered_rows * covered_columns,
        )
        left = index < tokens - windows * INSIDE
        slot = first_slot + windows * (INSIDE - quota) + index
        member = first_token + windows * INSIDE + index
        tl.store(rows + first_token + token, slot, mask=left)
        tl.store(members + member, first_token + token, mask=left)
        tl.store(starts + slot, member, mask=left)
        tl.store(log_sizes + slot, tl.zeros((TOKENS,), tl.float32), mask=left)
        return

    window_row = program // windows_across
    window_column = program % windows_across
    # Names of the tokens: their place in the window, row by row, and their number in the map.
    inside = place < INSIDE
    row = place // ACROSS
    column = place % ACROSS
    token = (window_row * HIGH * SY + row) * width + window_column * ACROSS + column
    cell = (window_row * HIGH + row // SY) * cells_across + window_column * WIDE + column // SX

    cell_place = tl.arange(0, CELLS)
    is_cell = cell_place < HIGH * WIDE
    cell_row = cell_place // WIDE
    cell_column = cell_place % WIDE
    own_cell = (window_row * HIGH + cell_row) * cells_across + window_column * WIDE + cell_column

    if RANDOM:
        shape = (cells_down.to(tl.uint32) << 16) ^ cells_across.to(tl.uint32)
        stream = _scramble(tl.load(key).to(tl.uint32) ^ _scramble(shape))
    else:
        stream = 0
    is_dst = (row % SY) * SX + column % SX == _pick(stream, cell, SY * SX, RANDOM)
    pick = _pick(stream, own_cell, SY * SX, RANDOM)
    dst = (cell_row * SY + pick // SX) * ACROSS + cell_column * SX + pick % SX
    dst_token = (window_row * HIGH * SY + dst // ACROSS) * width
    dst_token += window_column * ACROSS + dst % ACROSS

    map_start = features + sample * stride_sample
    products = tl.zeros((CELLS, TOKENS), tl.float32)
    token_norm = tl.zeros((TOKENS,), tl.float32)
    dst_norm = tl.zeros((CELLS,), tl.float32)
    for first_channel in range(0, ALL_CHANNELS, CHANNELS):
        channel = first_channel + tl.arange(0, CHANNELS)
        is_channel = channel < ALL_CHANNELS
        x = tl.load(
            map_start + token[:, None] * stride_token + channel[None, :] * stride_channel,
            mask=inside[:, None] & is_channel[None, :],
            other=0.0,
        )
        y = tl.load(
            map_start + dst_token[:, None] * stride_token + channel[None, :] * stride_channel,
            mask=is_cell[:, None] & is_channel[None, :],
            other=0.0,
        )
        products += tl.dot(y, tl.trans(x), input_precision="ieee")
        token_norm += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        dst_norm += tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
    similarity = products / tl.sqrt(tl.maximum(dst_norm, 1e-24))[:, None]
    similarity = similarity / tl.sqrt(tl.maximum(token_norm, 1e-24))[None, :]
    # What is not a number comes last of the src, so that the quota holds whatever the features.
    similarity = tl.where(similarity == similarity, similarity, -2.0)
    similarity = tl.where(is_cell[:, None], similarity, float("-inf"))
    best, nearest = tl.max(similarity, axis=0, return_indices=True)

    is_src = inside & (is_dst == 0)
    order = _order(tl.where(is_src, best, float("-inf")))
    least = _greatest_reached(order, quota)
    # Of those that are as alike as the last one to merge, the first ones merge.
    level = order == least
    ahead = quota - tl.sum((order > least).to(tl.int32))
    merged = is_src & ((order > least) | (level & (tl.cumsum(level.to(tl.int32), 0) <= ahead)))

    # Slots and members in the order of the owners, which are the tokens that stay.
    stays = inside & (merged == 0)
    slots_here = stays.to(tl.int32)
    absorbed = ((nearest[None, :] == cell_place[:, None]) & merged[None, :]).to(tl.int32)
    own = ((dst[:, None] == place[None, :]) & is_cell[:, None]).to(tl.int32)
    group = absorbed + own
    size = slots_here + tl.sum(own * tl.sum(absorbed, axis=1)[:, None], axis=0)
    earlier = (place[None, :] < dst[:, None]).to(tl.int32)
    slot = _before_owner(slots_here, earlier, absorbed, merged)
    start = _before_owner(size, earlier, absorbed, merged)
    member = start + tl.sum(group * (tl.cumsum(group, 1) - group), axis=0)

    window_slot = first_slot + program * (INSIDE - quota)
    window_member = first_token + program * INSIDE
    tl.store(rows + first_token + token, window_slot + slot, mask=inside)
    tl.store(members + window_member + member, first_token + token, mask=inside)
    tl.store(starts + window_slot + slot, window_member + start, mask=stays)
    logarithm = tl.log(tl.maximum(size, 1).to(tl.float32))
    tl.store(log_sizes + window_slot + slot, logarithm, mask=stays)


@triton.jit
def _extent(starts, slot, is_slot, slots, all_tokens):
    """Where the members of some slots begin, and how many there are; none where there is no slot.

    ``slots`` and ``all_tokens`` count over the whole batch.
    """
    start = tl.load(starts + slot, mask=is_slot, other=0)
    end = tl.load(starts + slot + 1, mask=slot + 1 < slots, other=all_tokens)
    return start, tl.where(is_slot, end - start, 0)


@triton.jit
def _member(
    x,
    members,
    start,
    size,
    index,
    channel,
    is_channel,
    stride_sample,
    stride_token,
    stride_channel,
    tokens,
):
    """The token that is member ``index`` of each slot, in float32, and 0 of a shorter slot."""
    is_member = index < size
    member = tl.load(members + start + index, mask=is_member, other=0)
    token = member // tokens * stride_sample + member % tokens * stride_token
    return tl.load(
        x + token[:, None] + channel[None, :] * stride_channel,
        mask=is_member[:, None] & is_channel[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def merge(
    x,
    members,
    starts,
    means,
    stride_sample,
    stride_token,
    stride_channel,
    tokens,
    channels,
    slots,
    all_tokens,
    SLOTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The mean of ``SLOTS`` slots in ``CHANNELS`` channels, added up in float32.

    ``slots`` and ``all_tokens`` count over the whole batch, ``tokens`` in one sample.
    """
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_slot = slot < slots
    is_channel = channel < channels
    start, size = _extent(starts, slot, is_slot, slots, all_tokens)
    total = tl.zeros((SLOTS, CHANNELS), tl.float32)
    # Not a range: the interpreter of Triton 3.6 takes no bound of one from a tensor.
    most = tl.max(size)
    index = most * 0
    while index < most:
        total += _member(
            x,
            members,
            start,
            size,
            index,
            channel,
            is_channel,
            stride_sample,
            stride_token,
            stride_channel,
            tokens,
        )
        index += 1
    mean = total / tl.maximum(size, 1).to(tl.float32)[:, None]
    tl.store(
        means + slot.to(tl.int64)[:, None] * channels + channel[None, :],
        mean.to(means.dtype.element_ty),
        mask=is_slot[:, None] & is_channel[None, :],
    )


@triton.jit
def merge_keys(
    x,
    members,
    starts,
    means,
    keys,
    stride_sample,
    stride_token,
    stride_channel,
    tokens,
    slots,
    all_tokens,
    SLOTS: tl.constexpr,
    ALL_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The mean of ``SLOTS`` slots, and the same stretched to the mean length of its tokens.

    ``ALL_CHANNELS`` are padded to ``CHANNELS``, since a length is that of all of them.
    """
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    channel = tl.arange(0, CHANNELS)
    is_slot = slot < slots
    is_channel = channel < ALL_CHANNELS
    start, size = _extent(starts, slot, is_slot, slots, all_tokens)
    total = tl.zeros((SLOTS, CHANNELS), tl.float32)
    lengths = tl.zeros((SLOTS,), tl.float32)
    most = tl.max(size)
    index = most * 0
    while index < most:
        value = _member(
            x,
            members,
            start,
            size,
            index,
            channel,
            is_channel,
            stride_sample,
            stride_token,
            stride_channel,
            tokens,
        )
        total += value
        lengths += tl.sqrt(tl.sum(value * value, axis=1))
        index += 1
    count = tl.maximum(size, 1).to(tl.float32)
    mean = total / count[:, None]
    length = tl.maximum(tl.sqrt(tl.sum(mean * mean, axis=1)), 1e-6)
    place = slot.to(tl.int64)[:, None] * ALL_CHANNELS + channel[None, :]
    mask = is_slot[:, None] & is_channel[None, :]
    tl.store(means + place, mean.to(means.dtype.element_ty), mask=mask)
    key = mean * (lengths / count / length)[:, None]
    tl.store(keys + place, key.to(keys.dtype.element_ty), mask=mask)


@triton.jit
def add_change(
    x,
    before,
    after,
    rows,
    result,
    stride_sample,
    stride_token,
    stride_channel,
    tokens,
    channels,
    all_tokens,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``x`` and the change of its slots, for ``TOKENS`` tokens in ``CHANNELS`` channels.

    ``before``, ``after`` and ``result`` are contiguous; ``all_tokens`` counts over the batch.
    """
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_token = token < all_tokens
    mask = is_token[:, None] & (channel < channels)[None, :]
    slot = tl.load(rows + token, mask=is_token, other=0)[:, None] * channels + channel[None, :]
    own = token // tokens * stride_sample + token % tokens * stride_token
    value = tl.load(x + own[:, None] + channel[None, :] * stride_channel, mask=mask, other=0.0).to(
        tl.float32
    )
    value += tl.load(after + slot, mask=mask, other=0.0).to(tl.float32)
    value -= tl.load(before + slot, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        result + token[:, None] * channels + channel[None, :],
        value.to(result.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _head(x, row, rows, head, heads, channel, CHANNELS: tl.constexpr):
    """The channels of one head in some rows of a contiguous ``x``, 0 in all beyond them."""
    place = (row.to(tl.int64) * heads + head)[:, None] * CHANNELS + channel
    return tl.load(x + place, mask=(row < rows)[:, None] & (channel < CHANNELS), other=0.0)


@triton.jit
def _store_head(x, value, row, rows, head, heads, channel, CHANNELS: tl.constexpr):
    """Store what :func:`_head` would load."""
    place = (row.to(tl.int64) * heads + head)[:, None] * CHANNELS + channel
    mask = (row < rows)[:, None] & (channel < CHANNELS)
    tl.store(x + place, value, mask=mask)


@triton.jit
def widen(
    q,
    k,
    v,
    log_sizes,
    wide_q,
    wide_k,
    wide_v,
    query_rows,
    key_rows,
    query_blocks,
    key_blocks,
    heads,
    scale,
    constant,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """``ROWS`` tokens of one head of queries, keys or values, with ``WIDE`` channels, not fewer.

    Programs are blocks of queries, then of keys, then of values, by heads; all are contiguous.
    """
    program = tl.program_id(0)
    head = tl.program_id(1)
    channel = tl.arange(0, PADDED)[None, :]
    lane = tl.arange(0, ROWS)
    if program < query_blocks:
        row = program * ROWS + lane
        x = _head(q, row, query_rows, head, heads, channel, CHANNELS).to(tl.float32) * scale
        x = tl.where(channel < CHANNELS, x, constant).to(wide_q.dtype.element_ty)
        _store_head(wide_q, x, row, query_rows, head, heads, channel, WIDE)
    elif program < query_blocks + key_blocks:
        row = (program - query_blocks) * ROWS + lane
        x = _head(k, row, key_rows, head, heads, channel, CHANNELS)
        logs = tl.load(log_sizes + row, mask=row < key_rows, other=0.0)
        x = tl.where(channel == CHANNELS, logs[:, None], x)
        _store_head(wide_k, x, row, key_rows, head, heads, channel, WIDE)
    else:
        row = (program - query_blocks - key_blocks) * ROWS + lane
        x = _head(v, row, key_rows, head, heads, channel, CHANNELS)
        _store_head(wide_v, x, row, key_rows, head, heads, channel, WIDE)
