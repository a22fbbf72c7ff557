"""One sampling run of a UNet, followed by the timesteps of its calls.

Nothing has to be known of the scheduler: the timestep falls from evaluation to evaluation. A
timestep that rises, or a latent of another size, begins another run. How many evaluations a run has
is known from the scheduler of the pipeline, if its timesteps are those of the calls; else it is
estimated.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import reasons
from ..run.counts import Counts
from ..run.record import Merged, RunRecord
from ..run.sampling_run import SamplingRun
from ..run.span import Span
from ..settings.config import ToMeConfig
from ..skipping.plan import FIRST, LEAST_SNR, adds_noise
from ..skipping.shallow_run import ShallowRun
from .latents import CalledLatents
from .scheduling import Scheduling

_ROUNDING = 0.01
"""The most by which a timestep may differ from that of the scheduler, as a share of itself: in
half precision, or as a whole number."""

_CLOSE = 0.01
"""Timesteps that differ by less are one: some schedulers round them differently in their second
evaluation."""

_EVEN = 2.5
"""Under an unknown scheduler, timesteps fall at most so many times as fast as before, and an
evaluation before which they fall that much more slowly is whole."""

_MOST_CALLS = 256
"""So many calls of an evaluation are compared with those of the one before."""

_BETAS = 0.00085, 0.012
"""The first and the last share of noise that SD's UNets were trained on, see :func:`_log_snrs`."""


