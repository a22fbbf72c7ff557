"""Forecasts: in some steps the model does not run, and its answer is extrapolated from two others.

An answer is the model's prediction of the clean picture. Over the logarithm of signal to noise, it
changes nearly on a straight line. So in some steps that line takes the place of the model (see
benchmarks/FIDELITY.md). Such forecasts are common for long runs: TaylorSeer (arXiv 2503.06923).

The model's next answer shows how far off the forecasts before it were: a point between two answers
is known better than a point beyond them. That answer is corrected, so that the sampler makes up for
the error.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .detail_cache import belongs, means_of
from .schedule import Moment

_DAMPING = 0.7
"""The share of the extrapolated change that a forecast contains."""

_RESPONSE = 0.7
"""The share of an error in the noisy latent that shows in the model's answer."""

_FIRST, _FIRST_OF_MANY, _MANY = 2, 3, 8
"""The model runs in the first ``_FIRST`` steps, and in the first ``_FIRST_OF_MANY`` if a run has at
least ``_MANY`` steps and is not settled. The earliest forecasts have the largest errors."""

_SETTLED, _LEAST_SNR = 0.15, -7.0
"""A run of fewer than ``_LONG`` steps is settled if its first two answers differ by less than
``_SETTLED`` of the second. Its picture is there from the start, as in a second pass, or in an edit
with reference pictures. It is not settled if the logarithm of signal to noise in the second step is
below ``_LEAST_SNR``: answers to such strong noise always differ little."""

_SHORTEST_EDIT = 6
"""A settled run that began with noise, like an edit, has forecasts only from this many steps on. In
a shorter run, taking one step fewer changes the picture less than a forecast."""

_SHORTEST = _FIRST + 2
"""Any run has forecasts only from this many steps on."""

_GROWTH, _LONG = 1.3, 16
"""In a run of at least ``_LONG`` steps, the exponent that moves the steps in which the model runs
towards the beginning. In shorter runs and settled runs, they are spread evenly."""

IN_OTHER_STEPS = "the steps that were to be forecast were left out, perhaps by another node"
"""The reason to report if a run evaluated only steps in which the model runs anyway."""

_NOT_ALIKE = "the answers of the steps are too few or differ too much to forecast the next"
"""Why the model runs in a step that was to be forecast."""

_NOT_KNOWN = "the step or the noise of an evaluation is not known, so nothing is forecast"
"""Why the model runs if the host does not say where it is in the run."""

_TOO_SHORT = (
    f"a run of {_SHORTEST - 1} steps or fewer is too short to forecast one of them; to save time, "
    "take fewer"
)
"""Why no step of a short run is forecast."""

_IS_EDIT = (
    "as in an edit, what the model answers hardly changes over the steps; in a run of "
    f"{_SHORTEST_EDIT - 1} steps or fewer, one step fewer then changes less than a forecast"
)
"""Why no step of a short edit is forecast."""

_OR_MERGE = "; to merge instead, switch forecast off under preset custom"

_PARTS_KEPT = 64
"""The most parts of a step whose answers are kept; samplers that tile have many parts."""


def steps_that_run(ratio: float, steps: int, is_settled: bool) -> frozenset[int]:
    """The steps of a run in which the model runs; the others are forecast.

    Args:
        ratio: the share of the steps between the first few and the last that are forecast; at least
            one of them is.
        steps: the number of steps of the run, at least 1.
        is_settled: whether answers change little from the start of the run.
    """
    first = _FIRST_OF_MANY if steps >= _MANY and not is_settled else _FIRST
    growth = _GROWTH if steps >= _LONG and not is_settled else 1
    between = max(0, steps - 1 - first)
    count = min(round(between * (1 - ratio)), max(0, between - 1))
    running, latest = {*range(min(first, steps)), steps - 1}, first - 1
    for index in range(1, count + 1):
        share = (index / (count + 1)) ** growth
        place = first - 1 + math.ceil((between + 1) * share - 0.5)
        latest = max(latest + 1, place)
        running.add(latest)
    return frozenset(running)


@dataclass(frozen=True, eq=False)
class _Answered:
    """An answer of the model.

    Attributes:
        step: the step of the run.
        log_snr: the logarithm of signal to noise, in power.
        denoised: the denoised latent.
    """

    step: int
    log_snr: float
    denoised: Tensor


@dataclass(frozen=True, eq=False)
class _Forecast:
    """How the answer of a step was forecast.

    Attributes:
        step: the step of the run.
        log_snr: the logarithm of signal to noise, in power.
        share: how many times the change between the last two answers was added to the last.
        latent_share: see :class:`tome_nodes.patching.schedule.Moment`.
    """

    step: int
    log_snr: float
    share: float
    latent_share: float


@dataclass(frozen=True, eq=False)
class _Part:
    """What is kept of one part of a step.

    Attributes:
        answers: the last two answers, in order.
        forecasts: the forecasts since then, as long as it is known how to make up for them.
    """

    answers: Sequence[_Answered] = ()
    forecasts: list[_Forecast] = field(default_factory=list)

    def is_forecast_until(self, step: int) -> bool:
        """Whether every step between the last answer and ``step`` is in ``forecasts``.

        Another node may have left out some.
        """
        steps = [each.step for each in self.forecasts]
        return bool(steps) and steps == [*range(self.answers[-1].step + 1, step)]


