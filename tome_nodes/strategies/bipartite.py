"""Bipartite soft matching, the grouping of the paper (arXiv 2303.17604, section 4.1)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ToMeConfig
from ..grid import Grid
from ..picks import pick_per_cell
from ..plan import Plan

# Scores held in memory at once; a larger map is matched in several pieces.
_SCORES_AT_ONCE = 2**24


class BipartiteStrategy:
    """Plans of one model in one sampling run.

    The split into src and dst tokens depends on the step and the grid only, so all blocks of a
    level share it.
    """

    def __init__(self, config: ToMeConfig):
        self.config = config
        self._key: Tensor | None = None
        self._splits: dict[Grid, tuple[Tensor, Tensor]] = {}

    def start_step(self, key: Tensor) -> None:
        """Begin a model evaluation whose random picks hang on ``key``, a scalar int64 tensor."""
        self._key = key
        self._splits = {}

    def plan(self, features: Tensor, grid: Grid) -> Plan | None:
        """A plan for ``[batch, tokens, channels]`` features, or None where no token would merge."""
        config = self.config
        cells = grid.cells(config.sy, config.sx)
        merges = min(int(grid.tokens * config.ratio), grid.tokens - cells.tokens)
        if merges == 0 or cells.tokens == 0:
            return None
        if grid not in self._splits:
            self._splits[grid] = split_tokens(grid, config.sy, config.sx, self._picks(cells))
        src, dst = self._splits[grid]
        return match(features, src, dst, merges)

    def _picks(self, cells: Grid) -> Tensor:
        if self._key is None:
            raise RuntimeError("start_step must come before plan")
        if not self.config.use_rand:
            return self._key.new_zeros(cells.tokens)
        return pick_per_cell(self._key, cells, self.config.sy * self.config.sx)


def split_tokens(grid: Grid, sy: int, sx: int, picks: Tensor) -> tuple[Tensor, Tensor]:
    """Split the tokens of a grid into src and dst.

    Args:
        grid: the feature map.
        sy: height of a cell.
        sx: width of a cell.
        picks: ``[cells]`` int64, which token of its cell, row by row, is the dst.

    Returns:
        ``src`` and ``dst`` token indices, int64; dst has one token for each whole cell, src has
        all the others, the rows and columns that fill no cell included.
    """
    cells = grid.cells(sy, sx)
    tokens = torch.arange(grid.tokens, device=picks.device).view(grid.height, grid.width)
    height, width = cells.height * sy, cells.width * sx
    by_cell = tokens[:height, :width].view(cells.height, sy, cells.width, sx)
    by_cell = by_cell.transpose(1, 2).reshape(cells.tokens, sy * sx)
    picks = picks[:, None]
    others = torch.arange(sy * sx - 1, device=picks.device)
    others = others + (others >= picks)
    src = by_cell.gather(1, others).flatten()
    rest = tokens[height:].flatten(), tokens[:height, width:].flatten()
    return torch.cat([src, *rest]), by_cell.gather(1, picks).flatten()


@torch.no_grad()
def match(features: Tensor, src: Tensor, dst: Tensor, merges: int) -> Plan:
    """Merge the ``merges`` src tokens that are most alike to their best dst into it.

    Args:
        features: ``[batch, tokens, channels]``, compared by cosine similarity.
        src: token indices, int64; none of them in ``dst``.
        dst: token indices, int64, at least one.
        merges: how many src tokens of each sample merge, at most ``len(src)``.

    Returns:
        A plan of ``tokens - merges`` slots.
    """
    batch, tokens, _ = features.shape
    directions = F.normalize(features, dim=-1)
    similarity, nearest = _nearest(directions.index_select(1, src), directions.index_select(1, dst))
    merged = similarity.topk(merges, dim=1, sorted=False).indices
    owners = torch.arange(tokens, device=features.device).repeat(batch, 1)
    owners.scatter_(1, src[merged], dst[nearest.gather(1, merged)])
    return Plan.from_owners(owners, tokens - merges)


def _nearest(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The largest dot product of each query with any key, and the index of that key.

    ``[batch, queries, channels]`` and ``[batch, keys, channels]`` give two ``[batch, queries]``.
    """
    rows = max(1, _SCORES_AT_ONCE // (keys.shape[0] * keys.shape[1]))
    best = [(piece @ keys.mT).max(dim=2) for piece in queries.split(rows, dim=1)]
    return torch.cat([b.values for b in best], 1), torch.cat([b.indices for b in best], 1)
