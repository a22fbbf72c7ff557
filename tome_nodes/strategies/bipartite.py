"""Bipartite soft matching, the grouping of the paper (arXiv 2303.17604, section 4.1)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import TORCH, Operations
from .cells import Cells, CellStrategy, made_once, split_cells
from .plan import Grid, Plan

# The most similarities in memory at once; a larger map is matched in pieces.
_SCORES_AT_ONCE = 2**24


class BipartiteStrategy(CellStrategy):
    """Each src token may merge into any dst token of the map."""

    def match(self, features: Tensor, cells: Cells, merges: int) -> Plan:
        size = cells.grid, cells.sy, cells.sx
        src, dst = made_once(self.made, size, lambda: split_tokens(*size, self.picks(cells)))
        return match(features, src, dst, merges, self.ops)


def split_tokens(grid: Grid, sy: int, sx: int, picks: Tensor) -> tuple[Tensor, Tensor]:
    """Split the tokens of a grid into src and dst; arguments as for ``split_cells``.

    Returns:
        ``src`` and ``dst`` token indices, int64. dst has one token of every whole cell. src has all
        others, including those in rows and columns that fill no cell.
    """
    src, dst = split_cells(grid, sy, sx, picks)
    rows, columns = dst.shape
    tokens = torch.arange(grid.tokens, device=picks.device).view(grid.height, grid.width)
    below, beside = tokens[rows * sy :], tokens[: rows * sy, columns * sx :]
    return torch.cat([src.flatten(), below.flatten(), beside.flatten()]), dst.flatten()


@torch.no_grad()
def match(
    features: Tensor,
    src: Tensor,
    dst: Tensor,
    merges: int,
    ops: Operations = TORCH,
) -> Plan:
    """Merge the src tokens that are most similar to a dst into their nearest dst.

    Args:
        features: ``[batch, tokens, channels]``, compared by cosine similarity.
        src: token indices, int64, none of them in ``dst``.
        dst: token indices, int64, at least one.
        merges: how many src tokens of a sample merge, at most ``len(src)``.
        ops: the operations that the plan uses.

    Returns:
        A plan of ``tokens - merges`` slots.
    """
    batch, tokens, _ = features.shape
    directions = F.normalize(features, dim=-1)
    similarity, nearest = _nearest(directions.index_select(1, src), directions.index_select(1, dst))
    merged = similarity.topk(merges, dim=1, sorted=False).indices
    owners = torch.arange(tokens, device=features.device).repeat(batch, 1)
    owners.scatter_(1, src[merged], dst[nearest.gather(1, merged)])
    return Plan.from_owners(owners, tokens - merges, ops)


def _nearest(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The largest dot product of each query with any key, and the index of that key.

    ``[batch, queries, channels]`` and ``[batch, keys, channels]`` give two ``[batch, queries]``.
    """
    rows = max(1, _SCORES_AT_ONCE // (keys.shape[0] * keys.shape[1]))
    best = [(piece @ keys.mT).max(dim=2) for piece in queries.split(rows, dim=1)]
    return torch.cat([b.values for b in best], 1), torch.cat([b.indices for b in best], 1)
