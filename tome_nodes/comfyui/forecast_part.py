"""Forecast steps of a sampling run in ComfyUI, for any model whose answer is a denoised latent.

ComfyUI's sampler asks a guider for the guided answer of a step, and the guider makes it from the
answers to its conditions. These are what is forecast, so guidance does to forecasts whatever it
does to answers, and nothing has to be known about the model.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from comfy.model_sampling import CONST
from comfy.patcher_extension import WrapperExecutor
from torch import Tensor

from .. import reasons
from ..forecasting.forecasts import Forecasts
from ..forecasting.samplers import SAMPLERS
from ..forecasting.steps import (
    FASTER,
    LEAST_SNR,
    SHORTEST,
    ForecastStep,
    is_even,
    is_noise_alone,
    latent_share,
    log_snr,
    log_snrs,
)
from ..forecasting.trajectory import has_memory, jumps, scale_of
from ..merging.schedule import is_active
from ..report.counts import Counts
from ..report.run_record import RunRecord, forecast_record
from ..settings.config import ToMeConfig
from .conditions import conditions_of, names_of
from .guided_answers import (
    Latents,
    is_cached,
    none_is_active,
    options_of,
    place_in,
    seen_by_guidance,
    wrapped,
)
from .step_count import StepCount


class ForecastPart:
    """Forecasts steps of one sampling run."""

    def __init__(
        self,
        config: ToMeConfig,
        guider: Any,
        sampler: str,
        steps: StepCount,
        latents: Latents,
        starts_empty: bool,
        streams: Sequence[slice],
        on_step: Callable[[str], None] | None,
    ):
        """Prepare a run whose steps are counted by ``steps``, under the sampler of this name.

        ``latents`` follows the latents of the run. The model options of ``guider``, ComfyUI's, are
        of this run alone. ``starts_empty`` is whether the latent holds no picture. ``streams`` are
        those of the latent, see :func:`sampled_streams`. ``on_step`` is called once in every step
        with a short text on what was done.
        """
        schedule = steps.schedule
        self._forecasts = Forecasts(config.ratio, streams)
        self._steps = steps
        self._latents = latents
        self._step: ForecastStep | None = None
        self._latent: Tensor | None = None
        self._calls: Counter[Hashable] = Counter()
        self._parts: list[Tensor] = []
        self._added: list[Tensor] = []
        self._scale: float | None = None
        self._was_called = False
        self._shown = 0
        self._config = config
        self._guider = guider
        self._sampling: Any = guider.model_patcher.get_model_object("model_sampling")
        self._is_flow = isinstance(self._sampling, CONST)
        self._levels = log_snrs(schedule[:-1], self._is_flow)
        most = float(self._sampling.sigma_max)
        self._takes_over = not starts_empty and schedule[0] < most
        self._from_noise = starts_empty or is_noise_alone(schedule[0], most)
        self._on_step = on_step
        self._answered: int | None = None
        known = SAMPLERS.get(sampler)
        self._corrects = known is not None and known.corrects
        self._faster = FASTER if known is None else known.faster
        self._forecasts.obstacle = self._obstacle_before(sampler)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ForecastPart":
        # Another node may copy the transformer options, whose wrappers hold this.
        return self

    @property
    def reason(self) -> reasons.Reason | None:
        """Why nothing was forecast; None if something was."""
        reason = self._forecasts.reason
        if reason == reasons.CHANGES and not self._was_called:
            return reasons.NOT_CALLED
        return reasons.UNEVEN_IN_COMFYUI if reason == reasons.UNEVEN else reason

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take part in the run; afterwards, no latent is kept of it."""
        try:
            with (
                wrapped(self._guider, self.predict_noise, self.calc_cond_batch),
                seen_by_guidance(self._guider, self.see_parts),
            ):
                yield
        finally:
            self._clear()

    def finish(self) -> list[RunRecord]:
        """The record of the run; none if no step was sampled."""
        if not self._shown:
            return []
        counts = Counts(self._steps.total)
        counts.forecast_steps = self._forecasts.steps
        name = type(self._guider.model_patcher.model.model_config).__name__
        return [forecast_record(name, self._config, counts, self.reason, self._steps.begun)]

    def predict_noise(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """Wrap the guided answer of a step."""
        # Reading the noise level waits for the GPU.
        latent, sigma = args[0], float(args[1].max())
        self._steps.begin(args[1].device)
        step = self._step = self._step_of(latent, sigma, options_of(args, kwargs))
        is_forecast = step is not None and self._forecasts.begin(step, latent)
        self._show(is_forecast)
        if step is None:
            return executor(*args, **kwargs)
        self._latent = latent
        calls, self._calls = self._calls, Counter()
        before, self._parts, self._added = self._parts, [], []
        answer = executor(*args, **kwargs)
        # Whoever else gets it may change it in place.
        kept = answer.detach().clone()
        self._forecasts.note_guided(step, kept)
        if calls and self._calls != calls:
            # What came second may have come first before.
            self._forecasts.restart()
        parts = self._parts
        if len(before) == len(parts) > 1 and has_memory(kept, parts, before):
            self._forecasts.obstacle = reasons.MOMENTUM
            self._clear()
        if (missing := self._missing_after_jump(step, kept)) is not None:
            answer = kept = kept + missing
        self._latents.note(kept)
        return answer

    def _missing_after_jump(self, step: ForecastStep, guided: Tensor) -> Tensor | None:
        """What a guided answer lacks if the scale has jumped; None if it lacks nothing.

        What was added to the answers makes up for forecasts, which were guided with the scale
        before.
        """
        before, now = self._scale, scale_of(guided, self._parts)
        self._scale = now
        if before is None or now is None or not jumps(before, now):
            return None
        self._forecasts.note_jump(step)
        if len(self._added) != 2:
            return None
        first, second = self._added
        return (before - now) * (first - second)

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
        step, latent = self._step, self._latent
        if step is None or latent is None:
            answers: list[Tensor] = executor(model, conds, x_in, timestep, model_options)
            return answers
        names = tuple(None if each is None else names_of(each) for each in conds)
        known = id(model), names, place_in(x_in, latent)
        self._calls[known] += 1
        self._was_called = True
        call = *known, self._calls[known]
        found = self._forecasts.predict(step, call)
        is_whole = x_in.shape == latent.shape
        if found is None:
            answers = executor(model, conds, x_in, timestep, model_options)
            given = torch.stack([*answers])
            found = self._forecasts.observe(step, given, call)
            if found is not given and is_whole:
                self._added += (found - given).unbind()
        # Of windows, guidance gets what is put together. What comes after that is not known.
        # Guidance may change them in place.
        self._parts = [*self._parts, *found.detach().clone().unbind()] if is_whole else []
        return [*found.unbind()]

    def see_parts(self, given: Mapping[str, Any]) -> Any:
        """See the answers that guidance gets, if they were put together of parts."""
        answers, latent = given["conds_out"], self._latent
        is_whole = latent is not None and all(each.shape == latent.shape for each in answers)
        if self._step is not None and is_whole and not self._parts:
            self._parts = [each.detach().clone() for each in answers]
        return answers

    def _step_of(
        self, latent: Tensor, sigma: float, options: Mapping[str, Any]
    ) -> ForecastStep | None:
        """The step of a noisy latent; None if nothing is forecast any more."""
        forecasts = self._forecasts
        if forecasts.obstacle is None and self._answered == self._steps.done:
            forecasts.obstacle = reasons.SEVERAL
        steps, index = self._steps, self._steps.done
        self._answered = index
        if forecasts.obstacle is not None or index >= steps.total or sigma <= 0:
            return None
        # Some nodes report less noise than the schedule has, in a part of the run.
        is_true = math.isclose(sigma, steps.schedule[index], rel_tol=1e-4)
        follows = self._latents.begin(latent, sigma)
        return ForecastStep(
            index=index,
            count=steps.total,
            log_snr=log_snr(sigma, self._is_flow),
            conditions=(is_true, conditions_of(self._guider, options, sigma)),
            is_even=is_even(self._levels, index, self._faster),
            latent_share=latent_share(steps.schedule, index) if self._corrects else None,
            is_active=is_active(self._config, sigma, self._sampling.percent_to_sigma),
            follows=follows is None or bool(follows),
            from_noise=self._from_noise,
        )

    def _obstacle_before(self, sampler: str) -> reasons.Reason | None:
        """Why nothing can be forecast in the run, as far as can be told before it."""
        config, schedule = self._config, self._steps.schedule
        why = none_is_active(config, schedule, self._sampling.percent_to_sigma)
        if why is not None:
            return why
        count, options = self._steps.total, self._guider.model_options
        if count < SHORTEST:
            return reasons.too_short(count, SHORTEST)
        if is_cached(options):
            return reasons.CACHE
        if "denoise_mask_function" in options:
            return reasons.MOVING_MASK
        if self._takes_over and self._levels[0] < LEAST_SNR:
            return reasons.TAKES_OVER
        # What follows is not so under euler, which is the advice.
        known = SAMPLERS.get(sampler)
        if known is None:
            return reasons.sampler(sampler)
        if count < known.least:
            return reasons.sampler_needs(sampler, known.least)
        return known.obstacle(self._levels)

    def _clear(self) -> None:
        """Keep no latent any more."""
        self._step = self._latent = None
        self._parts, self._added = [], []
        self._latents.clear()
        self._forecasts.restart()

    def _show(self, is_forecast: bool) -> None:
        """Show what the step does, once."""
        done, total = self._steps.done, self._steps.total
        if done < self._shown:
            return
        self._shown = done + 1
        if self._on_step is not None:
            what = "forecast" if is_forecast else "model runs"
            self._on_step(f"{what}, step {done + 1}/{total}")


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


def function_of(sampler: Any) -> str:
    """The name of a sampler, or of the sampler that it wraps, without ``sample_``."""
    options = getattr(sampler, "extra_options", {})
    for inner in options.values():
        if hasattr(inner, "sampler_function"):
            return function_of(inner)
    function = getattr(sampler, "sampler_function", None)
    name = str(getattr(function, "__name__", type(sampler).__name__)).removeprefix("sample_")
    name = _NAMES.get(name, name)
    return f"{name} with s_churn" if options.get("s_churn") else name


_NAMES = {"unipc": "uni_pc", "unipc_bh2": "uni_pc_bh2"}
"""The names of samplers whose functions have another."""
