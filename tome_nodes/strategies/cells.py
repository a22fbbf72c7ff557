"""Base of the strategies that keep one dst token in every cell (paper, section 4.2)."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..ops import Operations
from ..ops.random_picks import pick_per_cell
from ..settings.config import ToMeConfig
from .plan import Grid, Plan
from .strategy import Strategy

Key = TypeVar("Key")
Value = TypeVar("Value")

# The lengths of a video's cells to choose from, in frames; the better ones come first.
_FRAMES_OF_CELL = (4, 5, 3, 2)


@dataclass(frozen=True)
class Cells:
    """How the tokens of a grid are cut into cells.

    Attributes:
        grid: the tokens as rows and columns; a frame of a video is one row.
        sy: height of a cell in rows.
        sx: width of a cell in columns.
        count: how many whole cells there are, down and across.
    """

    grid: Grid
    sy: int
    sx: int
    count: Grid


class CellStrategy(Strategy):
    """Merges src tokens into dst tokens, of which every cell has one.

    The split into src and dst depends only on the step and the grid, so all blocks of a level share
    it. Subclasses define :meth:`match`.

    Attributes:
        made: what is made once for all blocks of a step, by :func:`made_once`.
    """

    def __init__(self, config: ToMeConfig, ops: Operations):
        super().__init__(config, ops)
        self._key: Tensor | None = None
        self.made: dict[Hashable, Any] = {}

    @classmethod
    def ratio_cap(cls, config: ToMeConfig, frames: int = 1) -> float:
        return _share_allowed(_cell_sizes(config, frames)[-1])

    def slots(self, grid: Grid, ratio: float) -> int:
        _, merges = self.cut(grid, ratio)
        return grid.tokens - merges

    def begin(self, key: Tensor) -> None:
        self._key = key
        self.made = {}

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan | None:
        cells, merges = self.cut(grid, ratio)
        return self.match(features, cells, merges) if merges else None

    def cut(self, grid: Grid, ratio: float) -> tuple[Cells, int]:
        """How a grid is cut, and how many of its tokens merge."""
        cells = self.cells_of(grid, ratio)
        kept = cells.count.tokens
        if kept == 0:
            return cells, 0
        merges, most = int(grid.tokens * ratio), grid.tokens - kept
        # Not by min: with symbolic sizes, the compiler would take twice as long for the graph.
        return cells, merges if merges < most else most

    def cells_of(self, grid: Grid, ratio: float) -> Cells:
        """How a grid is cut, with the smallest cells that allow the ratio, or else the largest.

        A cell of a video is several frames long and part of a row wide.
        """
        sizes = _cell_sizes(self.config, grid.frames)
        large_enough = (size for size in sizes if _share_allowed(size) >= ratio)
        sy, sx = next(large_enough, sizes[-1])
        flat = grid if grid.frames == 1 else Grid(grid.frames, grid.height * grid.width)
        return Cells(flat, sy, sx, flat.cells(sy, sx))

    def match(self, features: Tensor, cells: Cells, merges: int) -> Plan | None:
        """The plan that merges ``merges`` src tokens; None if rounding leaves none to merge."""
        raise NotImplementedError

    @property
    def key(self) -> Tensor:
        """The key of this step's random picks, a scalar int64 tensor."""
        if self._key is None:
            raise RuntimeError("begin must come before plan")
        return self._key

    def picks(self, cells: Cells) -> Tensor:
        """Which token of each cell is its dst in this step, ``[cells]`` int64."""
        count = cells.count
        if not self.config.use_rand:
            return self.key.new_zeros(count.tokens)
        return pick_per_cell(self.key, count.height, count.width, cells.sy * cells.sx)


def made_once(made: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """The value of a key, which is made when it is first needed.

    While a model is compiled, the value is made each time. The compiler removes repetitions itself,
    and otherwise its graph would depend on the values that are kept.
    """
    if torch.compiler.is_compiling():
        return make()
    if key not in made:
        made[key] = make()
    return made[key]


def _cell_sizes(config: ToMeConfig, frames: int) -> tuple[tuple[int, int], ...]:
    """The sizes of cells to choose from, height and width, the smallest first."""
    if frames > 1:
        # Cells of few tokens in many frames are best: benchmarks/FIDELITY.md.
        return ((frames_of_cell(frames), min(config.sx, config.sy)),)
    return config.cell_sizes


def _share_allowed(size: tuple[int, int]) -> float:
    """The largest share of the tokens that can merge in cells of a size."""
    return 1 - 1 / math.prod(size)


def frames_of_cell(frames: int) -> int:
    """The length of a cell, in frames, that leaves the fewest frames of a video over."""
    lengths = [length for length in _FRAMES_OF_CELL if length <= frames]
    return min(lengths, key=lambda length: frames % length)


def split_cells(grid: Grid, sy: int, sx: int, picks: Tensor) -> tuple[Tensor, Tensor]:
    """Split the tokens of whole cells into src and dst.

    Args:
        grid: the feature map.
        sy: height of a cell.
        sx: width of a cell.
        picks: ``[cells]`` int64, which token of a cell, counted row by row, is the dst.

    Returns:
        Token indices, int64: src ``[rows, columns, sy * sx - 1]`` and dst ``[rows, columns]``.
    """
    cells = grid.cells(sy, sx)
    # Not by slices: the compiler would make one graph for sides that cells fill and one for others.
    rows = torch.arange(cells.height * sy, device=picks.device).view(cells.height, 1, sy, 1)
    columns = torch.arange(cells.width * sx, device=picks.device).view(1, cells.width, 1, sx)
    by_cell = (rows * grid.width + columns).flatten(2)
    picks = picks.view(cells.height, cells.width, 1)
    others = torch.arange(sy * sx - 1, device=picks.device)
    others = others + (others >= picks)
    return by_cell.gather(2, others), by_cell.gather(2, picks).squeeze(2)
