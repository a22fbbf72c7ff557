"""The operations of a plan as Triton kernels, one launch each.

Registered as operators of torch, with shapes for tracing, so that torch.compile keeps one graph.
Importing this module needs Triton; :func:`tome_nodes.ops.choose` says whether it can be had.
"""

import torch
import triton
from torch import Tensor

from . import kernels
from .reference import FURTHER, unmerge

__all__ = ["add_change", "match_windows", "merge", "merge_keys", "unmerge", "widen"]

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What the kernels can add up and compare in float32."""

# Rows and channels of one program: 16 bytes a thread in half precision, whole cache lines.
_ROWS, _CHANNELS, _WARPS = 8, 64, 2

# Pairs of token and cell that a warp matches: 32 registers a thread for each thing known of them.
_PAIRS_OF_A_WARP = 1024

# Values of a program that holds all channels of its slots: 32 float32 registers a thread.
_KEY_VALUES = 4096


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run there: on CUDA and ROCm, and on a CPU in Triton's interpreter."""
    return device.type == "cuda" or (device.type == "cpu" and triton.knobs.runtime.interpret)


def _require(x: Tensor, name: str) -> None:
    if x.ndim != 3 or x.dtype not in DTYPES:
        raise ValueError(
            f"{name} is {tuple(x.shape)} of {x.dtype}: it must be [batch, tokens, channels] of "
            "float32, float16 or bfloat16"
        )


def _padded(count: int) -> int:
    """The next power of two that a matrix product of Triton can take."""
    return max(16, 1 << (count - 1).bit_length())


