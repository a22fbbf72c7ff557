"""Extra channels in every head, through which attention weighs its keys."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .launching import Launch, launch, wrap_triton
from .operators import operator
from .shared import BLOCK_ROWS, BLOCK_WARPS, padded, require_heads, require_tokens

# The most values of a program, which holds all channels of a head; that is 64 values a thread.
_VALUES = 4096


@triton.jit
def _head(x, row, rows, head, heads, channel, CHANNELS: tl.constexpr):
    """The channels of one head in some rows of a contiguous ``x``; 0 in padded channels."""
    place = (row.to(tl.int64) * heads + head)[:, None] * CHANNELS + channel
    return tl.load(x + place, mask=(row < rows)[:, None] & (channel < CHANNELS), other=0.0)


@triton.jit
def _store_head(x, value, row, rows, head, heads, channel, CHANNELS: tl.constexpr):
    """Store what :func:`_head` would load."""
    place = (row.to(tl.int64) * heads + head)[:, None] * CHANNELS + channel
    mask = (row < rows)[:, None] & (channel < CHANNELS)
    tl.store(x + place, value, mask=mask)


@triton.jit(do_not_specialize=("query_rows", "key_rows", "query_blocks", "key_blocks", "heads"))
def widen_kernel(
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
    """Write ``ROWS`` tokens of one head of queries, keys or values with ``WIDE`` channels.

    The grid is blocks of queries, then of keys, then of values, by heads; all are contiguous.
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


def _shapes(q, k, v, log_sizes, heads, scale, constant):
    return tuple(
        x.new_empty(*x.shape[:2], x.shape[2] + heads * reference.EXTRA_CHANNELS) for x in (q, k, v)
    )


@operator(_shapes, reference.widen)
def widen(
    q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor, heads: int, scale: float, constant: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add channels to every head, as :func:`tome_nodes.ops.reference.widen`.

    Tensors are of float32, float16 or bfloat16, of any strides.
    """
    shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
    how = _launch_of(shapes, dtypes, heads, scale, constant)
    wide = _shapes(q, k, v, log_sizes, heads, scale, constant)
    held = (x.contiguous() for x in (q, k, v, log_sizes))
    launch(wrap_triton(widen_kernel), how, (*held, *wide))
    return wide


@lru_cache(maxsize=64)
def _launch_of(
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    heads: int,
    scale: float,
    constant: float,
) -> Launch:
    """How the kernel is launched for queries, keys and values of these shapes and dtypes."""
    for shape, dtype, name in zip(shapes, dtypes, "qkv", strict=True):
        require_tokens(shape, dtype, name)
        if shape[2] != shapes[0][2]:
            raise ValueError(f"{name} has {shape[2]} channels, and q has {shapes[0][2]}")
    queries, keys, _ = shapes
    require_heads(queries, heads, "q")
    channels = queries[2] // heads
    wide = channels + reference.EXTRA_CHANNELS
    query_rows, key_rows = queries[0] * queries[1], keys[0] * keys[1]
    lanes = padded(wide)
    rows = max(1, min(BLOCK_ROWS, _VALUES // lanes))
    query_blocks, key_blocks = -(-query_rows // rows), -(-key_rows // rows)
    counts = query_rows, key_rows, query_blocks, key_blocks
    numbers = *counts, heads, scale, constant, rows, channels, wide, lanes
    return Launch((query_blocks + 2 * key_blocks, heads, 1), numbers, BLOCK_WARPS)
