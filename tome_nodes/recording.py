"""What one sampling run does in detail: which tokens merged in each step, and how long it took.

A recorder watches only a run that a report is wanted of. Nothing waits for the device before the
run is over; then all is copied from it at once.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .config import ToMeConfig
from .grid import Grid
from .statistics import RunStatistics
from .strategies import AnyPlan, Strategy

if TYPE_CHECKING:
    from .hosts.blocks import MergedBlock

MATCHING, MERGING, UNMERGING = "matching", "merging", "unmerging"


@dataclass(frozen=True)
class BlockStep:
    """A transformer block in one step.

    Attributes:
        before: tokens that entered it.
        after: tokens that it, or modules in it, ran on.
        seconds: that it took, None where it could not be measured.
    """

    before: int
    after: int
    seconds: float | None


@dataclass(frozen=True)
class Recording:
    """A whole run.

    Attributes:
        latent: the grid of the latent.
        slots: by step and feature map, the slot of each token in the first sample of the batch,
            ``[height, width]`` int64, in the block that merged first.
        blocks: what each block did in each step, by its name and the step.
        seconds: from the first evaluation of the model to the end of the run.
        overhead: seconds of ``matching``, ``merging`` and ``unmerging`` in them, None where they
            could not be measured: in a compiled model, and on devices without a clock of ours.
    """

    latent: Grid
    slots: Mapping[tuple[int, Grid], np.ndarray]
    blocks: Mapping[tuple[str, int], BlockStep]
    seconds: float
    overhead: Mapping[str, float] | None

    @property
    def levels(self) -> dict[int, Grid]:
        """The feature maps that merged, by how many times smaller than the latent, in order."""
        grids = {grid for _, grid in self.slots}
        # Where two maps round to one level, as areas of a picture may, the largest stands for it.
        by_size = sorted(grids, key=lambda grid: grid.tokens)
        levels = {self._level(grid): grid for grid in by_size}
        return dict(sorted(levels.items()))

    def _level(self, grid: Grid) -> int:
        return max(1, round((self.latent.tokens / grid.tokens) ** 0.5))


@dataclass(frozen=True)
class LastRun:
    """What is kept of the last sampling run of a patched model.

    Attributes:
        model: the kind of model, as the host calls it.
        config: the settings.
        statistics: what was merged.
        obstacle: why nothing was merged, None if something was.
        backend: such as ``torch``, with the reason where it is not Triton; None if it did not come
            to that.
        pays_from: tokens of a feature map from which merging pays, by estimate.
        shallowest: how many times smaller than the latent the largest feature map with attention
            is.
        recording: the details, None if no report was wanted when the run began.
    """

    model: str
    config: ToMeConfig
    statistics: RunStatistics
    obstacle: str | None
    backend: str | None
    pays_from: int | None
    shallowest: int
    recording: Recording | None


class Recorder:
    """Notes what a run does while it goes on.

    Attributes:
        step: the present step of the run.
    """

    def __init__(self, latent: Grid, device: torch.device):
        """Begin with the first evaluation of a model, for ``latent`` on ``device``."""
        self.step = 0
        self._latent = latent
        self._clock = _Clock(device)
        self._started = time.perf_counter()
        self._slots: dict[tuple[int, Grid], Tensor] = {}
        self._tokens: dict[tuple[str, int], tuple[int, int]] = {}
        self._spans: list[tuple[str, int, Any, Any]] = []

    def watched(self, strategy: Strategy) -> Strategy:
        """A strategy that makes the same plans under our eyes."""
        return _WatchedStrategy(strategy, self)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose time counts as that of ``name``, where it can be measured."""

        @wraps(function)
        def timed_function(*args: Any, **kwargs: Any) -> Any:
            # What is traced runs once, and not when the model does.
            if torch.compiler.is_compiling() or not self._clock.tells:
                return function(*args, **kwargs)
            start = self._clock.now()
            result = function(*args, **kwargs)
            self._spans.append((name, self.step, start, self._clock.now()))
            return result

        return timed_function

    def note(self, blocks: "Iterable[MergedBlock]") -> None:
        """Note what blocks did in an evaluation that is just over."""
        for block in blocks:
            if block.tokens is None:
                continue
            before, after = block.slots_used or (block.tokens, block.tokens)
            self._tokens[block.name, self.step] = before, after
            if block.slots_used is None or block.grid is None:
                continue
            place = self.step, Grid(*block.grid)
            if place not in self._slots:
                plans = block.outer_plan, block.plan, block.keys_plan
                plan = next(plan for plan in plans if plan and plan.slot_count == after)
                self._slots[place] = plan.slots[0].view(block.grid)

    def finish(self) -> Recording:
        """What was noted, as plain numbers."""
        self._clock.wait()
        seconds = time.perf_counter() - self._started
        by_name: Counter[str] = Counter()
        by_step: Counter[tuple[str, int]] = Counter()
        for name, step, start, end in self._spans:
            span = self._clock.between(start, end)
            by_name[name] += span
            by_step[name, step] += span
        return Recording(
            self._latent,
            {place: slots.cpu().numpy() for place, slots in self._slots.items()},
            {
                place: BlockStep(*tokens, by_step.get(place))
                for place, tokens in self._tokens.items()
            },
            seconds,
            {name: by_name[name] for name in (MATCHING, MERGING, UNMERGING)} if by_name else None,
        )


class _Clock:
    """Tells time on a device without making it wait."""

    def __init__(self, device: torch.device):
        self._device = device
        self._has_events = device.type == "cuda"
        self.tells = self._has_events or device.type == "cpu"

    def now(self) -> Any:
        if not self._has_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        if self._has_events:
            torch.cuda.synchronize(self._device)

    def between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self._has_events else end - start


class _WatchedStrategy:
    def __init__(self, strategy: Strategy, recorder: Recorder):
        self.start_step = strategy.start_step
        self._plan = recorder.timed(MATCHING, strategy.plan)
        self._plans = recorder.timed(MATCHING, strategy.plans)
        self._recorder = recorder

    def plan(self, features: Tensor, grid: Grid) -> Any:
        return self._watched(self._plan(features, grid))

    def plans(self, features: Tensor, grid: Grid) -> tuple[Any, Any]:
        plan, keys_plan = self._plans(features, grid)
        watched = self._watched(plan)
        return watched, watched if keys_plan is plan else self._watched(keys_plan)

    def _watched(self, plan: AnyPlan | None) -> Any:
        if plan is None or torch.compiler.is_compiling():
            return plan
        return _WatchedPlan(plan, self._recorder)


class _WatchedPlan:
    def __init__(self, plan: AnyPlan, recorder: Recorder):
        self._plan = plan
        self.merge = recorder.timed(MERGING, plan.merge)
        self.merge_qkv = recorder.timed(MERGING, plan.merge_qkv)
        self.unmerge = recorder.timed(UNMERGING, plan.unmerge)
        self.add_change = recorder.timed(UNMERGING, plan.add_change)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)
