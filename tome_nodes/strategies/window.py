"""Matching within windows: a src token sees only the dst tokens of its own window.

The cost grows with N instead of N squared, and every shape is static. Each window merges the same
number of tokens, which keeps the plan of one part of the picture apart from the others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grid import Grid
from ..plan import Plan
from .cells import CellStrategy, split_cells

WINDOW_SIDE = 8
"""Tokens along the side of a window, where the grid allows."""


class WindowStrategy(CellStrategy):
    """Each src token may merge into a dst token of its window."""

    def split(self, grid: Grid, picks: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`split_windows`."""
        return split_windows(grid, self.config.sy, self.config.sx, picks)

    def match(self, features: Tensor, src: Tensor, dst: Tensor, merges: int) -> Plan | None:
        """See :func:`match_windows`; the merges are shared out evenly, rounded to the nearest."""
        windows, candidates = src.shape
        quota = min(candidates, (merges + windows // 2) // windows)
        return match_windows(features, src, dst, quota) if quota else None


def split_windows(grid: Grid, sy: int, sx: int, picks: Tensor) -> tuple[Tensor, Tensor]:
    """Split the tokens of each window into src and dst.

    Args:
        grid: the feature map.
        sy: height of a cell.
        sx: width of a cell.
        picks: ``[cells]`` int64, which token of its cell, row by row, is the dst.

    Returns:
        Token indices, int64: src ``[windows, cells * (sy * sx - 1)]`` and dst
        ``[windows, cells]``, cells counted in one window. Tokens that fill no window are in
        neither.
    """
    src, dst = split_cells(grid, sy, sx, picks)
    rows, columns = dst.shape
    high, wide = _window_cells(rows, sy), _window_cells(columns, sx)

    def by_window(tokens: Tensor) -> Tensor:
        tokens = tokens[: rows // high * high, : columns // wide * wide]
        tokens = tokens.reshape(rows // high, high, columns // wide, wide, -1)
        return tokens.transpose(1, 2).reshape(rows // high * (columns // wide), -1)

    return by_window(src), by_window(dst)


def _window_cells(cells: int, side: int) -> int:
    """Cells along the side of a window: near ``WINDOW_SIDE`` tokens, with few cells left over."""
    usual = max(1, WINDOW_SIDE // side)
    best = min(usual, cells)
    for choice in range(max(1, usual - 1), min(cells, 2 * usual - 1) + 1):
        if cells % choice < cells % best:
            best = choice
    return best


@torch.no_grad()
def match_windows(features: Tensor, src: Tensor, dst: Tensor, quota: int) -> Plan:
    """In each window, merge the ``quota`` src tokens that are most alike to their best dst into it.

    Args:
        features: ``[batch, tokens, channels]``, compared by cosine similarity.
        src: ``[windows, candidates]`` token indices, int64.
        dst: ``[windows, kept]`` token indices, int64.
        quota: merges in each window, from 1 to ``candidates``.

    Returns:
        A plan of ``tokens - windows * quota`` slots.
    """
    batch, tokens, channels = features.shape
    windows = len(src)
    directions = F.normalize(features, dim=-1)
    queries = directions.index_select(1, src.flatten()).view(batch * windows, -1, channels)
    keys = directions.index_select(1, dst.flatten()).view(batch * windows, -1, channels)
    similarity, nearest = torch.bmm(queries, keys.mT).max(dim=2)
    merged = similarity.topk(quota, dim=1, sorted=False).indices
    chosen = nearest.gather(1, merged).view(batch, windows, quota)
    merged = merged.view(batch, windows, quota)
    owners = torch.arange(tokens, device=features.device).repeat(batch, 1)
    owners.scatter_(
        1,
        src.expand(batch, -1, -1).gather(2, merged).flatten(1),
        dst.expand(batch, -1, -1).gather(2, chosen).flatten(1),
    )
    return Plan.from_owners(owners, tokens - windows * quota)
