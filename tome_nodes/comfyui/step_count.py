"""Which step of a sampling run in ComfyUI goes on, and at which noise level."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..merging.schedule import step_index
from ..ops.clock import has_nothing_to_do
from ..run.sampling_run import SamplingRun

Callback = Callable[..., Any]

GPUS = frozenset({"cuda"})
"""Devices that work on while the host goes on."""

_COUNTS_OTHERWISE = ("dpm_fast", "dpm_adaptive", "ar_video")
"""The samplers whose count of steps is not that of the noise levels."""


class StepCount:
    """Tells a run of its steps: by the sampler's calls, else by noise levels.

    The sampler calls back in every step, after the model's answer. Reading a noise level instead
    waits for the GPU, which is then idle until the model runs.

    Attributes:
        schedule: noise levels, one more than there are steps.
        done: how many steps the sampler says are done.
    """

    def __init__(
        self, run: SamplingRun, schedule: Sequence[float], sampler: str, by_calls: bool = False
    ):
        """Count the steps of a run under the sampler of this name.

        ``by_calls`` is whether the step is always the one after the last that the sampler says is
        done, and its noise level is read.
        """
        self.schedule = schedule
        self.done = 0
        self._run = run
        self._last = max(run.total_steps - 1, 0)
        self._by_calls = by_calls
        self._is_counted = False
        self._may_count = not sampler.startswith(_COUNTS_OTHERWISE)
        self._index = 0
        self._answers = 0
        self._is_answering = False
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

    @contextmanager
    def answering(self, t: Tensor) -> Iterator[None]:
        """Begin a guided answer; evaluations of the model within it belong to the same step.

        ``t`` are the noise levels of the samples.
        """
        # A sampler that asks once in a step asks at the level of the step. Of the second answer it
        # is not known yet whether it is of the first step or of the second.
        asks_once = self._answers == self.done != 1
        self._answers += 1
        self._begin(t, self._read(t, must_read=not asks_once))
        outer, self._is_answering = self._is_answering, True
        try:
            yield
        finally:
            self._is_answering = outer

    def read(self, t: Tensor) -> float | None:
        """The noise level of an evaluation of the model; None where it need not be known.

        This waits for the device, so several threads are not to wait for each other here.
        """
        return None if self._is_answering else self._read(t, must_read=False)

    def begin_evaluation(self, t: Tensor, level: float | None) -> None:
        """Begin an evaluation of the model, whose noise level :meth:`read` has told."""
        if not self._is_answering:
            self._begin(t, level)

    def _read(self, t: Tensor, must_read: bool) -> float | None:
        must_read |= self._by_calls or self._run.span.is_partial or not self._is_counted
        return noise_level(t) if must_read else None

    def _begin(self, t: Tensor, level: float | None) -> None:
        run, device = self._run, t.device
        if self._by_calls:
            assert level is not None
            self._mark(self.done, device)
            run.begin(self.done, level)
            return
        self._gpu = device if device.type in GPUS else None
        if level is not None and not self._is_counted:
            self._index = step_index(self.schedule, level, self._index)
            self._mark(self._index, device)
        index = min(self._index, self._last)
        run.begin(index, self.schedule[index] if level is None else level)

    def _count(self, step: int) -> None:
        """Count a step that the sampler says is done; trust its count until it is out of order.

        If a sampler evaluates a step twice, the second evaluation counts as the next step's, as the
        sampler calls back before it.
        """
        if isinstance(step, int):
            self.done = step + 1
        if self._by_calls:
            return
        # Without a clock for the device, times are taken where a level that was read has made it
        # rest.
        is_next = self._run.can_time and step == self._index
        self._is_counted = self._may_count = self._may_count and is_next
        if self._is_counted:
            self._index += 1
            self._mark(self._index)

    def _mark(self, step: int, device: torch.device | None = None) -> None:
        if step <= self._last:
            self._run.mark(step, device)


def noise_level(t: Tensor) -> float:
    """The highest noise level of some samples."""
    return max(t.flatten().tolist())