@torch.library.custom_op("tome_nodes::match_windows", mutates_args=())
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
    """In each window, merge the ``quota`` src tokens that are most alike to their best dst into it.

    The same grouping as :func:`tome_nodes.strategies.window.match_windows` with the picks of
    :func:`tome_nodes.picks.pick_per_cell`; slots follow each other window by window.

    Args:
        features: ``[batch, height * width, channels]``, any strides, compared by cosine similarity.
        key: scalar int64 of the random picks, None for the top left token of each cell.
        height: of the grid, in tokens.
        width: of the grid, in tokens.
        sy: height of a cell in tokens.
        sx: width of a cell in tokens.
        high: height of a window in cells.
        wide: width of a window in cells.
        quota: merges in each window, at most its tokens less its cells.

    Returns:
        ``rows``, ``members``, ``starts`` and ``log_sizes``, as :class:`tome_nodes.plan.Plan` has
        them.
    """
    _require(features, "features")
    batch, tokens, channels = features.shape
    down, across = height // sy // high, width // sx // wide
    inside = high * sy * wide * sx
    block, cells = _padded(inside), _padded(high * wide)
    rows = torch.empty(batch, tokens, dtype=torch.int64, device=features.device)
    members = torch.empty(batch * tokens, dtype=torch.int64, device=features.device)
    slots = tokens - down * across * quota
    starts = torch.empty(batch * slots, dtype=torch.int64, device=features.device)
    log_sizes = torch.empty(batch, slots, dtype=torch.float32, device=features.device)
    left_over = -(-(tokens - down * across * inside) // block)
    with torch.cuda.device_of(features):
        kernels.match_windows[(down * across + left_over, batch)](
            features,
            key,
            rows,
            members,
            starts,
            log_sizes,
            *features.stride(),
            tokens,
            width,
            height // sy,
            width // sx,
            down,
            across,
            quota,
            SY=sy,
            SX=sx,
            HIGH=high,
            WIDE=wide,
            RANDOM=key is not None,
            TOKENS=block,
            CELLS=cells,
            ALL_CHANNELS=channels,
            CHANNELS=64 if block <= 64 else 32,
            num_warps=min(16, max(4, block * cells // _PAIRS_OF_A_WARP)),
        )
    return rows, members, starts, log_sizes


@match_windows.register_fake
def _(features, key, height, width, sy, sx, high, wide, quota):
    batch, tokens, _ = features.shape
    slots = tokens - (height // sy // high) * (width // sx // wide) * quota
    return (
        features.new_empty(batch, tokens, dtype=torch.int64),
        features.new_empty(batch * tokens, dtype=torch.int64),
        features.new_empty(batch * slots, dtype=torch.int64),
        features.new_empty(batch, slots, dtype=torch.float32),
    )


@torch.library.custom_op("tome_nodes::merge", mutates_args=())
def merge(x: Tensor, rows: Tensor, members: Tensor, starts: Tensor) -> Tensor:
    """The mean of each slot; see :func:`tome_nodes.ops.reference.merge`."""
    _require(x, "x")
    batch, tokens, channels = x.shape
    slots = len(starts)
    means = torch.empty(batch, slots // batch, channels, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        kernels.merge[(-(-slots // _ROWS), -(-channels // _CHANNELS))](
            x,
            members,
            starts,
            means,
            *x.stride(),
            tokens,
            channels,
            slots,
            len(members),
            SLOTS=_ROWS,
            CHANNELS=_CHANNELS,
            num_warps=_WARPS,
        )
    return means


@merge.register_fake
def _(x, rows, members, starts):
    return x.new_empty(x.shape[0], starts.shape[0] // x.shape[0], x.shape[2])


@torch.library.custom_op("tome_nodes::merge_keys", mutates_args=())
def merge_keys(x: Tensor, rows: Tensor, members: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each slot, and it stretched; see :func:`tome_nodes.ops.reference.merge_keys`."""
    _require(x, "x")
    batch, tokens, channels = x.shape
    slots = len(starts)
    shape = batch, slots // batch, channels
    means, keys = (torch.empty(shape, dtype=x.dtype, device=x.device) for _ in range(2))
    padded = _padded(channels)
    at_once = max(1, _KEY_VALUES // padded)
    with torch.cuda.device_of(x):
        kernels.merge_keys[(-(-slots // at_once),)](
            x,
            members,
            starts,
            means,
            keys,
            *x.stride(),
            tokens,
            slots,
            len(members),
            SLOTS=at_once,
            ALL_CHANNELS=channels,
            CHANNELS=padded,
            num_warps=4,
        )
    return means, keys


@merge_keys.register_fake
def _(x, rows, members, starts):
    shape = x.shape[0], starts.shape[0] // x.shape[0], x.shape[2]
    return x.new_empty(shape), x.new_empty(shape)


@torch.library.custom_op("tome_nodes::add_change", mutates_args=())
def add_change(x: Tensor, before: Tensor, after: Tensor, rows: Tensor) -> Tensor:
    """``x`` and the change of its slots; see :func:`tome_nodes.ops.reference.add_change`."""
    _require(x, "x")
    batch, tokens, channels = x.shape
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        kernels.add_change[(-(-batch * tokens // _ROWS), -(-channels // _CHANNELS))](
            x,
            before.contiguous(),
            after.contiguous(),
            rows,
            result,
            *x.stride(),
            tokens,
            channels,
            batch * tokens,
            TOKENS=_ROWS,
            CHANNELS=_CHANNELS,
            num_warps=_WARPS,
        )
    return result


@add_change.register_fake
def _(x, before, after, rows):
    return x.new_empty(x.shape)


@torch.library.custom_op("tome_nodes::widen", mutates_args=())
def widen(
    q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor, heads: int, scale: float, constant: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads with further channels; see :func:`tome_nodes.ops.reference.widen`."""
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        _require(x, name)
    channels = q.shape[2] // heads
    wide = channels + FURTHER
    results = tuple(
        torch.empty(*x.shape[:2], heads * wide, dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    rows = [x.shape[0] * x.shape[1] for x in (q, k)]
    blocks = [-(-count // _ROWS) for count in rows]
    with torch.cuda.device_of(q):
        kernels.widen[(blocks[0] + 2 * blocks[1], heads)](
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            log_sizes.contiguous(),
            *results,
            *rows,
            *blocks,
            heads,
            scale,
            constant,
            ROWS=_ROWS,
            CHANNELS=channels,
            WIDE=wide,
            PADDED=_padded(wide),
            num_warps=_WARPS,
        )
    return results


@widen.register_fake
def _(q, k, v, log_sizes, heads, scale, constant):
    return tuple(x.new_empty(*x.shape[:2], x.shape[2] + heads * FURTHER) for x in (q, k, v))
