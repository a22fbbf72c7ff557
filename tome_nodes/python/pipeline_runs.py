"""The sampling runs of a diffusers pipeline, whose scheduler counts their steps."""

import time
from collections.abc import Mapping
from threading import local
from typing import Any

from .. import reasons
from ..forecasting.forecasts import Forecasts
from ..forecasting.samplers import SAMPLERS, Sampler
from ..forecasting.steps import (
    ForecastStep,
    is_even,
    is_noise_alone,
    latent_share,
    log_snr,
    log_snrs,
)
from ..merging.schedule import is_active
from ..report.counts import Counts
from ..report.run_record import RunRecord, forecast_record
from ..settings.config import ToMeConfig
from .flow_call import FlowCall
from .latents import CalledLatents
from .log_once import LogOnce
from .scheduling import Scheduling

_UNIPC = Sampler(8, corrects=False)

_SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
"""The settings of schedulers under which noise falls unevenly."""

_METHODS: Mapping[str, Sampler] = {
    "FlowMatchEulerDiscreteScheduler": SAMPLERS["euler"],
    "UniPCMultistepScheduler": _UNIPC,
    "DPMSolverMultistepScheduler": SAMPLERS["dpmpp_2m"],
}
"""The samplers that schedulers are, by the names of diffusers' classes."""

_ROUNDING = 0.01
"""The most that a timestep may be off, as a whole number or in bfloat16."""


def _method_of(scheduler: Any) -> Sampler | reasons.Reason:
    """What is known of a scheduler as it is configured, or why nothing is forecast under it."""
    unknown = reasons.unknown_scheduler(type(scheduler).__name__)
    method = _METHODS.get(type(scheduler).__name__)
    if method is None:
        return unknown
    config = scheduler.config
    # Noise that is drawn anew in every step takes the place of what forecasts carry on.
    if config.get("stochastic_sampling") or "sde" in config.get("algorithm_type", ""):
        return unknown
    # UniPC looks back over three answers and corrects each.
    is_spaced = method is _UNIPC and any(config.get(spacing) for spacing in _SPACINGS)
    return reasons.UNEVEN if is_spaced else method


