"""The interface of a strategy, which decides how tokens are grouped."""

from torch import Tensor

from ..ops import Operations
from ..settings.config import ToMeConfig
from .plan import Grid, Plan


class Strategy:
    """Groups the tokens of a grid; made for one model on one device."""

    def __init__(self, config: ToMeConfig, ops: Operations):
        self.config = config
        self.ops = ops

    @classmethod
    def ratio_cap(cls, config: ToMeConfig, frames: int = 1) -> float:
        """The largest share of the tokens that can merge, given the number of frames."""
        return 1.0

    def slots(self, grid: Grid, ratio: float) -> int:
        """How many slots the plan of a grid has; as many as there are tokens if none merge."""
        return grid.tokens - int(grid.tokens * ratio)

    def begin(self, key: Tensor) -> None:
        """Begin an evaluation. ``key``, a scalar int64 tensor, decides its random picks."""

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan | None:
        """How the tokens of a grid merge; None if none would.

        Args:
            features: ``[batch, tokens, channels]``.
            grid: the grid of the tokens.
            ratio: the share of the tokens to merge.
        """
        raise NotImplementedError