class UNetRun:
    """One sampling run of a UNet.

    Attributes:
        sampling_run: its steps, which are the evaluations.
        shallow: decides which of them are shallow.
        counts: counts what is done in it.
        is_known: whether the scheduler has the timesteps so far, and so those that follow.
        strengths: reads how strongly each adapter acts.
    """

    def __init__(self, config: ToMeConfig, span: Span, scheduling: Scheduling, levels: int):
        """Begin a run of a UNet that was trained on so many noise levels.

        The noise levels of ``span`` are timesteps.
        """
        self.counts = Counts()
        self.is_known = False
        self.strengths: Callable[[], Hashable] = lambda: None
        self._scheduling = scheduling
        self._scheduler = scheduling.scheduler
        self._given = getattr(self._scheduler, "timesteps", None)
        self._known, self._places = _known(self._scheduler)
        self._levels = levels
        self._times: list[float] = []
        self._sizes: set[torch.Size] = set()
        self._foreseen: Sequence[float] = []
        self._gap = 0.0
        self._conditions: list[Hashable] = []
        self._before: list[Hashable] = []
        self._count: int | None = None
        words = _words(self._scheduler)
        self.sampling_run = SamplingRun(config, span)
        self.shallow = self.sampling_run.skipping = ShallowRun(config.shallow_ratio, words)
        # Noise that is added is as large as the latent that the model is given.
        is_moved = adds_noise(words) or _clips(self._scheduler)
        self._latents = None if is_moved else CalledLatents()

    def takes(self, sample: Tensor, timestep: float) -> bool:
        """Whether a call for this latent and timestep belongs to this run."""
        gap = self._times[-1] - timestep
        if gap < -_CLOSE or (gap > _CLOSE and sample.shape[-2:] not in self._sizes):
            return False
        is_odd = 0 < _EVEN * self._gap < gap
        if is_odd and not self.is_known and not self._is_latest(timestep):
            # These are no steps of a sampler, but calls at any noise level.
            return False
        given = getattr(self._scheduling.scheduler, "timesteps", None)
        if given is self._given:
            return True
        # Some pipelines have a copy of the scheduler for each part of a picture.
        self._given = given
        goes_on = self._is_latest(timestep) or self._is_next(timestep)
        return (
            goes_on and given is not None and _known(self._scheduling.scheduler)[0] == self._known
        )

    def begin(self, sample: Tensor, timestep: float, conditions: Hashable) -> None:
        """Begin a call, which may be one of several of an evaluation.

        Args:
            sample: the noisy latent, ``[batch, channels, height, width]``.
            timestep: of the call.
            conditions: everything besides the latent and the timestep that decides the answer.
        """
        # Parts of a picture may have several sizes.
        self._sizes.add(sample.shape[-2:])
        if self._times and self._is_latest(timestep):
            self._see(conditions)
            return
        before = self._gap
        if self._times:
            self._gap = self._times[-1] - timestep
        self._times.append(timestep)
        self._before, self._conditions = self._conditions, []
        run = self.sampling_run
        run.begin(run.index + 1, timestep)
        # The device is at rest, as the timestep has been read from it.
        run.mark(run.index)
        if run.index < FIRST or not self._is_foreseen(timestep):
            self._plan()
        may_be_shallow = run.is_active and (self.is_known or before <= _EVEN * self._gap)
        self.shallow.begin(run.index, self._place(timestep), may_be_shallow)
        self._look(sample)
        self._see(conditions)

    def note(self, answer: Any) -> None:
        """Note what a call returned."""
        if self._latents is not None and self.shallow.obstacle is None:
            self._latents.note(answer if isinstance(answer, Tensor) else answer[0])

    @property
    def is_last(self) -> bool:
        """Whether the latest evaluation is the last, as far as is known."""
        if self._count is None:
            return False
        if self.is_known:
            return self.sampling_run.index >= self._count - 1
        # The next timestep would be below 0. The last one of some spacings is 0.
        is_low = self._times[-1] < (1 - _ROUNDING) * self._gap
        # If timesteps fall unevenly, more may follow; a pipeline ends its run.
        return is_low and (self._scheduler is None or self._falls_evenly)

    @property
    def _falls_evenly(self) -> bool:
        """Whether timesteps have fallen by the same number each, but for rounding."""
        gaps = [before - after for before, after in pairwise(self._times)]
        return bool(gaps) and max(gaps) - min(gaps) <= 1 + _CLOSE

    @property
    def is_over(self) -> bool:
        """Whether this call is the last, if the last evaluation has as many as the one before."""
        return self.is_last and len(self._conditions) >= len(self._before)

    def record(self, name: str, merged: Merged) -> RunRecord:
        """The record of the run of a model of this name."""
        self.sampling_run.total_steps = self.sampling_run.index + 1
        why = self.shallow.obstacle
        if why is None and self._count is not None:
            why = self.shallow.too_short(self._count)
        return self.sampling_run.record(name, self.counts, merged, why)

    def stop(self, why: reasons.Reason) -> None:
        """Run the rest whole, and drop what is kept."""
        self.shallow.stop(why)
        self._latents = None

    def _look(self, sample: Tensor) -> None:
        """Look whether the latent of a new evaluation is where the scheduler was led."""
        if self._latents is None or self.shallow.obstacle is not None:
            return
        self.shallow.follow(self._latents.begin(sample))

    def _see(self, conditions: Hashable) -> None:
        """Note the conditions of a call, and drop what is kept if they have changed."""
        number = len(self._conditions)
        if number < _MOST_CALLS:
            self._conditions.append(conditions)
        if self._before[number : number + 1] not in ([], [conditions]):
            self.shallow.clear()

    def _plan(self) -> None:
        """Plan the run, as far as its timesteps show how they fall."""
        times = self._rest()
        self.is_known = bool(times)
        self._count = len(times) or None
        if self.sampling_run.index < FIRST - 1:
            return
        paints = bool(times) and times[-1] == self._known[-1]
        if paints and self._place(times[-1]) < LEAST_SNR:
            self.shallow.obstacle = reasons.UNEVEN
        if not times:
            last = self._times[-1]
            left = max(0, math.floor(last / self._gap + _ROUNDING))
            times = [*self._times, *(last - index * self._gap for index in range(1, left + 1))]
            self._count = len(times)
        self._foreseen = times
        self.shallow.plan([self._place(each) for each in times])

    def _is_foreseen(self, timestep: float) -> bool:
        """Whether the latest timestep is nearer to the one that was planned than half a gap."""
        index = self.sampling_run.index
        is_planned = index < len(self._foreseen)
        return is_planned and abs(self._foreseen[index] - timestep) <= self._gap / 2

    def _rest(self) -> Sequence[float]:
        """The timesteps of this run that the scheduler has; none if it has others."""
        if getattr(self._scheduler, "num_inference_steps", 0) is None:
            # It was not told the steps, so it has those of training.
            return []
        seen, known = self._times, self._known
        begins = self._index(seen[0])
        if begins is None:
            return []
        rest = known[begins:]
        if len(rest) < len(seen) or not all(map(self._is_same, rest, seen)):
            return []
        return rest if begins else self._until_refined(rest)

    def _until_refined(self, known: Sequence[float]) -> Sequence[float]:
        """The timesteps before a pipeline leaves off, as it does before a refiner."""
        pipeline = self._scheduling.pipeline
        end = getattr(pipeline, "denoising_end", None)
        if not isinstance(end, float):
            return known
        least = round((1 - end) * self._levels)
        steps = sum(each >= least for each in self._scheduler.timesteps.tolist())
        # Another pipeline of the same scheduler may have run since.
        is_of_this = getattr(pipeline, "num_timesteps", None) == steps
        return [each for each in known if each >= least] if is_of_this else known

    def _is_latest(self, timestep: float) -> bool:
        return abs(timestep - self._times[-1]) < _CLOSE

    def _is_next(self, timestep: float) -> bool:
        """Whether the scheduler has this timestep right after the latest one."""
        at = self._index(self._times[-1])
        return at is not None and self._index(timestep) == at + 1

    def _index(self, timestep: float) -> int | None:
        """Where the scheduler has a timestep; None if it does not."""
        known = self._known
        at = min(range(len(known)), key=lambda at: abs(known[at] - timestep), default=None)
        return at if at is not None and self._is_same(known[at], timestep) else None

    def _is_same(self, known: float, timestep: float) -> bool:
        span = self._known[0] - self._known[-1]
        return abs(known - timestep) <= max(_ROUNDING * abs(known), span / 2000)

    @cached_property
    def _log_snrs(self) -> Sequence[float]:
        """See :func:`_log_snrs`; not needed where the scheduler tells noise levels."""
        return _log_snrs(self._scheduler)

    def _place(self, timestep: float) -> float:
        """The logarithm of signal to noise at a timestep."""
        index = self._index(timestep) if self._places else None
        if index is not None:
            return self._places[index]
        levels = self._log_snrs
        at = min(max(timestep, 0.0), len(levels) - 1.0)
        low = int(at)
        high = min(low + 1, len(levels) - 1)
        return levels[low] + (at - low) * (levels[high] - levels[low])


