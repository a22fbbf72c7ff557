"""Lossless plans: with one, a model must give the output of the unpatched model."""

import torch
from torch import Tensor

from tome_nodes.merging.engine import MakeStrategy
from tome_nodes.ops import Operations
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies.plan import Grid, Plan
from tome_nodes.strategies.strategy import Strategy


class LosslessStrategy(Strategy):
    """Makes a plan where another strategy does, with one slot per token, in shuffled order."""

    def __init__(self, strategy: Strategy):
        super().__init__(strategy.config, strategy.ops)
        self.strategy = strategy

    def begin(self, key: Tensor) -> None:
        self.strategy.begin(key)

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan | None:
        if self.strategy.plan(features, grid, ratio) is None:
            return None
        generator = torch.Generator().manual_seed(grid.tokens)
        order = [torch.randperm(grid.tokens, generator=generator) for _ in features]
        slots = torch.stack(order).to(features.device)
        return Plan.from_slots(slots, grid.tokens, self.ops)


def lossless(make_strategy: MakeStrategy) -> MakeStrategy:
    """Makes the lossless counterparts of the strategies that ``make_strategy`` makes."""

    def make(config: ToMeConfig, ops: Operations) -> Strategy:
        return LosslessStrategy(make_strategy(config, ops))

    return make
