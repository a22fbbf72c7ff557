"""Clusters by similarity to the mean token, as one published summary of the method describes it."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ToMeConfig
from ..grid import Grid
from ..ops import operations, reference
from ..plan import Plan


class ClusterStrategy:
    """Tokens of like similarity to the mean token merge, wherever they are in the picture."""

    def __init__(self, config: ToMeConfig):
        self.config = config
        self.ops = operations(config.backend)
        self._ratio = config.ratio

    def start_step(self, key: Tensor, ratio: float) -> None:
        """Begin a model evaluation at ``ratio``; clustering draws nothing at random."""
        self._ratio = ratio

    def plan(self, features: Tensor, grid: Grid) -> Plan | None:
        """A plan for ``[batch, tokens, channels]`` features, or None where no token would merge."""
        return self._plan(features, grid, self._ratio)

    def plans(self, features: Tensor, grid: Grid) -> tuple[Plan | None, Plan | None]:
        """Plans at ``ratio`` and at ``kv_ratio``."""
        return self.plan(features, grid), self._plan(features, grid, self.config.kv_ratio)

    def _plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan | None:
        slots = grid.tokens - int(grid.tokens * ratio)
        return cluster(features, slots, self.ops) if slots < grid.tokens else None


@torch.no_grad()
def cluster(features: Tensor, slots: int, ops: ModuleType = reference) -> Plan:
    """Cut the tokens, ranked by cosine similarity to their mean, into ``slots`` equal groups.

    Args:
        features: ``[batch, tokens, channels]``.
        slots: number of groups, at most ``tokens``; their sizes differ by one at most.
        ops: what the plan merges and unmerges with.
    """
    batch, tokens, _ = features.shape
    similarity = F.cosine_similarity(features, features.mean(1, keepdim=True), dim=2)
    order = similarity.argsort(dim=1, stable=True)
    group = torch.arange(tokens, device=features.device) * slots // tokens
    groups = torch.empty_like(order).scatter_(1, order, group.expand(batch, -1))
    return Plan.from_slots(groups, slots, ops)