class PipelineRun:
    """One sampling run of a pipeline.

    Attributes:
        scheduler: the scheduler.
        timesteps: its timesteps; each run has a tensor of its own.
        forecasts: the forecasts of the run.
        latents: follows its latents, if steps are forecast.
        counts: counts its steps.
        step: the step of the latest call.
        noise: its noise level.
        begun: when each step began, in seconds.
        call: the number of this call within the step, from 0.
    """

    step: ForecastStep
    noise: float

    def __init__(self, scheduler: Any, method: Sampler, config: ToMeConfig):
        """Prepare a run under a scheduler of which a method is known."""
        self.scheduler = scheduler
        self.timesteps = scheduler.timesteps
        self.forecasts = Forecasts(config.ratio)
        self.latents = CalledLatents()
        self.counts = Counts()
        self.begun: dict[int, float] = {}
        self.call = -1
        self._method = method
        self._config = config
        # One more than there are timesteps, once it was told the steps.
        self._levels: list[float] = scheduler.sigmas.tolist()
        self._log_snrs: list[float] = []
        self._first: int | None = None
        self._stop = len(self.timesteps)
        self._index: int | None = None
        self._calls_before = 0

    def begin(self, call: FlowCall) -> reasons.Reason | None:
        """Begin a call; return why it is not known to be of this run, None if it is."""
        index, count = self._index_of(call), len(self.timesteps)
        # Without the level after the last step, the scheduler was not told the steps.
        is_told = getattr(self.scheduler, "num_inference_steps", count) is not None
        first = index if self._first is None else self._first
        is_in_run = len(self._levels) == count + 1 and first <= index < self._stop
        if not is_told or not is_in_run:
            return reasons.OTHER_NOISE
        noise = self._levels[index]
        if noise <= 0 or abs(noise - call.time) > _ROUNDING:
            return reasons.OTHER_NOISE
        if self._first is None:
            self._start(first)
        method = self._method
        if index == self._index:
            self.call += 1
            return None
        self._calls_before, self.call = self.call + 1, 0
        self._index, self.noise = index, noise
        may_forecast = self.forecasts.obstacle is None
        follows = self.latents.begin(call.latent) if may_forecast else None
        self.step = ForecastStep(
            index=index - first,
            count=self._stop - first,
            log_snr=log_snr(noise, is_flow=True),
            conditions=call.conditions,
            latent_share=latent_share(self._levels, index) if method.corrects else None,
            is_even=is_even(self._log_snrs, index - first, method.faster),
            is_active=self._is_active(index),
            follows=follows is None or bool(follows),
            from_noise=first == 0 and is_noise_alone(self._levels[0], most=1.0),
        )
        # The device is at rest, as the timestep and the prompts have been read from it.
        self.begun[self.step.index] = time.perf_counter()
        if may_forecast:
            self.forecasts.begin(self.step, call.latent)
        return None

    def _start(self, first: int) -> None:
        self._first = first
        count = self.counts.total_steps = self._stop - first
        self._log_snrs = log_snrs(self._levels[first : first + count], is_flow=True)
        self.forecasts.obstacle = self._method.obstacle(self._log_snrs)
        if not any(self._is_active(step) for step in range(first, self._stop)):
            config, begins = self._config, 1 - self._left(first)
            self.forecasts.obstacle = reasons.percents(
                config.start_percent, config.end_percent, begins
            )

    @property
    def is_last_step(self) -> bool:
        """Whether the latest call is of the last step."""
        return self.step.index == self.step.count - 1

    @property
    def is_over(self) -> bool:
        """Whether the latest call is the last, if the last step has as many as the step before."""
        return self.is_last_step and self.call + 1 >= self._calls_before

    def finish(self) -> RunRecord:
        """The record of the run."""
        counts, forecasts = self.counts, self.forecasts
        counts.forecast_steps = forecasts.steps
        name = type(self.scheduler).__name__
        return forecast_record(name, self._config, counts, forecasts.reason, lambda: self.begun)

    def _is_active(self, index: int) -> bool:
        """Whether a step is between ``start_percent`` and ``end_percent``."""
        return is_active(self._config, self._left(index), lambda percent: 1 - percent)

    def _left(self, index: int) -> float:
        """The share of the sampling that is left at a step."""
        return 1 - index / len(self.timesteps)

    def _index_of(self, call: FlowCall) -> int:
        """The step of a call, as the scheduler counts; at the first call it does not count yet.

        Some schedulers never count.
        """
        for name in ("step_index", "begin_index"):
            index = getattr(self.scheduler, name, None)
            if index is not None:
                return int(index)
        steps = range(len(self.timesteps))
        return min(steps, key=lambda step: abs(self._levels[step] - call.time))


class PipelineRuns:
    """The sampling runs of a pipeline, one at a time in every thread.

    The models of a pipeline share them, as experts take turns in a run.

    Attributes:
        scheduling: knows the scheduler of the pipeline.
        once: logs what is said of them.
    """

    def __init__(self, scheduling: Scheduling):
        """Follow the current scheduler."""
        self.scheduling = scheduling
        self._of_thread = local()
        self.once = LogOnce()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.scheduling,)

    def begin(self, call: FlowCall, config: ToMeConfig) -> PipelineRun | reasons.Reason:
        """The run that a call belongs to, which has begun it; else why it cannot be forecast."""
        scheduler = self.scheduling.scheduler
        method = _method_of(scheduler)
        if isinstance(method, reasons.Reason):
            return method
        run: PipelineRun | None = getattr(self._of_thread, "run", None)
        if run is None or run.timesteps is not scheduler.timesteps:
            run = self._of_thread.run = PipelineRun(scheduler, method, config)
        return run.begin(call) or run

    def end(self) -> None:
        """End the run of this thread, of which nothing is kept.

        One that stops between two calls of the network, as at an interrupt, is kept until the next
        begins.
        """
        self._of_thread.run = None

    def warn(self, reason: reasons.Reason) -> None:
        """Log why nothing was forecast, once."""
        self.once.warn(f"nothing was forecast: {reason}")
