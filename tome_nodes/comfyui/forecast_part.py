"""Forecast steps of a sampling run in ComfyUI, for any model whose answer is a denoised latent.

ComfyUI's sampler asks a guider for the guided answer of a step, and the guider makes it from the
answers to its conditions. These are what is forecast, so a scale that changes from step to step
counts in forecasts, too. If guidance does other than to scale, its answer is forecast as a whole.
Nothing has to be known about the model.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from comfy.patcher_extension import WrapperExecutor
from torch import Tensor

from .. import reasons
from ..run.counts import Counts
from ..run.record import RunRecord
from ..skipping.forecasts import Forecasts, Guidance
from ..skipping.plan import adds_noise
from ..skipping.samplers import SAMPLERS, UNKNOWN
from ..skipping.schedule import Schedule
from ..skipping.steps import LEAST_SNR, SHORTEST, ForecastStep, is_noise_alone
from ..skipping.trajectory import has_memory, scale_of
from .comfy_run import ComfyRun
from .conditions import conditions_of, names_of
from .guided_answers import (
    is_cached,
    options_of,
    place_in,
    seen_by_guidance,
    wrapped,
)


class ForecastPart:
    """Forecasts steps of one sampling run."""

    def __init__(self, comfy_run: ComfyRun, starts_empty: bool, streams: Sequence[slice]):
        """Prepare a run.

        ``starts_empty`` is whether the latent holds no picture. ``streams`` are those of the
        latent, see :func:`sampled_streams`.
        """
        run, noises = comfy_run.run, comfy_run.steps.schedule
        self._comfy_run = comfy_run
        self._run = run
        self._forecasts = run.skipping = Forecasts(run.config.ratio, streams, sees_guidance=True)
        # None in steps that run whatever was answered before.
        self._latent: Tensor | None = None
        self._calls: Counter[Hashable] = Counter()
        self._calls_before = self._calls
        self._parts: list[Tensor] = []
        self._parts_before = self._parts
        self._skipped: list[tuple[Hashable, Callable[[], list[Tensor]]]] = []
        self._was_called = False
        self._answered: int | None = None
        most = float(comfy_run.guider.model_patcher.get_model_object("model_sampling").sigma_max)
        from_noise = starts_empty or is_noise_alone(noises[0], most)
        name = comfy_run.sampler
        known = SAMPLERS.get(name, UNKNOWN)
        self._schedule = Schedule(noises, comfy_run.is_flow, known, from_noise, adds_noise(name))
        takes_over = not starts_empty and noises[0] < most
        self._forecasts.obstacle = self._obstacle_before(takes_over)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ForecastPart":
        # Another node may copy the transformer options, whose wrappers hold this.
        return self

    @contextmanager
    def installed(self, model_options: Mapping[str, Any]) -> Iterator[None]:
        """Take part in the run; afterwards, no latent is kept of it."""
        try:
            guider = self._comfy_run.guider
            with (
                wrapped(guider, self.predict_noise, self.calc_cond_batch),
                seen_by_guidance(guider, self.see_parts),
            ):
                yield
        finally:
            self._clear()

    def finish(self) -> list[RunRecord]:
        """The record of the run; none if no step was sampled."""
        if not self._run.has_begun:
            return []
        why = self._forecasts.reason
        if why == reasons.CHANGES and not self._was_called:
            why = reasons.NOT_CALLED
        elif why == reasons.UNEVEN:
            why = reasons.UNEVEN_IN_COMFYUI
        return [self._run.record(self._comfy_run.name, Counts(), why=why)]

    def predict_noise(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """Wrap the guided answer of a step."""
        with self._comfy_run.steps.answering(args[1]):
            step = self._step_of(args[0], options_of(args, kwargs))
            is_forecast = step is not None and self._forecasts.begin(step, args[0])
            what = "forecast" if is_forecast else "model runs"
            self._run.show(lambda step: f"{what}, {step}")
            self._begin_calls(None if step is None else args[0])
            answer = executor(*args, **kwargs)
        return answer if step is None else self._guided(answer)

    def _begin_calls(self, latent: Tensor | None) -> None:
        """Begin the calls of a step; ``latent`` is None if nothing is forecast any more."""
        self._latent = latent
        self._calls_before, self._calls = self._calls, Counter()
        self._parts_before, self._parts, self._skipped = self._parts, [], []

    def _guided(self, answer: Tensor) -> Tensor:
        """Note a guided answer; return what the sampler is to get."""
        # Whoever else gets it may change it in place.
        kept, parts = answer.detach().clone(), self._parts
        if self._calls_before and self._calls != self._calls_before:
            # What came second may have come first before.
            self._forecasts.clear()
        scale = scale_of(kept, parts)
        are_forecast = 0 < len(self._skipped) == self._calls.total()
        if scale is not None and are_forecast and self._forecasts.jumps_to(scale):
            parts = self._parts = self._run_after_all()
            answer = kept = torch.lerp(parts[1], parts[0], scale)
        guidance = None if scale is None else Guidance(scale, parts[0] - parts[1])
        corrected = self._forecasts.note_guided(kept, guidance)
        before = self._parts_before
        if len(before) == len(parts) > 1 and has_memory(kept, parts, before):
            self._forecasts.stop(reasons.MOMENTUM)
            self._clear()
        self._comfy_run.latents.note(corrected)
        return answer if corrected is kept else corrected

    def _run_after_all(self) -> list[Tensor]:
        """Run the calls of a step that was forecast; returns the answers to its conditions.

        Guidance is not asked again, since it may count its calls.
        """
        self._forecasts.take_back()
        answers = [
            self._forecasts.observe(torch.stack([*run()]), call) for call, run in self._skipped
        ]
        return [part.detach().clone() for each in answers for part in each.unbind()]

    def calc_cond_batch(
        self,
        executor: WrapperExecutor,
        model: Any,
        conds: Sequence[Any],
        x_in: Tensor,
        timestep: Tensor,
        model_options: Mapping[str, Any],
    ) -> list[Tensor]:
        """Wrap the answers to some conditions."""
        latent = self._latent
        if latent is None:
            answers: list[Tensor] = executor(model, conds, x_in, timestep, model_options)
            return answers
        names = tuple(None if each is None else names_of(each) for each in conds)
        known = id(model), names, place_in(x_in, latent)
        self._calls[known] += 1
        self._was_called = True
        call = *known, self._calls[known]
        found = self._forecasts.predict(call)
        is_whole = x_in.shape == latent.shape
        run = partial(executor, model, conds, x_in, timestep, model_options)
        if found is None:
            found = self._forecasts.observe(torch.stack([*run()]), call)
        elif is_whole:
            self._skipped.append((call, run))
        # Of windows, guidance gets what is put together. What comes after that is not known.
        # Guidance may change them in place.
        self._parts = [*self._parts, *found.detach().clone().unbind()] if is_whole else []
        return [*found.unbind()]

    def see_parts(self, given: Mapping[str, Any]) -> Any:
        """See the answers that guidance gets, if they were put together of parts."""
        answers, latent = given["conds_out"], self._latent
        is_whole = latent is not None and all(each.shape == latent.shape for each in answers)
        if is_whole and not self._parts:
            self._parts = [each.detach().clone() for each in answers]
        return answers

    def _step_of(self, latent: Tensor, options: Mapping[str, Any]) -> ForecastStep | None:
        """The current step, which has a noisy latent; None if nothing is forecast any more."""
        run, forecasts = self._run, self._forecasts
        index, noise = run.index, run.noise
        if forecasts.obstacle is None and self._answered == index:
            forecasts.obstacle = reasons.SEVERAL
        self._answered = index
        if forecasts.obstacle is not None or index >= run.total_steps or noise <= 0:
            return None
        # Some nodes report less noise than the schedule has, in a part of the run.
        is_true = math.isclose(noise, self._schedule.noises[index], rel_tol=1e-4)
        conditions = is_true, conditions_of(self._comfy_run.guider, options, noise)
        follows = self._comfy_run.latents.begin(latent, noise)
        return self._schedule.step(index, noise, conditions, run.is_active, follows)

    def _obstacle_before(self, takes_over: bool) -> reasons.Reason | None:
        """Why nothing can be forecast in the run, as far as can be told before it."""
        schedule, options = self._schedule, self._comfy_run.guider.model_options
        why, count = self._run.span.why_none(schedule.noises[:-1]), self._run.total_steps
        if why is not None:
            return why
        if count < SHORTEST:
            return reasons.too_short(count, SHORTEST)
        if is_cached(options):
            return reasons.CACHE
        if "denoise_mask_function" in options:
            return reasons.MOVING_MASK
        if takes_over and schedule.levels[0] < LEAST_SNR:
            return reasons.TAKES_OVER
        # What follows is not so under euler, which is the advice.
        if schedule.sampler is UNKNOWN:
            return reasons.sampler(self._comfy_run.sampler)
        if count < schedule.sampler.least:
            return reasons.sampler_needs(self._comfy_run.sampler, schedule.sampler.least)
        return schedule.obstacle

    def _clear(self) -> None:
        """Keep no latent any more."""
        self._begin_calls(None)
        self._parts_before = []
        self._comfy_run.latents.clear()
        self._forecasts.clear()


def sampled_streams(shapes: Sequence[Sequence[int]] | None, mask: Tensor | None) -> list[slice]:
    """Where each stream of a packed latent is among the numbers of a sample.

    Args:
        shapes: those of the streams, as far as the host says so.
        mask: how much of each number is sampled. Without any, a stream is left out: the host keeps
            it as it is, whatever the model answers.
    """
    streams, end = [], 0
    for shape in shapes or ():
        begin, end = end, end + math.prod(shape[1:])
        if mask is None or mask.flatten(1)[:, begin:end].any():
            streams.append(slice(begin, end))
    return streams
