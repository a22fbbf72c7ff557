"""One sampling run: its steps, what was done in them, and why not more was."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from .. import reasons
from ..ops.clock import Clock
from ..settings.config import ToMeConfig
from ..skipping.skipping import Skipping
from .counts import Counts
from .record import Merged, RunRecord, Unskipped, make_record
from .span import Span

_HOST = torch.device("cpu")


class SamplingRun:
    """One sampling run in any host, which tells it when a step begins.

    Attributes:
        config: the settings.
        span: the part of the sampling in which they act.
        skipping: skips steps; None if none is to be skipped.
        total_steps: the number of steps; 0 as long as it is not known.
        index: the number of the current step, from 0; -1 before the first.
        noise: the noise level of the current step.
        is_active: whether the settings act in the current step.
        is_reported: whether a host that ends runs in several places has reported this one.
    """

    def __init__(
        self,
        config: ToMeConfig,
        span: Span,
        on_step: Callable[[str], None] | None = None,
    ):
        """``on_step`` is called once in every step with a short text on what was done."""
        self.config = config
        self.span = span
        self.skipping: Skipping | None = None
        self.total_steps = 0
        self.index = -1
        self.noise = 0.0
        self.is_active = False
        self.is_reported = False
        self._first_noise: float | None = None
        self._was_active = False
        self._on_step = on_step
        self._shown = -1
        self._clock: Clock | None = None
        self._began: dict[int, Any] = {}

    def begin(self, index: int, noise: float) -> None:
        """Begin a call of the model at this noise level, in the step of this number."""
        self.index, self.noise = index, noise
        self.is_active = self.span.covers(noise)
        self._was_active |= self.is_active
        if self._first_noise is None:
            self._first_noise = noise

    @property
    def has_begun(self) -> bool:
        """Whether any step has begun."""
        return self._first_noise is not None

    @property
    def why_off(self) -> reasons.Reason | None:
        """Why the settings do not act in the current step; None if they do."""
        return None if self.is_active else self._why_never_on

    def mark(self, step: int, device: torch.device | None = None) -> None:
        """Note that a step begins now, unless its begin is known.

        ``device`` is the one whose work is timed, as told for the first of them; None for the host,
        where devices are at rest as steps begin.
        """
        clock = self._clock = self._clock or Clock(device or _HOST)
        if step not in self._began:
            self._began[step] = clock.now()

    @property
    def can_time(self) -> bool:
        """Whether the times of steps are those of the device, which goes on without the host."""
        return self._clock is not None and self._clock.can_measure

    def show(self, words: Callable[[str], str]) -> None:
        """Show what is done in the current step, once; ``words`` is told which step that is."""
        if self._on_step is not None and self.index != self._shown:
            self._shown = self.index
            self._on_step(words(f"step {self.index + 1}/{self.total_steps}"))

    def record(
        self,
        name: str,
        counts: Counts,
        merged: Merged | None = None,
        why: reasons.Reason | None = None,
    ) -> RunRecord:
        """The record of what models of one kind did in the run.

        Args:
            name: the host's for the kind of model, or for its scheduler.
            counts: what was merged and skipped in their evaluations.
            merged: how their tokens merged; None if none were to merge.
            why: why no step was skipped, if the host knows better than :attr:`skipping`.
        """
        counts.total_steps = self.total_steps
        unskipped = None
        if self.skipping is not None:
            counts.forecast_steps = self.skipping.forecast_steps
            if not counts.skipped_steps:
                why = why or self.skipping.reason
                why = why if self._was_active else self._why_never_on
                unskipped = Unskipped(self.skipping.nothing_skipped, why)
        return make_record(name, self.config, counts, self._begun, merged, unskipped)

    def unseen(self, name: str) -> RunRecord:
        """The record of a run of which no evaluation of the model was seen."""
        why = reasons.NOT_CALLED
        counts, unskipped = Counts(self.total_steps), None
        if self.skipping is not None:
            unskipped = Unskipped(self.skipping.nothing_skipped, why)
        return RunRecord(
            model=name, config=self.config, counts=counts, unmerged=why, unskipped=unskipped
        )

    @cached_property
    def _why_never_on(self) -> reasons.Reason:
        """Why the settings act in no step, if they do not."""
        first = self._first_noise
        return reasons.NOT_CALLED if first is None else self.span.reason(first)

    def _begun(self) -> Mapping[int, float]:
        """When each step began, in seconds since the first."""
        clock = self._clock
        if clock is None:
            return {}
        clock.wait()
        first = next(iter(self._began.values()))
        return {step: clock.between(first, mark) for step, mark in self._began.items()}
