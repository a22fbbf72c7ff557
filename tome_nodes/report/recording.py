"""A sampling run in detail: which tokens merged in each step, and how long everything took.

A run is recorded only if a ToMe Report is connected. So as not to slow the run down, the recorder
waits for the device only afterwards, and then copies everything at once.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..merging.layout import Grid
from ..merging.plan import Plan
from ..ops.clock import Clock
from ..patching.outcome import Evaluated, Observer
from ..patching.overrides import Forward
from ..strategies.strategy import PlanOf

MATCHING, MERGING, UNMERGING = "matching", "merging", "unmerging"

_TIMED: Mapping[str, str] = {
    **dict.fromkeys(("merge", "merge_inputs", "merge_keys"), MERGING),
    **dict.fromkeys(("unmerge", "add_change"), UNMERGING),
}
"""The methods of a plan to time, and the name under which their time is summed up."""


@dataclass(frozen=True)
class BlockStep:
    """A transformer block in one step.

    Attributes:
        before: number of tokens that entered it.
        after: number of tokens that it, or modules in it, ran on.
        seconds: its duration, None if it could not be measured.
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
        blocks: what each block did, by its name and the step.
        seconds: time from the first evaluation of the model to the end of the run.
        overhead: how many of these seconds ``matching``, ``merging`` and ``unmerging`` took. None
            if that could not be measured: in a compiled model, or on a device that is neither a
            CPU nor CUDA.
    """

    latent: Grid
    slots: Mapping[tuple[int, Grid], np.ndarray]
    blocks: Mapping[tuple[str, int], BlockStep]
    seconds: float
    overhead: Mapping[str, float] | None

    @property
    def levels(self) -> dict[int, Grid]:
        """The grids that merged, by how many times smaller than the latent they are."""
        grids = {grid for _, grid in self.slots}
        # Two grids can round to the same level; the larger then represents it.
        by_size = sorted(grids, key=lambda grid: grid.tokens)
        levels = {self._level(grid): grid for grid in by_size}
        return dict(sorted(levels.items()))

    def _level(self, grid: Grid) -> int:
        return max(1, round((self.latent.tokens * grid.frames / grid.tokens) ** 0.5))


class Recorder(Observer):
    """Records a run while it happens."""

    follows_blocks = True

    def __init__(self, latent: Grid, device: torch.device):
        """Start recording, just before the first evaluation of a model on ``device``."""
        self._step = 0
        self._latent = latent
        self._clock = Clock(device)
        self._started = time.perf_counter()
        self._slots: dict[tuple[int, Grid], Tensor] = {}
        self._tokens: dict[tuple[str, int], tuple[int, int]] = {}
        self._timings: list[tuple[str, int, Any, Any]] = []

    def watched(self, plan_of: PlanOf) -> PlanOf:
        def watched_plan_of(features: Tensor, grid: Grid, ratio: float) -> Plan | None:
            if torch.compiler.is_compiling():
                return plan_of(features, grid, ratio)
            plan = self.time(MATCHING, plan_of, features, grid, ratio)
            return None if plan is None else cast("Plan", _WatchedPlan(plan, self))

        return watched_plan_of

    def timed(self, block: str, forward: Forward) -> Forward:
        @wraps(forward)
        def timed_forward(*args: Any, **kwargs: Any) -> Any:
            return self.time(block, forward, *args, **kwargs)

        return timed_forward

    def time(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function and return its result; add its time to ``name`` if it can be measured."""
        # While torch.compile traces the code, the model does not run.
        if torch.compiler.is_compiling() or not self._clock.can_measure:
            return function(*args, **kwargs)
        start = self._clock.now()
        result = function(*args, **kwargs)
        self._timings.append((name, self._step, start, self._clock.now()))
        return result

    def begins(self, step: int) -> None:
        self._step = step

    def evaluated(self, result: Evaluated) -> None:
        for outcome in result.outcomes:
            self._tokens[outcome.block, result.step] = outcome.before, outcome.after
            plan, grid = outcome.plan, outcome.grid
            if plan is not None and grid is not None and (result.step, grid) not in self._slots:
                sides = grid.frames, grid.height, grid.width
                self._slots[result.step, grid] = plan.slots()[0].view(sides)

    def finish(self) -> Recording:
        """End the recording, and return it as plain numbers."""
        self._clock.wait()
        seconds = time.perf_counter() - self._started
        by_name: dict[str, float] = dict.fromkeys((MATCHING, MERGING, UNMERGING), 0.0)
        by_step: dict[tuple[str, int], float] = {}
        for name, step, start, end in self._timings:
            taken = self._clock.between(start, end)
            if name in by_name:
                by_name[name] += taken
            by_step[name, step] = by_step.get((name, step), 0.0) + taken
        return Recording(
            self._latent,
            {place: slots.cpu().numpy() for place, slots in self._slots.items()},
            {
                place: BlockStep(*tokens, by_step.get(place))
                for place, tokens in self._tokens.items()
            },
            seconds,
            by_name if self._timings else None,
        )


class _WatchedPlan:
    """A plan whose merging and unmerging are timed; everything else is forwarded to the plan."""

    def __init__(self, plan: Plan, recorder: Recorder):
        self._plan = plan
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._plan, name)
        kind = _TIMED.get(name)
        return value if kind is None else partial(self._recorder.time, kind, value)