class Forecasts:
    """The last answers of a model in a run, for each part of a step, and forecasts from them."""

    def __init__(self, ratio: float):
        """``ratio`` is that of :func:`steps_that_run`, or 0 to forecast nothing."""
        self._ratio = ratio
        self._parts: dict[Hashable, _Part] = {}
        self._settled: bool | None = None

    def clear(self) -> None:
        """Drop everything: another run begins."""
        self._parts.clear()
        self._settled = None

    def why_none(self, moment: Moment) -> str:
        """Why an evaluation is not forecast."""
        if self._ratio == 0:
            return "the ratio of the steps to forecast is 0; raise it"
        steps = self._steps(moment)
        if steps is None:
            return _NOT_KNOWN + _OR_MERGE
        running = self._running(moment, steps)
        if len(running) == steps:
            return _TOO_SHORT if steps < _SHORTEST else _IS_EDIT
        if moment.step in running:
            return IN_OTHER_STEPS
        return _NOT_ALIKE if moment.log_snr is not None else _NOT_KNOWN + _OR_MERGE

    def answer(self, moment: Moment, like: Tensor) -> Tensor | None:
        """The forecast of the denoised latent; None if the model has to run.

        Args:
            moment: where the evaluation is in its run.
            like: the noisy latent.
        """
        steps, now = self._steps(moment), moment.log_snr
        if steps is None or now is None or not moment.is_active or torch.is_grad_enabled():
            return None
        if moment.step in self._running(moment, steps):
            return None
        part = self._parts.get(moment.part)
        if part is None or len(part.answers) < 2:
            return None
        first, last = part.answers
        if last.denoised.shape != like.shape or now <= last.log_snr:
            return None
        share = _DAMPING * (now - last.log_snr) / (last.log_snr - first.log_snr)
        is_first = not part.forecasts or part.forecasts[-1].step != moment.step
        if is_first and moment.latent_share is not None:
            part.forecasts.append(_Forecast(moment.step, now, share, moment.latent_share))
        return torch.lerp(first.denoised, last.denoised, 1 + share)

    def answered(self, moment: Moment, denoised: Tensor) -> Tensor:
        """Note an answer of the model. Of several evaluations in a step, the first counts.

        Returns:
            The answer to use, corrected for the errors of the forecasts before it.
        """
        if self._steps(moment) is None or moment.log_snr is None or torch.is_grad_enabled():
            return denoised
        part, corrected = self._parts.pop(moment.part, _Part()), denoised
        last = part.answers[-1] if part.answers else None
        if last is None or last.step != moment.step:
            # Whoever gets the answer may change it in place.
            new = _Answered(moment.step, moment.log_snr, denoised.clone())
            before = last if last is not None and _follows(last, new) else None
            share = moment.latent_share
            if before and share is not None and part.is_forecast_until(moment.step):
                corrected = _corrected(part, new, share)
            if moment.step == 1:
                is_settled = before is not None and _is_settled(before, new)
                self._settled = is_settled and self._settled is not False
            part = _Part([new] if before is None else [before, new])
        self._parts[moment.part] = part
        if len(self._parts) > _PARTS_KEPT:
            del self._parts[next(iter(self._parts))]
        return corrected

    def _running(self, moment: Moment, steps: int) -> frozenset[int]:
        """The steps in which the model runs, of a run of ``steps``; the same for all parts."""
        is_settled = steps < _LONG and self._settled is True
        if is_settled and moment.from_noise and steps < _SHORTEST_EDIT:
            return frozenset(range(steps))
        return steps_that_run(self._ratio, steps, is_settled)

    def _steps(self, moment: Moment) -> int | None:
        """The number of steps of the run; None if it is not known or nothing is to be forecast."""
        if self._ratio == 0 or moment.steps_left is None:
            return None
        return moment.step + moment.steps_left + 1


def _is_settled(first: _Answered, second: _Answered) -> bool:
    """Whether the first two answers of a run hardly differ, in all samples."""
    if second.log_snr < _LEAST_SNR:
        return False
    before, after = first.denoised.float().flatten(1), second.denoised.float().flatten(1)
    return bool(((after - before).norm(dim=1) < _SETTLED * after.norm(dim=1)).all())


def _corrected(part: _Part, now: _Answered, latent_share: float) -> Tensor:
    """An answer, corrected for the errors of the forecasts before it.

    The forecasts should have been on the line from the answer before them to this one. What they
    lack is now missing in the sampler's latent. The correction makes the sampler add it to the next
    latent. The model answered for a latent that lacks it, so the correction also adds what is
    missing in the answer.

    Args:
        part: the forecasts, and the two answers that they were made from.
        now: the answer.
        latent_share: see :class:`tome_nodes.patching.schedule.Moment`.
    """
    first, last = part.answers
    # What the latent lacks: ``after`` times the change from the last answer to this one, minus
    # ``before`` times the change between the two answers before.
    after = before = 0.0
    longest = 1 - latent_share
    for each in part.forecasts:
        place = (each.log_snr - last.log_snr) / (now.log_snr - last.log_snr)
        after = each.latent_share * after + (1 - each.latent_share) * place
        before = each.latent_share * before + (1 - each.latent_share) * each.share
        longest = max(longest, 1 - each.latent_share)
    # The longest of the steps counts: a step much shorter than one before it would need a change
    # much larger than the error.
    weight = latent_share / longest + _RESPONSE
    changed = torch.lerp(last.denoised, now.denoised, 1 + weight * after)
    return changed.sub_(last.denoised - first.denoised, alpha=weight * before)


def _follows(before: _Answered, after: _Answered) -> bool:
    """Whether an answer is for the same place as the one before it, at less noise."""
    one, other = before.denoised, after.denoised
    is_alike = one.shape == other.shape and one.device == other.device and one.dtype == other.dtype
    if not is_alike or after.log_snr <= before.log_snr:
        return False
    return one.ndim < 4 or belongs(means_of(one), means_of(other))
