"""What one sampling run does in detail: which tokens merged in each step, and how long it took.

A recorder stands between the blocks and the strategy of a run, and only of a run that a report is
wanted of. All it keeps is copied from the device once, when the run is over.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .grid import Grid
from .plan import Plan
from .strategies import Strategy
from .strategies.pool import PoolPlan

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
            ``[tokens]`` int32, in the block that merged first.
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


class Recorder:
    """Notes what a run does while it goes on."""

    def __init__(self, latent: Grid, device: torch.device):
        """Begin with the first evaluation of a model, for ``latent`` on ``device``."""
        self._latent = latent
        self._clock = _Clock(device)
        self._started = time.perf_counter()
        self._step = 0
        self._slots: dict[tuple[int, Grid], Tensor] = {}
        self._tokens: dict[tuple[str, int], tuple[int, int]] = {}
        self._spans: list[tuple[str | tuple[str, int], Any, Any]] = []

    def watched(self, strategy: Strategy) -> Strategy:
        """A strategy that makes the same plans under our eyes."""
        return _WatchedStrategy(strategy, self)

    @contextmanager
    def evaluation(
        self, step: int, blocks: Iterable[Any], override: Callable[..., Any]
    ) -> Iterator[None]:
        """Note one model evaluation in ``step``.

        Args:
            step: which step of the run.
            blocks: :class:`tome_nodes.hosts.blocks.MergedBlock`, whose overrides are on.
            override: context manager that lets a module run another forward.
        """
        self._step = step
        with ExitStack() as exits:
            for block in blocks:
                timed = self._timed(block.module.forward, (block.name, step))
                exits.enter_context(override(block.module, timed))
            yield
        for block in blocks:
            if block.slots_used is not None:
                self._tokens[block.name, step] = block.slots_used
            elif block.tokens is not None:
                self._tokens[block.name, step] = (block.tokens, block.tokens)

    def finish(self) -> Recording:
        """What was noted, as plain numbers."""
        self._clock.wait()
        seconds = time.perf_counter() - self._started
        spans: Counter[str | tuple[str, int]] = Counter()
        for name, start, end in self._spans:
            spans[name] += self._clock.between(start, end)
        measured = bool(spans)
        return Recording(
            self._latent,
            {key: slots.cpu().numpy() for key, slots in self._slots.items()},
            {key: BlockStep(*tokens, spans.get(key)) for key, tokens in self._tokens.items()},
            seconds,
            {name: spans[name] for name in (MATCHING, MERGING, UNMERGING)} if measured else None,
        )

    @contextmanager
    def span(self, name: str | tuple[str, int]) -> Iterator[None]:
        """Note how long something takes; nothing if that cannot be measured on the device."""
        start = self._clock.now()
        yield
        if start is not None:
            self._spans.append((name, start, self._clock.now()))

    def merged(self, plan: Plan | PoolPlan, grid: Grid, x: Tensor) -> None:
        """Note the groups of a plan for ``x``, the first time that ``grid`` merges in a step."""
        if (self._step, grid) not in self._slots:
            numbers = torch.arange(plan.slot_count, dtype=torch.float32, device=x.device)
            slots = plan.unmerge(numbers[:, None].repeat(len(x), 1, 1))
            self._slots[self._step, grid] = slots[0, :, 0].int()

    def _timed(
        self, forward: Callable[..., Tensor], name: tuple[str, int]
    ) -> Callable[..., Tensor]:
        def timed_forward(*args: Any, **kwargs: Any) -> Tensor:
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            with self.span(name):
                return forward(*args, **kwargs)

        return timed_forward


class _Clock:
    """Tells time on a device without making it wait."""

    def __init__(self, device: torch.device):
        self._device = device
        self._has_events = device.type == "cuda"
        self._tells = self._has_events or device.type == "cpu"

    def now(self) -> Any:
        if not self._has_events:
            return time.perf_counter() if self._tells else None
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
        self._strategy = strategy
        self._recorder = recorder

    def start_step(self, key: Tensor, ratio: float) -> None:
        self._strategy.start_step(key, ratio)

    def plan(self, features: Tensor, grid: Grid) -> Any:
        # What is traced runs once, and not when the model does.
        if torch.compiler.is_compiling():
            return self._strategy.plan(features, grid)
        with self._recorder.span(MATCHING):
            plan = self._strategy.plan(features, grid)
        return None if plan is None else _WatchedPlan(plan, grid, self._recorder)


class _WatchedPlan:
    def __init__(self, plan: Plan | PoolPlan, grid: Grid, recorder: Recorder):
        self._plan = plan
        self._grid = grid
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def merge(self, x: Tensor) -> Tensor:
        with self._recorder.span(MERGING):
            merged = self._plan.merge(x)
        self._recorder.merged(self._plan, self._grid, x)
        return merged

    def unmerge(self, y: Tensor) -> Tensor:
        with self._recorder.span(UNMERGING):
            return self._plan.unmerge(y)

    def add_change(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        with self._recorder.span(UNMERGING):
            return self._plan.add_change(x, before, after)
