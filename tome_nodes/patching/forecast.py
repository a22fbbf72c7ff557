"""Steps in which a model does not run: its answer is forecast from the two before.

What a model predicts the clean picture to be changes nearly on a straight line over the logarithm
of signal to noise. So in some steps that line takes the place of the model; benchmarks/FIDELITY.md.
Forecasts of this kind are common for long runs, see TaylorSeer (arXiv 2503.06923).

The next answer of the model tells how far off a forecast was, since what lies between two answers
is known better than what follows them. That answer is changed so that the sampler makes up for it.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .detail_cache import belongs, means_of
from .schedule import Moment

_DAMPING = 0.7
"""The share of the change that a forecast takes over."""

_RESPONSE = 0.7
"""How much of an error in the noisy latent an answer of the model passes on."""

_FIRST, _FIRST_OF_MANY, _MANY = 2, 3, 8
"""How many steps at the beginning run the model, and how many of a run of at least so many, unless
it is settled. What is forecast too early is off by most."""

_SETTLED, _LEAST_SNR = 0.15, -7.0
"""The change between the first two answers, as a share of the second, below which a short run is
settled: its picture is there from the start, as in a second pass or where references decide. Where
signal to noise is less than this in the second step, in logarithm, little change says nothing."""

_SHORTEST_EDIT = 6
"""The fewest steps of a settled run that began with noise, such as an edit, of which some are
forecast. In so few, as many steps fewer change less."""

_SHORTEST = _FIRST + 2
"""The fewest steps of a run of which one is forecast."""

_GROWTH, _LONG = 1.3, 16
"""The exponent by which the steps that run move towards the beginning, of a run of at least so many
steps. In shorter and in settled runs they are spread evenly."""

IN_OTHER_STEPS = "the steps that were to be forecast were left out, perhaps by another node"
"""The reason to report if a run had only steps in which the model has to run."""

NOT_ALIKE = "the answers of the steps are too few or differ too much to forecast the next"
"""Why a step that was to be forecast runs."""

_NOT_KNOWN = "the step or the noise of an evaluation is not known, so nothing is forecast"
"""Why an evaluation runs, if its host does not tell."""

_TOO_SHORT = (
    f"a run of {_SHORTEST - 1} steps or fewer is too short to forecast one of them; to save time, "
    "take fewer"
)
"""Why no step of such a run is forecast."""

_IS_EDIT = (
    "as in an edit, what the model answers hardly changes over the steps; in a run of "
    f"{_SHORTEST_EDIT - 1} steps or fewer, one step fewer then changes less than a forecast"
)
"""Why no step of a short edit is forecast."""

_OR_MERGE = "; to merge instead, switch forecast off under preset custom"

_PARTS_KEPT = 64
"""How many parts of a step keep their answers; samplers that tile have many."""


def steps_that_run(ratio: float, steps: int, is_settled: bool = False) -> frozenset[int]:
    """The steps in which the model runs, of a run of so many.

    Args:
        ratio: the share of the steps between the first few and the last that are forecast; at least
            one is.
        steps: of the run, at least 1.
        is_settled: whether its answers change little from the start.
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
    """What a model answered.

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
        share: how much of the change between the last two answers was added to the last.
        latent_share: see :class:`tome_nodes.patching.schedule.Moment`.
    """

    step: int
    log_snr: float
    share: float
    latent_share: float


@dataclass(frozen=True, eq=False)
class _Part:
    """What is kept of a part of a step.

    Attributes:
        answers: the last two, in order.
        forecasts: those since then, if it is known how latents make up for them.
    """

    answers: Sequence[_Answered] = ()
    forecasts: list[_Forecast] = field(default_factory=list)

    def is_forecast_until(self, step: int) -> bool:
        """Whether all steps between the last answer and a step are known to be forecast.

        Another node may have left out some.
        """
        steps = [each.step for each in self.forecasts]
        return bool(steps) and steps == [*range(self.answers[-1].step + 1, step)]


class Forecasts:
    """The last answers of a model in a run, by the part of a step, and forecasts from them."""

    def __init__(self, ratio: float):
        """Begin with nothing kept, for the ratio of :func:`steps_that_run`."""
        self._ratio = ratio
        self._parts: dict[Hashable, _Part] = {}
        self._settled: bool | None = None

    def clear(self) -> None:
        """Drop all: another run begins."""
        self._parts.clear()
        self._settled = None

    def why_none(self, moment: Moment) -> str:
        """Why an evaluation is no forecast."""
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
        return NOT_ALIKE if moment.log_snr is not None else _NOT_KNOWN + _OR_MERGE

    def answer(self, moment: Moment, like: Tensor) -> Tensor | None:
        """The denoised latent of an evaluation by forecast, None if the model has to run.

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
        """Note what the model answered. Of several evaluations in a step, the first counts.

        Returns:
            What to take for the answer, which makes up for the errors of the forecasts before.
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
        """The steps of a run of so many in which the model runs, the same for all parts."""
        is_settled = steps < _LONG and self._settled is True
        if is_settled and moment.from_noise and steps < _SHORTEST_EDIT:
            return frozenset(range(steps))
        return steps_that_run(self._ratio, steps, is_settled)

    def _steps(self, moment: Moment) -> int | None:
        """How many steps the run has, None if they are not known or none is to be forecast."""
        if self._ratio == 0 or moment.steps_left is None:
            return None
        return moment.step + moment.steps_left + 1


def _is_settled(first: _Answered, second: _Answered) -> bool:
    """Whether the first two answers of a run hardly differ, in any sample."""
    if second.log_snr < _LEAST_SNR:
        return False
    before, after = first.denoised.float().flatten(1), second.denoised.float().flatten(1)
    return bool(((after - before).norm(dim=1) < _SETTLED * after.norm(dim=1)).all())


def _corrected(part: _Part, now: _Answered, latent_share: float) -> Tensor:
    """An answer, changed by what the forecasts before it got wrong.

    They should have been on the line from the answer before them to this one. The sampler's latent
    lacks the difference, so the next one gets it. The model has answered for a latent that lacks
    it, so its answer is changed too.

    Args:
        part: the two answers that the forecasts were made from, and the forecasts.
        now: the answer.
        latent_share: see :class:`tome_nodes.patching.schedule.Moment`.
    """
    first, last = part.answers
    # What the latent lacks: of the change to this answer, and, with a minus, of the one before.
    after = before = 0.0
    longest = 1 - latent_share
    for each in part.forecasts:
        place = (each.log_snr - last.log_snr) / (now.log_snr - last.log_snr)
        after = each.latent_share * after + (1 - each.latent_share) * place
        before = each.latent_share * before + (1 - each.latent_share) * each.share
        longest = max(longest, 1 - each.latent_share)
    # A step much shorter than one before it would need a change much larger than the error.
    weight = latent_share / longest + _RESPONSE
    changed = torch.lerp(last.denoised, now.denoised, 1 + weight * after)
    return changed.sub_(last.denoised - first.denoised, alpha=weight * before)


def _follows(before: _Answered, after: _Answered) -> bool:
    """Whether an answer is of the same place as the one before, at less noise."""
    one, other = before.denoised, after.denoised
    is_alike = one.shape == other.shape and one.device == other.device and one.dtype == other.dtype
    if not is_alike or after.log_snr <= before.log_snr:
        return False
    return one.ndim < 4 or belongs(means_of(one), means_of(other))
