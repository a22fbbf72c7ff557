"""Pooling: every cell merges into one slot, without comparing tokens.

This is the downsampling of ToDo (Smith et al., IJCAI 2024) as a plan. It needs neither similarities
nor indices: merging takes the mean of each cell, and unmerging repeats it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..merging.layout import Grid
from ..merging.plan import Plan, plan_by_frame
from ..settings.config import ToMeConfig
from .strategy import Strategy

NEAREST_SHARE = 0.75
"""The share of the top left token in pooled keys and values, the rest being that of the mean.
`benchmarks/FIDELITY.md` compares others."""


@dataclass(frozen=True, eq=False)
class PoolPlan(Plan):
    """A plan whose slots are the cells of a grid, including partial ones at its edges.

    Attributes:
        batch: number of samples.
        grid: the grid of the tokens.
        sy: height of a cell in tokens.
        sx: width of a cell in tokens.
        device: device of the tokens.
        slot_count: see :class:`tome_nodes.merging.plan.Plan`.
    """

    batch: int
    grid: Grid
    sy: int
    sx: int
    device: torch.device
    slot_count: int

    @classmethod
    def of(cls, batch: int, grid: Grid, sy: int, sx: int, device: torch.device) -> "PoolPlan":
        """The plan for ``batch`` samples of a grid cut into cells of ``sy`` by ``sx`` tokens."""
        return cls(batch, grid, sy, sx, device, -(-grid.height // sy) * -(-grid.width // sx))

    def slots(self) -> Tensor:
        rows = torch.arange(self.grid.height, device=self.device) // self.sy
        columns = torch.arange(self.grid.width, device=self.device) // self.sx
        slots = rows[:, None] * -(-self.grid.width // self.sx) + columns
        return slots.flatten().expand(self.batch, -1)

    def log_sizes(self) -> Tensor:
        ones = torch.ones(1, 1, self.grid.height, self.grid.width, device=self.device)
        sums = F.avg_pool2d(
            ones, (self.sy, self.sx), ceil_mode=True, count_include_pad=False, divisor_override=1
        )
        return sums.log().flatten(1).expand(self.batch, -1)

    def is_even(self) -> bool:
        return self.grid.height % self.sy == 0 and self.grid.width % self.sx == 0

    def fits(self, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[:2] == (self.batch, self.grid.tokens)

    def merge(self, x: Tensor) -> Tensor:
        image = x.mT.unflatten(2, (self.grid.height, self.grid.width))
        cells = F.avg_pool2d(image, (self.sy, self.sx), ceil_mode=True, count_include_pad=False)
        return cells.flatten(2).mT

    def merge_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means for queries; for keys and values, a blend of the mean and the top left token.

        The single token is as sharp as unmerged tokens, and the mean represents the whole cell
        (BiGain, CVPR 2026).
        """
        means = self.merge(x)
        blend = self._blend(means, x)
        return means, blend, blend

    def merge_keys(self, k: Tensor, heads: int) -> Tensor:
        """Blends of mean and top left token, as in :meth:`merge_inputs`."""
        return self._blend(self.merge(k), k)

    def merge_values(self, v: Tensor) -> Tensor:
        """Blends of mean and top left token, as in :meth:`merge_inputs`."""
        return self._blend(self.merge(v), v)

    def _blend(self, means: Tensor, x: Tensor) -> Tensor:
        image = x.unflatten(1, (self.grid.height, self.grid.width))
        return means.lerp(image[:, :: self.sy, :: self.sx].flatten(1, 2), NEAREST_SHARE)

    def unmerge(self, y: Tensor) -> Tensor:
        rows, columns = -(-self.grid.height // self.sy), -(-self.grid.width // self.sx)
        image = y.view(self.batch, rows, 1, columns, 1, -1)
        image = image.expand(-1, -1, self.sy, -1, self.sx, -1)
        image = image.reshape(self.batch, rows * self.sy, columns * self.sx, -1)
        return image[:, : self.grid.height, : self.grid.width].flatten(1, 2)


class PoolStrategy(Strategy):
    """Merges whole cells; any ratio above 0 merges all of them."""

    has_one_source = False

    @classmethod
    def ratio_cap(cls, config: ToMeConfig, frames: int = 1) -> None:
        return None

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan | None:
        if grid.frames > 1:
            return plan_by_frame(lambda own, frame: self.plan(own, frame, ratio), features, grid)
        cell = self.config.sy, self.config.sx
        plan = PoolPlan.of(len(features), grid, *cell, features.device)
        return plan if ratio and plan.slot_count < grid.tokens else None
