"""The interface of a strategy, which decides how tokens are grouped."""

from typing import ClassVar

from torch import Tensor

from ..merging.plan import Grid, Plan
from ..ops import Operations
from ..settings.config import ToMeConfig


class Strategy:
    """Groups the tokens of a grid; made for one model on one device.

    Properties of a strategy that do not depend on the settings are attributes of its class. Here
    they have the values that most strategies share.
    """

    least_tokens: ClassVar[int] = 4096
    """The smallest grid worth matching on a GPU, in tokens; an estimate, not a measurement."""

    least_tokens_with_kernels: ClassVar[int] = 4096
    """The smallest grid worth matching if the strategy runs on Triton kernels."""

    def __init__(self, config: ToMeConfig, ops: Operations):
        self.config = config
        self.ops = ops

    @classmethod
    def ratio_cap(cls, config: ToMeConfig, frames: int = 1) -> float:
        """The largest share of the tokens that can merge, given the number of frames."""
        return 1.0

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
