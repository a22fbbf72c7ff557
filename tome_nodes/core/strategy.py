"""What a strategy is: how tokens are grouped, and what others ask of a way to group them."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from ..config import ToMeConfig
from ..ops import Operations
from .grid import Grid
from .plan import Plan

PlansOf = Callable[[Tensor, Grid, Sequence[float]], list[Plan | None]]
"""What :meth:`Strategy.plans` is."""


class Strategy:
    """Groups the tokens of a grid; made for one model on one device.

    The class itself answers what others ask without making one; each answer here is that of most
    strategies.
    """

    uses_cells: ClassVar[bool] = True
    """Whether the grid is cut into cells of ``sy`` by ``sx`` tokens, one of which always stays."""

    follows_ratio: ClassVar[bool] = True
    """Whether the ratio says how many tokens merge, not only whether any do."""

    compares_afar: ClassVar[bool] = False
    """Whether a token is compared with others all over the grid, at a cost to match."""

    least_tokens: ClassVar[int] = 4096
    """The smallest grid that is worth matching on a GPU, in tokens, by arithmetic."""

    least_tokens_with_kernels: ClassVar[int] = 4096
    """The same where the strategy runs on Triton kernels."""

    def __init__(self, config: ToMeConfig, ops: Operations):
        self.config = config
        self.ops = ops

    @classmethod
    def ratio_cap(cls, config: ToMeConfig, frames: int = 1) -> float:
        """The largest share of the tokens of a video, or of a picture, that can merge."""
        return 1 - 1 / (config.sx * config.sy) if cls.uses_cells else 1.0

    def begin(self, key: Tensor) -> None:
        """Begin an evaluation whose random picks are keyed by a scalar int64 tensor."""

    def plans(self, features: Tensor, grid: Grid, ratios: Sequence[float]) -> list[Plan | None]:
        """A plan for each ratio, from one matching where the strategy matches.

        Args:
            features: ``[batch, tokens, channels]``.
            grid: of the tokens.
            ratios: for each plan, the share of the tokens to merge.

        Returns:
            A plan for each ratio, None where nothing would merge. Where tokens are matched, those
            that merge at one ratio merge at a larger one too.
        """
        raise NotImplementedError

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan | None:
        """The plan for one ratio; see :meth:`plans`."""
        return self.plans(features, grid, [ratio])[0]
