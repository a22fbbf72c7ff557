"""Which step of a sampling run goes on, and when each began."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..merging.schedule import step_index
from ..ops.clock import Clock, has_nothing_to_do

Callback = Callable[..., Any]

GPUS = frozenset({"cuda"})
"""Devices that work on while the host goes on."""

_COUNTS_OTHERWISE = ("dpm_fast", "dpm_adaptive", "ar_video")
"""The samplers whose count of steps is not that of the noise levels."""


class StepCount:
    """Counts the steps of a run: by the sampler's calls, else by noise levels.

    The sampler calls back in every step, after the model's answer. Reading a noise level instead
    waits for the GPU, which is then idle until the model runs.

    Attributes:
        schedule: noise levels, one more than there are steps.
        total: the number of steps of the run.
        last: the index of the last step.
        done: how many steps the sampler says are done.
        is_counted: whether the step of an evaluation is known without its noise level.
    """

    def __init__(self, schedule: Sequence[float], sampler: str, reads_levels: bool):
        """Count the steps of a ``sampler`` with this name.

        ``reads_levels`` is whether the noise level of each step is read anyway, before
        :meth:`begin`, so that the device is at rest as a step begins.
        """
        self.schedule = schedule
        self.total = len(schedule) - 1
        self.last = max(self.total - 1, 0)
        self.done = 0
        self.is_counted = False
        self._may_count = not sampler.startswith(_COUNTS_OTHERWISE)
        self._reads_levels = reads_levels
        self._index = 0
        self._clock: Clock | None = None
        self._begun: dict[int, Any] = {}
        self._gpu: torch.device | None = None
        self._waits: list[bool] = []

    @property
    def gpu_waited(self) -> bool:
        """Whether the GPU waited for the host in most steps."""
        return sum(self._waits) > len(self._waits) / 2

    def watching(self, callback: Callback | None) -> Callback:
        """The callback of the sampler.

        A GPU that is done by then waits for the host, which has queued its work one by one.
        """

        def watched(step: int, *args: Any, **kwargs: Any) -> Any:
            # Before the clock, whose mark is work for the GPU, too.
            if self._gpu is not None:
                self._waits.append(has_nothing_to_do(self._gpu))
            self._count(step)
            return None if callback is None else callback(step, *args, **kwargs)

        return watched

    def begin(self, device: torch.device) -> None:
        """Note that the step after the last one done begins, on a device at rest."""
        self._mark(self.done, device)

    def of_evaluation(self, device: torch.device, level: float | None) -> int:
        """The index of the step of a model evaluation.

        ``level`` is its noise level; None if that was not read, as it may be while
        :attr:`is_counted`.
        """
        self._gpu = device if device.type in GPUS else None
        if level is not None and not self.is_counted:
            self._index = step_index(self.schedule, level, self._index)
            if not self._reads_levels:
                self._mark(self._index, device)
        return min(self._index, self.last)

    def begun(self) -> Mapping[int, float]:
        """When each step began, in seconds since the first."""
        clock = self._clock
        if clock is None:
            return {}
        clock.wait()
        first = next(iter(self._begun.values()))
        return {step: clock.between(first, mark) for step, mark in self._begun.items()}

    def _count(self, step: int) -> None:
        """Count a step that the sampler says is done; trust its count until it is out of order.

        If a sampler evaluates a step twice, the second evaluation counts as the next step's, as the
        sampler calls back before it.
        """
        if isinstance(step, int):
            self.done = step + 1
        clock = self._clock
        # Without a clock for the device, times are taken where a level that was read has made it
        # rest.
        is_next = clock is not None and clock.can_measure and step == self._index
        self.is_counted = self._may_count = self._may_count and is_next
        if self.is_counted:
            self._index += 1
            if not self._reads_levels:
                self._mark(self._index)

    def _mark(self, step: int, device: torch.device | None = None) -> None:
        """Note when a step began; ``device`` is known before the first is done."""
        if self._clock is None and device is not None:
            self._clock = Clock(device)
        if self._clock is not None and step <= self.last and step not in self._begun:
            self._begun[step] = self._clock.now()
