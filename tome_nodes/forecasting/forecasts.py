"""Forecast the answer of a step from the two answers before it.

An answer is the prediction of the clean picture. Over the logarithm of signal to noise, it changes
nearly on a straight line. So in some steps that line takes the place of the model (see
benchmarks/FIDELITY.md). Such forecasts are common for long runs: TaylorSeer (arXiv 2503.06923).

The model's next answer shows how far off the forecasts before it were: a point between two answers
is known better than a point beyond them. That answer is corrected, so that the sampler makes up for
the error.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import reasons
from .steps import (
    FIRST,
    LEAST_SNR,
    LONG,
    SHORTEST,
    TOO_CLOSE,
    ForecastStep,
    first_steps,
    steps_that_run,
)

_DAMPING = 0.7
"""The share of the extrapolated change that a forecast contains."""

_MOST_CHANGE = 3.0
"""A forecast adds at most this many times the last change. At the start of a run with a high shift,
noise levels are so close that the line would lead far away."""

_RESPONSE = 0.7
"""The share of an error in the noisy latent that shows in the model's answer."""

_TURN = -0.5
"""Answers turn back where less than this share came of the last change that the line foretold. On
judges, lines led on well where -0.1 to -0.4 came (0.07 to 0.75 of the error of fewer steps), and
not where -0.8 to -2.8 did (0.8 to 2.6)."""

_SETTLED = 0.15
"""A run that is not long is settled if its first two answers differ by less than this share of the
second. Its picture is there from the start, as in a second pass, or in an edit with reference
pictures. It is not settled if the second step is below ``LEAST_SNR``."""

_SHORTEST_EDIT = 6
"""A settled run that began with noise, like an edit, has forecasts only from this many steps on. In
a shorter run, taking one step fewer changes the picture less than a forecast."""


@dataclass(frozen=True, eq=False)
class _Answer:
    """An answer of the model: its step, and the denoised latent."""

    step: ForecastStep
    denoised: Tensor


@dataclass(frozen=True)
class _Forecast:
    """A forecast: its step, and how many times the last change was added to the last answer."""

    step: ForecastStep
    share: float


@dataclass(eq=False)
class _Line:
    """The line of one call of a step.

    Attributes:
        answers: the last two answers, in order, or the only one.
        total: how many answers there were.
        forecasts: the forecasts since the last of them.
        came: the share that came of the last change that the line foretold, ``[batch]`` float32. It
            is negative where answers turn back, as early under strong guidance.
    """

    answers: list[_Answer] = field(default_factory=list)
    forecasts: list[_Forecast] = field(default_factory=list)
    total: int = 0
    came: Tensor | None = None

    def add(self, new: _Answer) -> None:
        if self.answers and new.step.log_snr - self.answers[-1].step.log_snr < TOO_CLOSE:
            self.answers.pop()
            self.total -= 1
        if len(self.answers) == 2:
            first, last = self.answers
            before = (last.denoised - first.denoised).float().flatten(1)
            after = (new.denoised - last.denoised).float().flatten(1)
            foretold = before * _times(first.step, last.step, new.step)
            came = (foretold * after).sum(1) / foretold.square().sum(1)
            # Nothing came of no change.
            self.came = came.nan_to_num(0.0)
        self.answers = [*self.answers[-1:], new]
        self.forecasts = []
        self.total += 1

    @property
    def turns(self) -> bool:
        """Whether answers turn back in any sample."""
        return self.came is not None and bool((self.came < _TURN).any())

    @property
    def latest(self) -> int:
        """The latest step that the call took part in."""
        return (self.forecasts or self.answers)[-1].step.index


