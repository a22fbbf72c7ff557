"""A sampling run in detail: the tokens that merged in each step, and how long blocks took.

A run is recorded only if a ToMe Report is connected. So as not to slow the run down, the recorder
waits for the device only afterwards, and then copies everything at once.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..merging.evaluation import Evaluation
from ..merging.overrides import Forward
from ..ops.clock import Clock
from ..strategies.plan import Grid


@dataclass(frozen=True)
class BlockRecord:
    """A transformer block over the whole run.

    Attributes:
        before: number of tokens that entered it.
        after: the lowest number of tokens that it, or modules in it, ran on.
        seconds: its mean duration, None if it could not be measured.
    """

    before: int
    after: int
    seconds: float | None


@dataclass(frozen=True)
class Recording:
    """A whole run.

    Attributes:
        latent: the grid of the latent.
        slots: by step and grid, the slot of each token, ``[frames, height, width]`` int64. It is
            taken from the first sample of the batch and the first block that merged the grid.
        blocks: by the name of a block, what it did.
        seconds: time from the first evaluation of the model to the end of the run.
    """

    latent: Grid
    slots: Mapping[tuple[int, Grid], np.ndarray]
    blocks: Mapping[str, BlockRecord]
    seconds: float

    @property
    def levels(self) -> dict[int, Grid]:
        """The grids that merged, by level, the largest first."""
        levels: dict[int, Grid] = {}
        for grid in sorted({grid for _, grid in self.slots}, key=lambda grid: -grid.tokens):
            level = max(1, round((self.latent.tokens * grid.frames / grid.tokens) ** 0.5))
            # Two grids can round to the same level; the larger then represents it.
            levels.setdefault(level, grid)
        return levels


class Recorder:
    """Records a run while it happens."""

    def __init__(self, latent: Grid, device: torch.device):
        """Start recording, just before the first evaluation of a model on ``device``."""
        self._latent = latent
        self._clock = Clock(device)
        self._started = time.perf_counter()
        self._slots: dict[tuple[int, Grid], Tensor] = {}
        self._tokens: dict[str, tuple[int, int]] = {}
        self._blocks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def timed(self, block: str, forward: Forward) -> Forward:
        """The forward of a block, which notes when it begins and ends."""
        spans = self._blocks[block]

        @wraps(forward)
        def timed_forward(*args: Any, **kwargs: Any) -> Any:
            # While torch.compile traces the code, the model does not run.
            if torch.compiler.is_compiling() or not self._clock.can_measure:
                return forward(*args, **kwargs)
            start = self._clock.now()
            result = forward(*args, **kwargs)
            spans.append((start, self._clock.now()))
            return result

        return timed_forward

    def note(self, evaluation: Evaluation) -> None:
        """Record what an evaluation did."""
        for outcome in evaluation.outcomes:
            for block in outcome.blocks:
                _, after = self._tokens.get(block, (0, outcome.after))
                self._tokens[block] = outcome.before, min(after, outcome.after)
            plan, grid = outcome.plan, outcome.grid
            if plan is not None and grid is not None and (evaluation.step, grid) not in self._slots:
                sides = grid.frames, grid.height, grid.width
                self._slots[evaluation.step, grid] = plan.slots()[0].view(sides)

    def finish(self) -> Recording:
        """End the recording, and return it as plain numbers."""
        self._clock.wait()
        seconds = time.perf_counter() - self._started
        between = self._clock.between
        means = {
            name: sum(between(*span) for span in spans) / len(spans)
            for name, spans in self._blocks.items()
            if spans
        }
        return Recording(
            self._latent,
            {place: slots.cpu().numpy() for place, slots in self._slots.items()},
            {name: BlockRecord(*tokens, means.get(name)) for name, tokens in self._tokens.items()},
            seconds,
        )
