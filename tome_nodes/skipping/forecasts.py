"""Forecast the answer of a step from the two answers before it.

An answer is the prediction of the clean picture. Over the logarithm of signal to noise, it changes
nearly on a straight line, or in few steps along curves (``course.py``). So in some steps these take
the place of the model (see benchmarks/FIDELITY.md). Such forecasts are common for long runs:
TaylorSeer (arXiv 2503.06923).

The model's next answer shows how far off the forecasts before it were: a point between two answers
is known better than a point beyond them. What the sampler gets then makes up for the error. Where
the host tells guided answers, it is they that are corrected: guidance may do more to an answer than
to scale it, and a corrected answer is not one that the model gives.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import reasons
from .course import STRAIGHT, Course, course_of
from .skipping import Skipping
from .steps import (
    FIRST,
    LEAST_SNR,
    LONG,
    MANY,
    SHORTEST,
    TOO_CLOSE,
    ForecastStep,
    first_steps,
    steps_that_run,
)
from .trajectory import jumps

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

_DOUBTFUL = 2.0
"""In few steps, below ``MANY``, the answer after a forecast holds nothing of an error that is so
large that the answer changed by less than so many times as much. On judges, it changed by 3.4 times
as much and more."""


@dataclass(frozen=True, eq=False)
class Guidance:
    """Guidance that scales the difference between two answers, as far as can be told.

    Attributes:
        scale: how many times the difference is added to the second answer.
        difference: the first answer less the second.
    """

    scale: float
    difference: Tensor


@dataclass(frozen=True, eq=False)
class _Answer:
    """An answer of the model, perhaps guided: its step, and the denoised latent."""

    step: ForecastStep
    denoised: Tensor
    guidance: Guidance | None = None

    def guided_as(self, other: Guidance | None) -> Tensor:
        """The answer with the scale of other guidance, if both scale."""
        own = self.guidance
        if own is None or other is None:
            return self.denoised
        return self.denoised + (other.scale - own.scale) * own.difference


@dataclass(frozen=True, eq=False)
class _Forecast:
    """A forecast: its step, and what was added to the last answer."""

    step: ForecastStep
    added: Tensor
    guidance: Guidance | None = None


@dataclass(eq=False)
class _Line:
    """The line of one call of a step.

    Attributes:
        streams: see :class:`Forecasts`.
        answers: the last two answers, in order, or the only one.
        total: how many answers there were.
        forecasts: the forecasts since the last of them.
        came: the share that came of the last change that the line foretold, ``[batch, streams]``
            float32. It is negative where answers turn back, as early under strong guidance.
    """

    streams: Sequence[slice] = ()
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
            times = _times(first.step, last.step, new.step)
            before = _apart(last.denoised - first.denoised, self.streams)
            after = _apart(new.denoised - last.denoised, self.streams)
            came = [
                (old * now).sum(1) / (times * old.square().sum(1))
                for old, now in zip(before, after, strict=True)
            ]
            # Nothing came of no change.
            self.came = torch.stack(came, 1).nan_to_num(0.0)
        self.answers = [*self.answers[-1:], new]
        self.forecasts = []
        self.total += 1

    def forecast(self, step: ForecastStep, course: Course) -> Tensor:
        """The forecast of a step, which is noted."""
        first, last = self.answers
        shares = course.shares(first.step, last.step, step)
        change = shares.of(last.denoised - first.denoised)
        self.forecasts.append(_Forecast(step, change))
        return last.denoised + change

    @property
    def turns(self) -> bool:
        """Whether answers turn back in any stream of any sample."""
        return self.came is not None and bool((self.came < _TURN).any())

    @property
    def latest(self) -> int:
        """The latest step that the call took part in."""
        return (self.forecasts or self.answers)[-1].step.index


class Forecasts(Skipping):
    """The forecasts of one sampling run, and the answers they are made from.

    A step may consist of several calls, as guidance combines answers. Each call has a line of its
    own, so whatever the guidance does in a step, it does with forecasts, too. Whether the step is
    forecast is decided before its first call.

    Attributes:
        forecast_steps: see :class:`Skipping`.
    """

    nothing_skipped = "nothing was forecast"

    def __init__(self, ratio: float, streams: Sequence[slice] = (), sees_guidance: bool = False):
        """Prepare a run.

        Args:
            ratio: see :func:`tome_nodes.skipping.steps.steps_that_run`.
            streams: where each stream of a sample is among its numbers, if it has several, such as
                a video and its sound. There is so little of a sound that it would not show in what
                is decided by all numbers together.
            sees_guidance: whether the host calls :meth:`note_guided` in each step.
        """
        super().__init__()
        self.forecast_steps: set[int] = set()
        self._ratio = ratio
        self._streams = streams
        self._sees_guidance = sees_guidance
        self._lines: dict[Hashable, _Line] = {}
        self._guided: _Line | None = None
        self._latest: ForecastStep | None = None
        self._form: Hashable = None
        self._course = STRAIGHT
        self._is_forecast = False
        self._calls_end = False
        self._scale: float | None = None
        self._jump_at: int | None = None
        self._noise_rises = False
        self._turns = False
        self._settled: bool | None = None
        self._reasons: Counter[reasons.Reason] = Counter()

    def begin(self, step: ForecastStep, latent: Tensor) -> bool:
        """Begin a step with its noisy latent; returns whether it is forecast."""
        before, self._latest = self._latest, step
        if step.index == FIRST:
            self._settled = bool(self._telling) and all(map(_is_settled, self._telling))
        self._course = course_of(step, latent, self._is_settled(step))
        form = latent.shape, latent.device, latent.dtype, step.conditions
        is_next = before is not None and step.index == before.index + 1
        self._noise_rises = before is not None and step.log_snr < before.log_snr
        if not is_next or self._noise_rises or form != self._form or not step.follows:
            self.clear()
        # This waits for the GPU. A short run whose answers turned once stays hard to tell.
        turns = any(line.turns for line in self._telling)
        self._turns = turns or (self._turns and step.count < LONG)
        # Calls end where guidance does, and in every step where context windows move.
        ended = [call for call, line in self._lines.items() if line.latest < step.index - 1]
        for call in ended:
            del self._lines[call]
        self._calls_end = bool(ended)
        self._form = form
        self._is_forecast = self._may_forecast(step)
        return self._is_forecast

    def predict(
        self,
        call: Hashable = 0,
        agree: Callable[[bool], bool] = bool,
    ) -> Tensor | None:
        """The forecast of what a call of the current step returns; None if the model has to run.

        Args:
            call: what tells the call from the others of its step.
            agree: told whether there is a forecast, it returns whether to use it. A host whose
                model runs on several ranks asks them all.
        """
        line = self._lines.get(call) if self._is_forecast else None
        may = line is not None and len(line.answers) == 2
        if not agree(may) or line is None:
            if self._is_forecast:
                self._reasons[reasons.OTHER_RANKS if may else reasons.CHANGES] += 1
            return None
        self.forecast_steps.add(self._step.index)
        return line.forecast(self._step, self._course)

    def observe(self, denoised: Tensor, call: Hashable = 0) -> Tensor:
        """Note what the model answered to a call of the current step.

        Returns:
            The answer to use, corrected for the errors of the forecasts before it unless guided
            answers are.
        """
        if torch.is_grad_enabled():
            return denoised
        line = self._lines.setdefault(call, _Line())
        # Whoever gets the answer may change it in place.
        new = _Answer(self._step, denoised.clone())
        missing = None if self._sees_guidance else _missing(line, new, self._course)
        line.add(new)
        return denoised if missing is None else new.denoised + missing

    def jumps_to(self, scale: float) -> bool:
        """Whether a scale of guidance is far from that of the step before, see ``note_guided``."""
        return self._scale is not None and jumps(self._scale, scale)

    def take_back(self) -> None:
        """Have the current step run after all, although its calls were forecast."""
        self.forecast_steps.discard(self._step.index)
        self._reasons[reasons.CHANGES] += 1

    def note_guided(self, denoised: Tensor, guidance: Guidance | None = None) -> Tensor:
        """Note the guided answer of the current step, which must not change from then on.

        Where a host tells guided answers, they are what shows whether answers turn, or are settled.

        Args:
            denoised: the answer.
            guidance: how it was guided, if that was by a scale. Where the scale jumps, the latent
                moves another way from then on, so the model runs in the next step, too.

        Returns:
            The answer to use: corrected for the errors of the forecasts before it, or itself
            forecast if the step is, and guidance is no scale.
        """
        if torch.is_grad_enabled():
            return denoised
        if guidance is not None and self.jumps_to(guidance.scale):
            self._jump_at = self._step.index
        self._scale = None if guidance is None else guidance.scale
        step, line = self._step, self._guided or _Line(self._streams)
        self._guided = line
        if step.index in self.forecast_steps:
            if len(line.answers) < 2:
                return denoised
            last = line.answers[-1]
            # What guidance that is no scale makes of forecasts may be far from what it would make
            # of answers: it may look at the latent, or at how long an answer is.
            if guidance is None and last.guidance is None:
                return line.forecast(step, self._course)
            line.forecasts.append(_Forecast(step, denoised - last.denoised, guidance))
            return denoised
        new = _Answer(step, denoised, guidance)
        missing = _missing(line, new, self._course)
        line.add(new)
        return denoised if missing is None else denoised + missing

    def clear(self) -> None:
        self._lines, self._guided = {}, None

    @property
    def reason(self) -> reasons.Reason:
        """Why nothing was forecast, in most of the steps that were to be.

        Steps that the settings leave out count only if there are no others.
        """
        if self.obstacle is not None:
            return self.obstacle
        found = Counter(self._reasons)
        outside = found.pop(reasons.FORECAST_PERCENTS, 0)
        if found:
            return found.most_common(1)[0][0]
        return reasons.FORECAST_PERCENTS if outside else reasons.LEFT_OUT

    @property
    def _step(self) -> ForecastStep:
        """The current step."""
        assert self._latest is not None
        return self._latest

    @property
    def _fewest_answers(self) -> int:
        """How often the model has answered the call that it has answered least."""
        return min((line.total for line in self._lines.values()), default=0)

    @property
    def _telling(self) -> list[_Line]:
        """The lines by which it is decided whether a step is forecast."""
        return [*self._lines.values()] if self._guided is None else [self._guided]

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
            why = reasons.GRADIENTS
        elif not step.is_active:
            why = reasons.FORECAST_PERCENTS
        elif self._noise_rises:
            why = reasons.NOISE_RISES
        elif (
            self._calls_end
            or self._jump_at == step.index - 1
            or self._fewest_answers < first_steps(step.count, self._is_settled(step))
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

    def _why_all_run(self, step: ForecastStep) -> reasons.Reason:
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
    """Whether the first two answers of a run hardly differ, in all streams of all samples."""
    if len(line.answers) < 2 or line.answers[1].step.log_snr < LEAST_SNR:
        return False
    before, after = (_apart(answer.denoised, line.streams) for answer in line.answers)
    return all(
        bool(((now - old).norm(dim=1) < _SETTLED * now.norm(dim=1)).all())
        for old, now in zip(before, after, strict=True)
    )


def _apart(latent: Tensor, streams: Sequence[slice]) -> list[Tensor]:
    """The streams of a latent, each ``[batch, numbers]`` float32."""
    flat = latent.float().flatten(1)
    return [flat[:, stream] for stream in streams or (slice(None),)]


def _missing(line: _Line, new: _Answer, course: Course) -> Tensor | None:
    """What a new answer has to add to make up for the errors of the forecasts before it.

    The forecasts should have been on the way from the answer before them to the new one. What they
    lack is now missing in the sampler's latent. An answer with this makes the sampler add it to the
    next latent. The model answered for a latent that lacks it, so it also holds what is missing in
    the answer. None if the answer has to stay as it is.
    """
    now = new.step
    if not line.forecasts or now.latent_share is None:
        return None
    last = line.answers[-1]
    if now.log_snr - last.step.log_snr < TOO_CLOSE:
        return None
    missing = torch.zeros_like(new.denoised)
    longest = 1 - now.latent_share
    for forecast in line.forecasts:
        kept, how = forecast.step.latent_share, forecast.guidance
        if kept is None:
            return None
        place = course.place(last.step, forecast.step, now)
        should = torch.lerp(last.guided_as(how), new.guided_as(how), place)
        error = should - (last.denoised + forecast.added)
        missing = kept * missing + (1 - kept) * error
        longest = max(longest, 1 - kept)
    # The longest of the steps counts: a step much shorter than one before it would need a change
    # much larger than the error.
    shown: Tensor | float = course.response
    if now.count < MANY:
        shown = _shown(new.denoised - last.denoised, missing, course.response)
    return (missing * (now.latent_share / longest + shown)).to(missing.dtype)


def _shown(change: Tensor, error: Tensor, most: float) -> Tensor:
    """The share of an error in the latent that shows in the answer, at most ``most``.

    The answers of a model that has chosen one of few pictures change no more, whatever is in the
    latent. A forecast goes on from the last change there, and its error is as large as that.

    Args:
        change: the change of the answer since the forecast began, ``[batch, ...]``.
        error: the error, of the same form.

    Returns:
        float32, with a number for each sample that can be multiplied with the error.
    """
    changed, off = (each.float().flatten(1).norm(dim=1) for each in (change, error))
    share = (changed / off - _DOUBTFUL).nan_to_num(0.0).clamp(0.0, most)
    return share.view(-1, *[1] * (error.ndim - 1))