class Forecasts:
    """The forecasts of one sampling run, and the answers they are made from.

    A step may consist of several calls of the model, where the host guides outside of them. Whether
    the step is forecast is decided at its first call.

    Attributes:
        steps: the steps that were forecast.
    """

    def __init__(self, ratio: float):
        """For the argument, see :func:`tome_nodes.forecasting.steps.steps_that_run`."""
        self.steps: set[int] = set()
        self._ratio = ratio
        self._lines: list[_Line] = []
        self._latest: ForecastStep | None = None
        self._form: Hashable = None
        self._is_forecast = False
        self._noise_rises = False
        self._turns = False
        self._settled: bool | None = None
        self._reasons: Counter[str] = Counter()

    def predict(
        self,
        step: ForecastStep,
        latent: Tensor,
        call: int = 0,
        agree: Callable[[bool], bool] = bool,
    ) -> Tensor | None:
        """The forecast of the denoised latent; None if the model has to run.

        Args:
            step: the step of the run.
            latent: its noisy latent.
            call: the number of the call within its step, from 0.
            agree: told whether there is a forecast, it returns whether to use it. A host whose
                model runs on several ranks asks them all.
        """
        if call == 0:
            self._begin(step, latent)
        line = self._lines[call] if self._is_forecast and call < len(self._lines) else None
        may = line is not None and line.answers[-1].denoised.shape == latent.shape
        if not agree(may) or line is None:
            if may:
                self._reasons[reasons.OTHER_RANKS] += 1
            return None
        first, last = line.answers
        times = _times(first.step, last.step, step)
        share = min(_DAMPING * times, _MOST_CHANGE)
        line.forecasts.append(_Forecast(step, share))
        self.steps.add(step.index)
        return torch.lerp(first.denoised, last.denoised, 1 + share)

    def observe(self, step: ForecastStep, denoised: Tensor, call: int = 0) -> Tensor:
        """Note an answer of the model.

        Returns:
            The answer to use, corrected for the errors of the forecasts before it.
        """
        if torch.is_grad_enabled():
            return denoised
        while len(self._lines) <= call:
            self._lines.append(_Line())
        line = self._lines[call]
        # Whoever gets the answer may change it in place.
        new, corrected = _Answer(step, denoised.clone()), None
        if line.forecasts and step.latent_share is not None:
            corrected = _corrected(line, new, step.latent_share)
        line.add(new)
        if step.index == 1:
            self._settled = self._settled is not False and _is_settled(line)
        return denoised if corrected is None else corrected

    @property
    def reason(self) -> str | None:
        """Why nothing was forecast, in most of the steps that were to be; None if something was.

        Steps that the settings leave out count only if there are no others.
        """
        if self.steps:
            return None
        found = Counter(self._reasons)
        outside = found.pop(reasons.FORECAST_PERCENTS, 0)
        if found:
            return found.most_common(1)[0][0]
        return reasons.FORECAST_PERCENTS if outside else reasons.LEFT_OUT

    def _begin(self, step: ForecastStep, latent: Tensor) -> None:
        """Begin a step: decide whether it is forecast."""
        before, self._latest = self._latest, step
        form = latent.shape, latent.device, latent.dtype, step.conditions
        is_next = before is not None and step.index == before.index + 1
        self._noise_rises = before is not None and step.log_snr < before.log_snr
        if not is_next or self._noise_rises or form != self._form:
            # The answers so far are no guide to those to come.
            self._lines = []
        # This waits for the GPU. A short run whose answers turned once stays hard to tell.
        turns = any(line.turns for line in self._lines)
        self._turns = turns or (self._turns and step.count < LONG)
        # A step has fewer calls where guidance ends.
        self._lines = [line for line in self._lines if line.latest == step.index - 1]
        self._form = form
        self._is_forecast = self._may_forecast(step)

    def _may_forecast(self, step: ForecastStep) -> bool:
        running = self._running(step)
        if len(running) == step.count:
            if step.index < FIRST and step.count >= SHORTEST:
                # It is not known yet whether the run is settled.
                return False
            why = self._why_all_run(step)
        elif step.index in running:
            return False
        elif torch.is_grad_enabled():
            why = reasons.FORECAST_GRADIENTS
        elif not step.is_active:
            why = reasons.FORECAST_PERCENTS
        elif self._noise_rises:
            why = reasons.NOISE_RISES
        elif min((line.total for line in self._lines), default=0) < first_steps(
            step.count, self._is_settled(step)
        ):
            why = reasons.CHANGES
        elif not step.is_even:
            why = reasons.UNEVEN
        elif self._turns:
            why = reasons.TURNS
        else:
            return True
        self._reasons[why] += 1
        return False

    def _why_all_run(self, step: ForecastStep) -> str:
        if step.count < SHORTEST:
            return reasons.too_short(step.count, SHORTEST)
        return reasons.EDIT

    def _running(self, step: ForecastStep) -> frozenset[int]:
        is_settled = self._is_settled(step)
        is_edit = is_settled and step.from_noise and step.count < _SHORTEST_EDIT
        if is_edit:
            return frozenset(range(step.count))
        return steps_that_run(self._ratio, step.count, is_settled)

    def _is_settled(self, step: ForecastStep) -> bool:
        return step.count < LONG and self._settled is True


def _times(first: ForecastStep, last: ForecastStep, now: ForecastStep) -> float:
    """How many times as far it is from the last step to this one as from the first to the last."""
    return (now.log_snr - last.log_snr) / (last.log_snr - first.log_snr)


def _is_settled(line: _Line) -> bool:
    """Whether the first two answers of a run hardly differ, in all samples."""
    if len(line.answers) < 2 or line.answers[1].step.log_snr < LEAST_SNR:
        return False
    before, after = (answer.denoised.float().flatten(1) for answer in line.answers)
    return bool(((after - before).norm(dim=1) < _SETTLED * after.norm(dim=1)).all())


def _corrected(line: _Line, now: _Answer, latent_share: float) -> Tensor | None:
    """An answer, corrected for the errors of the forecasts before it; None if it has to stay.

    The forecasts should have been on the line from the answer before them to this one. What they
    lack is now missing in the sampler's latent. The correction makes the sampler add it to the next
    latent. The model answered for a latent that lacks it, so the correction also adds what is
    missing in the answer.

    Args:
        line: the forecasts, and the two answers that they were made from.
        now: the answer.
        latent_share: the share of the step's noisy latent in the next one.
    """
    first, last = line.answers
    # What the latent lacks: ``after`` times the change from the last answer to this one, minus
    # ``before`` times the change between the two answers before.
    after = before = 0.0
    longest = 1 - latent_share
    distance = now.step.log_snr - last.step.log_snr
    if distance < TOO_CLOSE:
        return None
    for forecast in line.forecasts:
        kept = forecast.step.latent_share
        if kept is None:
            return None
        place = (forecast.step.log_snr - last.step.log_snr) / distance
        after = kept * after + (1 - kept) * place
        before = kept * before + (1 - kept) * forecast.share
        longest = max(longest, 1 - kept)
    # The longest of the steps counts: a step much shorter than one before it would need a change
    # much larger than the error.
    weight = latent_share / longest + _RESPONSE
    changed = torch.lerp(last.denoised, now.denoised, 1 + weight * after)
    return changed.sub_((last.denoised - first.denoised) * (weight * before))
