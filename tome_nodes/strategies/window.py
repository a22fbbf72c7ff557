"""Matching within windows: a src token may only merge into a dst token of its own window.

The cost grows with the number of tokens N instead of N squared. All windows merge the same number
of tokens, so they do not depend on each other and every shape is static.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ..ops import TORCH, KernelFailed, Operation, Operations
from ..settings.config import ToMeConfig
from .cells import Cells, CellStrategy, made_once, split_cells
from .plan import Grid, Plan

# The most features that a CPU gathers at once, to fit its cache; a GPU takes a whole map.
_CPU_FEATURES_AT_ONCE = 2**20

WINDOW_SIDE = 16
"""The most tokens along the side of a window."""

# The most cells along the side of a window: one GPU program has to hold a whole window.
_CELLS_ALONG = 8


class Windows(NamedTuple):
    """How a grid is cut into windows.

    Attributes:
        cells: the cells of the grid.
        high: height of a window in cells.
        wide: width of a window in cells.
        quota: the number of merges in a window.
    """

    cells: Cells
    high: int
    wide: int
    quota: int


class WindowStrategy(CellStrategy):
    """Each src token may merge into a dst token of its window."""

    def __init__(self, config: ToMeConfig, ops: Operations):
        super().__init__(config, ops)
        self._windows: dict[tuple[Grid, float], Windows] = {}

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan | None:
        windows = made_once(self._windows, (grid, ratio), lambda: self.windows(grid, ratio))
        if windows.quota == 0:
            return None
        if self.ops.match_windows is not None:
            plan = self._match_by_kernel(features, windows, self.ops.match_windows)
            if plan is not None:
                return plan
        cells = windows.cells
        size = cells.grid, cells.sy, cells.sx
        pieces: Pieces = made_once(
            self.made,
            (size, features.shape),
            lambda: pieces_of(features, *split_windows(*size, self.picks(cells))),
        )
        return match_windows(features, pieces, windows.quota, self.ops)

    def slots(self, grid: Grid, ratio: float) -> int:
        cells, high, wide, quota = self.windows(grid, ratio)
        if quota == 0:
            return grid.tokens
        windows = (cells.count.height // high) * (cells.count.width // wide)
        return grid.tokens - windows * quota

    def windows(self, grid: Grid, ratio: float) -> Windows:
        """How a grid is cut; windows share the merges equally, rounded to the nearest."""
        cells, merges = self.cut(grid, ratio)
        sy, sx, count = cells.sy, cells.sx, cells.count
        if merges == 0:
            return Windows(cells, 0, 0, 0)
        high, wide = window_cells(cells.grid, sy, sx)
        windows = (count.height // high) * (count.width // wide)
        most, quota = high * wide * (sy * sx - 1), (merges + windows // 2) // windows
        return Windows(cells, high, wide, quota if quota < most else most)

    def _match_by_kernel(self, features: Tensor, windows: Windows, match: Operation) -> Plan | None:
        """The plan of :func:`match_windows`, made by a kernel; None if the kernel failed."""
        key = self.key if self.config.use_rand else None
        cells, high, wide, quota = windows
        grid, sy, sx = cells.grid, cells.sy, cells.sx
        try:
            arrays = match(features, key, grid.height, grid.width, sy, sx, high, wide, quota)
        except KernelFailed:
            return None
        slot_of_token, order, offsets, log_sizes = arrays
        in_tokens = grid.width, high * sy, wide * sx
        slots = log_sizes.shape[1]
        return Plan(slot_of_token, order, offsets, log_sizes, slots, self.ops, in_tokens)


def split_windows(grid: Grid, sy: int, sx: int, picks: Tensor) -> tuple[Tensor, Tensor]:
    """Split the tokens of windows into src and dst; arguments as for ``split_cells``.

    Returns:
        Token indices, int64: src ``[windows, cells * (sy * sx - 1)]`` and dst
        ``[windows, cells]``, where ``cells`` is the number of cells in a window. Tokens that fill
        no window are in neither.
    """
    src, dst = split_cells(grid, sy, sx, picks)
    high, wide = window_cells(grid, sy, sx)

    def by_window(tokens: Tensor) -> Tensor:
        # The compiler makes a graph for each size of window; with symbolic sizes, it would take far
        # longer.
        windows = tokens.unfold(0, high, high).unfold(1, wide, wide)
        return windows.movedim(2, 4).flatten(2).flatten(0, 1)

    return by_window(src), by_window(dst[:, :, None])


def window_cells(grid: Grid, sy: int, sx: int) -> tuple[int, int]:
    """Height and width of the windows of a grid, in cells of ``sy`` by ``sx`` tokens.

    Windows are as large as possible, but at most an eighth of the rows and of the columns of cells
    may fill no window. The grid must have at least one cell.
    """
    cells = grid.cells(sy, sx)
    return _cells_along(cells.height, sy), _cells_along(cells.width, sx)


def _cells_along(cells: int, side: int) -> int:
    most = min(_CELLS_ALONG, WINDOW_SIDE // side)
    while True:
        # The fewest windows that leave over at most an eighth of the cells. If this tried one size
        # after the other, the compiler would make a graph for each.
        windows = -(-(cells - cells // 8) // most)
        size = min(most, cells // windows)
        if cells % size <= cells // 8:
            return size
        most = size - 1


class Pieces(NamedTuple):
    """All windows of a map.

    Attributes:
        windows: how many there are.
        tokens: ``[batch, tokens]``, the number of each token.
        pieces: for each group of windows that is matched at once, src and dst as
            ``[batch, windows, ...]``, then both in one dimension, with tokens numbered over the
            whole batch.
    """

    windows: int
    tokens: Tensor
    pieces: list[tuple[Tensor, Tensor, Tensor, Tensor]]


def pieces_of(features: Tensor, src: Tensor, dst: Tensor) -> Pieces:
    """All windows of a map; ``src`` and ``dst`` are as :func:`split_windows` returns them."""
    batch, tokens, channels = features.shape
    parts = [(src, dst)]
    # A compiler would make a graph for each number of parts.
    if features.device.type == "cpu" and not torch.compiler.is_compiling():
        at_once = max(1, _CPU_FEATURES_AT_ONCE // (batch * channels * src.shape[1]))
        parts = [*zip(src.split(at_once), dst.split(at_once), strict=True)]
    every = torch.arange(batch * tokens, device=features.device).view(batch, tokens)
    first = every[:, :1, None]
    pieces = []
    for own_src, own_dst in parts:
        rows = (first + own_src).flatten(), (first + own_dst).flatten()
        pieces.append((own_src.expand(batch, -1, -1), own_dst.expand(batch, -1, -1), *rows))
    return Pieces(len(src), every[:1].expand(batch, -1), pieces)


def match_windows(features: Tensor, cut: Pieces, quota: int, ops: Operations = TORCH) -> Plan:
    """In every window, merge the src tokens that are most similar to a dst into their nearest dst.

    Args:
        features: ``[batch, tokens, channels]``, compared by cosine similarity.
        cut: the windows of the map.
        quota: the number of merges in a window, from 1 to the number of its src tokens.
        ops: the operations that the plan uses.

    Returns:
        A plan of ``tokens - windows * quota`` slots.
    """
    channels = features.shape[2]
    owners = cut.tokens.clone(memory_format=torch.contiguous_format)
    rows = features.reshape(-1, channels)
    if rows.requires_grad:
        rows = rows.detach()
    for src, dst, src_rows, dst_rows in cut.pieces:
        queries = rows.index_select(0, src_rows).view(*src.shape, channels)
        keys = rows.index_select(0, dst_rows).view(*dst.shape, channels)
        keys = keys / vector_norm(keys, 2, 3, True).clamp_min(1e-12)
        # The norm of a src does not affect which dst is nearest to it.
        products, nearest = (queries @ keys.mT).max(3)
        similarity = products / vector_norm(queries, 2, 3).clamp_min(1e-12)
        merged = similarity.topk(quota, 2, sorted=False).indices
        own_dst = dst.gather(2, nearest.gather(2, merged))
        owners.scatter_(1, src.gather(2, merged).flatten(1), own_dst.flatten(1))
    return Plan.from_owners(owners, features.shape[1] - cut.windows * quota, ops)
