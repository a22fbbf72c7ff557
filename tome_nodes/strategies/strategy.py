"""The interface of a strategy: how tokens are grouped, and what else is known about it."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from ..merging.layout import Grid
from ..merging.plan import Plan
from ..ops import Operations
from ..settings.config import ToMeConfig

PlansOf = Callable[[Tensor, Grid, Sequence[float]], list[Plan | None]]
"""The type of :meth:`Strategy.plans`."""


class Strategy:
    """Groups the tokens of a grid; made for one model on one device.

    What is known without an instance is an attribute of the class, with the value that most
    strategies have.
    """

    uses_cells: ClassVar[bool] = True
    """Whether the grid is cut into cells of ``sy`` by ``sx`` tokens, one of which always stays."""

    follows_ratio: ClassVar[bool] = True
    """Whether the ratio sets how many tokens merge, not only whether any do."""

    compares_afar: ClassVar[bool] = False
    """Whether tokens are compared over the whole grid, which is slow."""

    least_tokens: ClassVar[int] = 4096
    """The smallest grid worth matching on a GPU, in tokens, by arithmetic."""

    least_tokens_at_calls: ClassVar[int] = 4096
    """The same where keys and values merge in the attention of a transformer, which is wider."""

    least_tokens_with_kernels: ClassVar[int] = 4096
    """The same if the strategy runs on Triton kernels."""

    def __init__(self, config: ToMeConfig, ops: Operations):
        self.config = config
        self.ops = ops

    @classmethod
    def ratio_cap(cls, config: ToMeConfig, frames: int = 1) -> float:
        """The largest share of the tokens that can merge, given the number of frames."""
        return 1 - 1 / (config.sx * config.sy) if cls.uses_cells else 1.0

    def begin(self, key: Tensor) -> None:
        """Begin an evaluation; ``key``, a scalar int64 tensor, decides its random picks."""

    def plans(self, features: Tensor, grid: Grid, ratios: Sequence[float]) -> list[Plan | None]:
        """A plan for each ratio; a strategy that matches tokens does so once for all.

        Args:
            features: ``[batch, tokens, channels]``.
            grid: that of the tokens.
            ratios: for each plan, the share of the tokens to merge.

        Returns:
            A plan for each ratio, None if nothing would merge. With a strategy that matches, tokens
            that merge at one ratio also merge at a larger one.
        """
        raise NotImplementedError

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan | None:
        """The plan for one ratio; see :meth:`plans`."""
        return self.plans(features, grid, [ratio])[0]
