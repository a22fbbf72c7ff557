"""The ways to group tokens, one file each."""

from collections.abc import Mapping
from types import MappingProxyType

from ..config import ToMeConfig
from ..core.strategy import Strategy
from ..ops import Operations
from .bipartite import BipartiteStrategy
from .cluster import ClusterStrategy
from .pool import PoolStrategy
from .window import WindowStrategy

STRATEGIES: Mapping[str, type[Strategy]] = MappingProxyType(
    {
        "bipartite": BipartiteStrategy,
        "window": WindowStrategy,
        "pool": PoolStrategy,
        "cluster": ClusterStrategy,
    }
)
"""The strategies by the name that a config gives them."""


def strategy_class(config: ToMeConfig) -> type[Strategy]:
    """The strategy that a config names, to ask what it is like."""
    return STRATEGIES[config.strategy]


def make_strategy(config: ToMeConfig, ops: Operations) -> Strategy:
    """The strategy of a config, to run on some operations."""
    return strategy_class(config)(config, ops)
