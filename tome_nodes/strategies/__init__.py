"""The ways to group tokens, one file each."""

from collections.abc import Mapping

from ..ops import Operations
from ..settings.config import ToMeConfig
from .bipartite import BipartiteStrategy
from .cluster import ClusterStrategy
from .strategy import Strategy
from .window import WindowStrategy

STRATEGIES: Mapping[str, type[Strategy]] = {
    "bipartite": BipartiteStrategy,
    "window": WindowStrategy,
    "cluster": ClusterStrategy,
}
"""The strategies by their name in a config."""


def strategy_class(config: ToMeConfig) -> type[Strategy]:
    """The class of the strategy that a config names."""
    return STRATEGIES[config.strategy]


def make_strategy(config: ToMeConfig, ops: Operations) -> Strategy:
    """The strategy that a config names, running on ``ops``."""
    return strategy_class(config)(config, ops)
