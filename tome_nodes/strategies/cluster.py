"""Clusters by similarity to the mean token, as a published summary of the method describes it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..merging.layout import Grid
from ..merging.plan import Plan, SlotPlan
from ..ops import TORCH, Operations
from .strategy import Strategy


class ClusterStrategy(Strategy):
    """Merges tokens of about equal similarity to the mean token, anywhere in the picture."""

    uses_cells = False
    compares_afar = True

    def plans(self, features: Tensor, grid: Grid, ratios: Sequence[float]) -> list[Plan | None]:
        slots = [grid.tokens - int(grid.tokens * ratio) for ratio in ratios]
        distinct = {count for count in slots if count < grid.tokens}
        made = {count: cluster(features, count, self.ops) for count in distinct}
        return [made.get(count) for count in slots]


@torch.no_grad()
def cluster(features: Tensor, slots: int, ops: Operations = TORCH) -> SlotPlan:
    """Cut the tokens, ranked by cosine similarity to their mean, into ``slots`` equal groups.

    Args:
        features: ``[batch, tokens, channels]``.
        slots: number of groups, at most ``tokens``; their sizes differ by at most one.
        ops: the operations that the plan uses.
    """
    batch, tokens, _ = features.shape
    similarity = F.cosine_similarity(features, features.mean(1, keepdim=True), dim=2)
    order = similarity.argsort(dim=1, stable=True)
    group = torch.arange(tokens, device=features.device) * slots // tokens
    groups = torch.empty_like(order).scatter_(1, order, group.expand(batch, -1))
    return SlotPlan.from_slots(groups, slots, ops)
