"""How tokens are grouped: each strategy turns the features of a grid into a plan."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from ..config import ToMeConfig
from ..grid import Grid
from ..plan import Plan
from .bipartite import BipartiteStrategy
from .cluster import ClusterStrategy
from .pool import PoolPlan, PoolStrategy
from .window import WindowStrategy

AnyPlan = Plan | PoolPlan


class Strategy(Protocol):
    """Groups tokens; made anew for each model in each sampling run."""

    def start_step(self, key: Tensor, ratio: float) -> None:
        """Begin an evaluation at ``ratio``, its random picks keyed by a scalar int64 tensor."""

    def plan(self, features: Tensor, grid: Grid) -> AnyPlan | None:
        """A plan for ``[batch, tokens, channels]`` features, None where nothing would merge."""

    def plans(self, features: Tensor, grid: Grid) -> tuple[AnyPlan | None, AnyPlan | None]:
        """Plans at the ratio of the step and at ``kv_ratio``, from one matching.

        Asked for where ``kv_ratio`` is not -1.
        """


STRATEGIES: Mapping[str, Callable[[ToMeConfig], Strategy]] = MappingProxyType(
    {
        "bipartite": BipartiteStrategy,
        "window": WindowStrategy,
        "pool": PoolStrategy,
        "cluster": ClusterStrategy,
    }
)
"""The strategies by the name that a config gives them."""


def make_strategy(config: ToMeConfig) -> Strategy:
    """The strategy of a config."""
    return STRATEGIES[config.strategy](config)
