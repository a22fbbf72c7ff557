"""Pooling: every whole cell merges into one slot, without looking at the tokens.

The downsampling of ToDo (Smith et al., IJCAI 2024) as a plan. It needs neither similarities nor
indices: merging is a mean over the cells of an image, unmerging a repetition.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ToMeConfig
from ..grid import Grid

NEAREST_SHARE = 0.75
"""Share of one token in pooled keys and values; `benchmarks/FIDELITY.md` has what others gave."""


@dataclass(frozen=True)
class PoolPlan:
    """A plan whose slots are the cells of a grid, the cut ones at its edges included.

    It merges and unmerges as :class:`tome_nodes.plan.Plan` does.
    """

    batch: int
    height: int
    width: int
    sy: int
    sx: int
    device: torch.device

    @property
    def slot_count(self) -> int:
        rows, columns = self._cells
        return rows * columns

    @property
    def _cells(self) -> tuple[int, int]:
        return -(-self.height // self.sy), -(-self.width // self.sx)

    @property
    def log_sizes(self) -> Tensor | None:
        """The logarithm of how many tokens each slot holds, None where all hold as many.

        ``[batch, slots]`` float32.
        """
        if self.height % self.sy == 0 and self.width % self.sx == 0:
            return None
        ones = torch.ones(1, 1, self.height, self.width, device=self.device)
        whole = F.avg_pool2d(
            ones, (self.sy, self.sx), ceil_mode=True, count_include_pad=False, divisor_override=1
        )
        return whole.log().flatten(1).expand(self.batch, -1)

    @property
    def slots(self) -> Tensor:
        """The slot of each token, ``[batch, tokens]`` int64, from 0 to ``slot_count - 1``."""
        rows = torch.arange(self.height, device=self.device) // self.sy
        columns = torch.arange(self.width, device=self.device) // self.sx
        slots = rows[:, None] * self._cells[1] + columns
        return slots.flatten().expand(self.batch, -1)

    def fits(self, x: Tensor) -> bool:
        """Whether ``x`` is ``[batch, tokens, channels]`` of the plan's batch and tokens."""
        return x.ndim == 3 and x.shape[:2] == (self.batch, self.height * self.width)

    def merge(self, x: Tensor) -> Tensor:
        """The mean of each cell: ``[batch, tokens, channels]`` to ``[batch, slots, channels]``."""
        image = x.mT.unflatten(2, (self.height, self.width))
        cells = F.avg_pool2d(image, (self.sy, self.sx), ceil_mode=True, count_include_pad=False)
        return cells.flatten(2).mT

    def merge_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What queries, keys and values are made of: means, leaning on one token but for queries.

        The top left token of a cell is as sharp as all are, and the mean knows them all (BiGain,
        CVPR 2026).

        ``[batch, tokens, channels]`` to three ``[batch, slots, channels]``.
        """
        means = self.merge(x)
        nearest = x.unflatten(1, (self.height, self.width))[:, :: self.sy, :: self.sx]
        blend = means.lerp(nearest.flatten(1, 2), NEAREST_SHARE)
        return means, blend, blend

    def unmerge(self, y: Tensor) -> Tensor:
        """Each token's cell: ``[batch, slots, channels]`` to ``[batch, tokens, channels]``."""
        rows, columns = self._cells
        image = y.view(self.batch, rows, 1, columns, 1, -1)
        image = image.expand(-1, -1, self.sy, -1, self.sx, -1)
        image = image.reshape(self.batch, rows * self.sy, columns * self.sx, -1)
        return image[:, : self.height, : self.width].flatten(1, 2)

    def add_change(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """``x + unmerge(after - before)``: tokens, and what their slots went through."""
        return x + self.unmerge(after - before)


class PoolStrategy:
    """Merges whole cells; a ratio only says whether to, since a cell has but one mean."""

    def __init__(self, config: ToMeConfig):
        self.config = config
        self._ratio = config.ratio

    def start_step(self, key: Tensor, ratio: float) -> None:
        """Begin an evaluation at ``ratio``; pooling draws nothing at random."""
        self._ratio = ratio

    def plan(self, features: Tensor, grid: Grid) -> PoolPlan | None:
        """A plan for ``[batch, tokens, channels]`` features, or None where no token would merge."""
        return self._plan(features, grid) if self._ratio else None

    def plans(self, features: Tensor, grid: Grid) -> tuple[PoolPlan | None, PoolPlan | None]:
        """Plans at the ratio of the step and at ``kv_ratio``."""
        keys = self._plan(features, grid) if self.config.kv_ratio else None
        return self.plan(features, grid), keys

    def _plan(self, features: Tensor, grid: Grid) -> PoolPlan | None:
        cell = self.config.sy, self.config.sx
        plan = PoolPlan(len(features), grid.height, grid.width, *cell, features.device)
        return plan if plan.slot_count < grid.tokens else None
