"""Matching within windows: a src token may only merge into a dst token of its own window.

The cost grows with the number of tokens N instead of N squared. All windows merge the same number
of tokens, so they do not depend on each other and every shape is static.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..merging.plan import Grid, Plan
from ..ops import TORCH, KernelFailed, Operations
from .cells import Cells, CellStrategy, split_cells

# The most features that a CPU gathers at once, to fit its cache; a GPU takes a whole map.
_CPU_FEATURES_AT_ONCE = 2**20

WINDOW_SIDE = 16
"""The most tokens along the side of a window."""

# The most cells along the side of a window: one GPU program has to hold a whole window.
_CELLS_ALONG = 8


class WindowStrategy(CellStrategy):
    """Each src token may merge into a dst token of its window."""

    def split(self, cells: Cells, picks: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`split_windows`."""
        return split_windows(cells.grid, cells.sy, cells.sx, picks)

    def match(self, features: Tensor, cells: Cells, merges: int) -> Plan | None:
        """See :func:`match_windows`; windows share ``merges`` equally, rounded to the nearest."""
        sy, sx, count = cells.sy, cells.sx, cells.count
        high, wide = window_cells(cells.grid, sy, sx)
        windows = (count.height // high) * (count.width // wide)
        most = high * wide * (sy * sx - 1)
        quota = min(most, (merges + windows // 2) // windows)
        if quota == 0:
            return None
        plan = self._match_by_kernel(features, cells, (high, wide), quota)
        if plan is not None:
            return plan
        src, dst = self.split_of(cells)
        return match_windows(features, src, dst, quota, self.ops)

    def _match_by_kernel(
        self, features: Tensor, cells: Cells, window: tuple[int, int], quota: int
    ) -> Plan | None:
        """The plan of :func:`match_windows`, made by a kernel; None if there is none that runs.

        ``window`` is the height and width of a window in cells.
        """
        match = self.ops.match_windows
        if match is None:
            return None
        key = self.key if self.config.use_rand else None
        shape = (cells.grid.height, cells.grid.width, cells.sy, cells.sx, *window)
        try:
            slot_of_token, order, offsets, log_sizes = match(features, key, *shape, quota)
        except KernelFailed:
            return None
        in_tokens = cells.grid.width, window[0] * cells.sy, window[1] * cells.sx
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
    rows, columns = dst.shape
    high, wide = window_cells(grid, sy, sx)

    def by_window(tokens: Tensor) -> Tensor:
        tokens = tokens[: rows // high * high, : columns // wide * wide]
        tokens = tokens.reshape(rows // high, high, columns // wide, wide, -1)
        return tokens.transpose(1, 2).reshape(rows // high * (columns // wide), -1)

    return by_window(src), by_window(dst)


def window_cells(grid: Grid, sy: int, sx: int) -> tuple[int, int]:
    """Height and width of the windows of a grid, in cells of ``sy`` by ``sx`` tokens.

    Windows are as large as possible, but at most an eighth of the rows and of the columns of cells
    may fill no window. The grid must have at least one cell.
    """
    cells = grid.cells(sy, sx)
    return _cells_along(cells.height, sy), _cells_along(cells.width, sx)


def _cells_along(cells: int, side: int) -> int:
    choice = min(cells, _CELLS_ALONG, WINDOW_SIDE // side)
    while 8 * (cells % choice) > cells:
        choice -= 1
    return choice


@torch.no_grad()
def match_windows(
    features: Tensor, src: Tensor, dst: Tensor, quota: int, ops: Operations = TORCH
) -> Plan:
    """In every window, merge the src tokens that are most similar to a dst into their nearest dst.

    Args:
        features: ``[batch, tokens, channels]``, compared by cosine similarity.
        src: ``[windows, candidates]`` token indices, int64.
        dst: ``[windows, kept]`` token indices, int64.
        quota: the number of merges in a window, from 1 to ``candidates``.
        ops: the operations that the plan uses.

    Returns:
        A plan of ``tokens - windows * quota`` slots.
    """
    batch, tokens, channels = features.shape
    owners = torch.arange(tokens, device=features.device).repeat(batch, 1)
    at_once = len(src)
    if features.device.type == "cpu":
        at_once = max(1, _CPU_FEATURES_AT_ONCE // (batch * channels * src.shape[1]))
    rows = features.reshape(-1, channels)
    first = torch.arange(batch, device=features.device)[:, None, None] * tokens
    for own_src, own_dst in zip(src.split(at_once), dst.split(at_once), strict=True):
        queries, keys = (
            rows.index_select(0, (first + own).flatten()).view(batch, *own.shape, channels)
            for own in (own_src, own_dst)
        )
        # The norm of a src does not affect which dst is nearest to it.
        products, nearest = (queries @ F.normalize(keys, dim=3).mT).max(dim=3)
        similarity = products / queries.norm(dim=3).clamp_min(1e-12)
        merged = similarity.topk(quota, dim=2, sorted=False).indices
        owners.scatter_(
            1,
            own_src.expand(batch, -1, -1).gather(2, merged).flatten(1),
            own_dst.expand(batch, -1, -1).gather(2, nearest.gather(2, merged)).flatten(1),
        )
    return Plan.from_owners(owners, tokens - len(src) * quota, ops)
