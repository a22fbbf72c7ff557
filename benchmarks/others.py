"""Token reduction as others published it, on our host."""

from collections.abc import Callable
from typing import Any

import torch
from tomesd.merge import bipartite_soft_matching_random2d
from torch import Tensor

from tome_nodes.ops import TORCH, Operations
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies.plan import Grid, Plan
from tome_nodes.strategies.strategy import Strategy

ONCE: dict[str, Any] = {"proportional_attn": False}
"""Settings under which a merged key counts once, as others published it."""


def plan_of_functions(
    features: Tensor,
    slots: int,
    merge: Callable[[Tensor], Tensor],
    unmerge: Callable[[Tensor], Tensor],
) -> Plan:
    """A plan made of two functions, for settings under which merged keys count once.

    The plan does not know the slot of each token.
    """
    batch, tokens, _ = features.shape
    own = Operations(
        "functions",
        merge=lambda x, *_: merge(x),
        merge_keys=lambda x, *_: (merge(x), merge(x)),
        unmerge=lambda y, *_: unmerge(y),
        add_change=lambda x, before, after, *_: x + unmerge(after - before),
        widen=TORCH.widen,
    )
    unknown = features.new_empty((batch, tokens), dtype=torch.int64)
    return Plan(unknown, unknown, unknown, features.new_zeros(batch, slots), slots, own)


class TomesdStrategy(Strategy):
    """The functions of the reference implementation (tomesd)."""

    def __init__(self, config: ToMeConfig, ops: Operations):
        super().__init__(config, ops)
        self.generator: torch.Generator | None = None

    def begin(self, key: Tensor) -> None:
        if self.generator is None:
            self.generator = torch.Generator(device=key.device).manual_seed(0)

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan:
        merges = int(grid.tokens * ratio)
        sizes = grid.width, grid.height, self.config.sx, self.config.sy, merges
        functions = bipartite_soft_matching_random2d(features, *sizes, generator=self.generator)
        return plan_of_functions(features, grid.tokens - merges, *functions)


class ToDoStrategy(Strategy):
    """Keeps the top left token of each 2x2 cell, as ToDo (Smith et al., IJCAI 2024) does.

    Its ratio is always 0.75. In a video, each frame is a picture of its own.
    """

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan:
        frames, height, width = grid.frames, grid.height, grid.width
        rows, columns = -(-height // 2), -(-width // 2)

        def merge(x: Tensor) -> Tensor:
            return x.unflatten(1, (frames, height, width))[:, :, ::2, ::2].flatten(1, 3)

        def unmerge(y: Tensor) -> Tensor:
            video = y.unflatten(1, (frames, rows, columns))
            video = video.repeat_interleave(2, 2).repeat_interleave(2, 3)
            return video[:, :, :height, :width].flatten(1, 3)

        return plan_of_functions(features, frames * rows * columns, merge, unmerge)