def _known(scheduler: Any) -> tuple[list[float], list[float]]:
    """The timesteps of a scheduler without repetitions, as long as they fall, and their places.

    A place is the logarithm of signal to noise. There is none of the last timesteps in some
    schedulers, and none at all if the scheduler does not tell a noise level for each timestep, as
    where it asks between its noise levels, too.
    """
    given = getattr(scheduler, "timesteps", None)
    timesteps = [] if given is None else given.tolist()
    sigmas = getattr(scheduler, "sigmas", None)
    levels = sigmas.tolist() if isinstance(sigmas, Tensor) else []
    found: list[float] = []
    places: list[float] = []
    for index, each in enumerate(timesteps):
        if found and each > found[-1] + _CLOSE:
            return [], []
        if not found or each < found[-1] - _CLOSE:
            found.append(each)
            if index < len(levels) and levels[index] > 0:
                places.append(-2 * math.log(levels[index]))
    is_told = len(places) == len(found) and all(one < other for one, other in pairwise(places))
    return found, places if is_told else []


def _log_snrs(scheduler: Any) -> list[float]:
    """The logarithm of signal to noise at every noise level of training, from the lowest."""
    kept = getattr(scheduler, "alphas_cumprod", None)
    if isinstance(kept, Tensor):
        shares = kept.tolist()
    else:
        first, last = (beta**0.5 for beta in _BETAS)
        shares, share = [], 1.0
        for index in range(1000):
            share *= 1 - (first + (last - first) * index / 999) ** 2
            shares.append(share)
    return [math.log(max(share, 1e-8) / max(1 - share, 1e-8)) for share in shares]


def _clips(scheduler: Any) -> bool:
    """Whether a scheduler keeps pictures within bounds, after which latents do not follow."""
    config = getattr(scheduler, "config", {})
    return any(config.get(name) for name in ("clip_sample", "thresholding"))


def _words(scheduler: Any) -> str:
    """The name of a scheduler, and what its settings say of the noise that it adds."""
    config = getattr(scheduler, "config", {})
    algorithm, order = config.get("algorithm_type") or "", config.get("solver_order")
    noisy = "sde" if config.get("stochastic_sampling") else ""
    # As ComfyUI calls it.
    three = "dpmpp_3m_sde" if algorithm.startswith("sde") and order == 3 else ""
    return f"{type(scheduler).__name__} {algorithm} {noisy} {three}".lower()
