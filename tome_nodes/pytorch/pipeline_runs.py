"""The sampling runs of a diffusers pipeline, whose scheduler counts their steps."""

import time
from collections.abc import Mapping
from threading import local
from typing import Any
from weakref import ref

from .. import reasons
from ..forecasting.forecasts import Forecasts
from ..forecasting.samplers import SAMPLERS, Sampler
from ..forecasting.steps import (
    Step,
    is_even,
    is_noise_alone,
    latent_share,
    log_snr,
    log_snrs,
)
from ..patching.schedule import is_active
from ..report.counts import Counts
from ..report.gain import gain_of
from ..report.log_line import log_line
from ..settings.config import ToMeConfig
from .flow_call import FlowCall
from .patched_model import Once, log

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


def _method_of(scheduler: Any) -> Sampler | str:
    """What is known of a scheduler as it is configured, or why nothing is forecast under it."""
    unknown = reasons.unknown_scheduler(type(scheduler).__name__)
    method = _METHODS.get(type(scheduler).__name__)
    if method is None:
        return unknown
    config = scheduler.config
    # Noise that is drawn anew in every step takes the place of what forecasts carry on.
    if config.get("stochastic_sampling") or "sde" in config.get("algorithm_type", ""):
        return unknown
    # It looks back over three answers and corrects each.
    is_spaced = method is _UNIPC and any(config.get(spacing) for spacing in _SPACINGS)
    return reasons.UNEVEN if is_spaced else method


class PipelineRun:
    """One sampling run of a pipeline.

    Attributes:
        scheduler: the scheduler.
        timesteps: its timesteps; each run has a tensor of its own.
        forecasts: the forecasts of the run.
        step: the step of the latest call.
        noise: its noise level.
        begun: when each step began, in seconds.
        call: the number of this call within the step, from 0.
    """

    step: Step
    noise: float

    def __init__(self, scheduler: Any, method: Sampler, config: ToMeConfig):
        """Prepare a run under a scheduler of which a method is known."""
        self.scheduler = scheduler
        self.timesteps = scheduler.timesteps
        self.forecasts = Forecasts(config.ratio)
        self.begun: dict[int, float] = {}
        self.call = -1
        self._method = method
        self._config = config
        self._levels: list[float] = scheduler.sigmas.tolist()
        self._log_snrs: list[float] = []
        self._obstacle: str | None = None
        self._first: int | None = None
        self._index: int | None = None
        self._calls_before = 0

    def begin(self, call: FlowCall) -> str | None:
        """Begin a call; return why it cannot be forecast, None if it perhaps can."""
        index, count = self._index_of(call), len(self.timesteps)
        # Without the level after the last step, the scheduler was not told the steps.
        if len(self._levels) != count + 1 or index >= count:
            return reasons.OTHER_NOISE
        noise = self._levels[index]
        if noise <= 0 or abs(noise - call.noise) > _ROUNDING:
            return reasons.OTHER_NOISE
        if self._first is None:
            self._first, self._log_snrs = index, log_snrs(self._levels[index:-1], is_flow=True)
            self._obstacle = self._method.obstacle(self._log_snrs, count - index)
            if not any(self._is_active(step) for step in range(index, count)):
                config = self._config
                self._obstacle = reasons.percents(
                    config.start_percent, config.end_percent, index / count
                )
        if self._obstacle is not None:
            return self._obstacle
        first, method = self._first, self._method
        if index == self._index:
            self.call += 1
            return None
        self._calls_before, self.call = self.call + 1, 0
        self._index, self.noise = index, noise
        self.step = Step(
            index=index - first,
            count=count - first,
            log_snr=log_snr(noise, is_flow=True),
            course=call.course,
            latent_share=latent_share(self._levels, index) if method.corrects else None,
            is_even=is_even(self._log_snrs, index - first, method.faster),
            is_active=self._is_active(index),
            from_noise=first == 0 and is_noise_alone(self._levels[0], most=1.0),
        )
        # The device is at rest, as the timestep and the prompts have been read from it.
        self.begun[self.step.index] = time.perf_counter()
        return None

    @property
    def is_last_step(self) -> bool:
        """Whether the latest call is of the last step."""
        return self.step.index == self.step.count - 1

    @property
    def is_over(self) -> bool:
        """Whether the latest call is the last, if the last step has as many as the step before."""
        return self.is_last_step and self.call + 1 >= self._calls_before

    def _is_active(self, index: int) -> bool:
        """Whether a step is between ``start_percent`` and ``end_percent``."""
        done = index / len(self.timesteps)
        return is_active(self._config, 1 - done, lambda percent: 1 - percent)

    def _index_of(self, call: FlowCall) -> int:
        """The step of a call, as the scheduler counts; at the first call it does not count yet."""
        for index in (self.scheduler.step_index, self.scheduler.begin_index):
            if index is not None:
                return int(index)
        steps = range(len(self.timesteps))
        return min(steps, key=lambda step: abs(self._levels[step] - call.noise))


class PipelineRuns:
    """The sampling runs of a pipeline, one at a time in every thread.

    The transformers of a pipeline share them, as experts take turns in a run.
    """

    def __init__(self, pipeline: Any = None, scheduler: Any = None):
        """Follow the current scheduler of ``pipeline``; without a pipeline, ``scheduler``."""
        # A reference here must not keep the pipeline alive.
        self._pipeline = None if pipeline is None else ref(pipeline)
        self._scheduler = getattr(pipeline, "scheduler", scheduler)
        self._of_thread = local()
        self._once = Once()

    def __reduce__(self) -> tuple[Any, ...]:
        return PipelineRuns, (None, self._current_scheduler())

    def begin(self, call: FlowCall, config: ToMeConfig) -> PipelineRun | str:
        """The run that a call belongs to, which has begun it; or why it cannot be forecast."""
        scheduler = self._current_scheduler()
        method = _method_of(scheduler)
        if isinstance(method, str):
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

    def report(self, run: PipelineRun, config: ToMeConfig) -> None:
        """Log what was forecast in a run and what that gained, or why nothing was.

        The same is logged once, with what the first such run gained.
        """
        if run.forecasts.reason is not None:
            self.warn(run.forecasts.reason)
            return
        counts = Counts(run.step.count)
        counts.forecast_steps = run.forecasts.steps
        line = log_line(counts, config)
        if self._once.is_new(line):
            log.info("[ToMe] %s; %s", line, gain_of(counts, config, run.begun).words)

    def warn(self, reason: str) -> None:
        """Log why nothing was forecast, once."""
        self._once.warn(f"nothing was forecast: {reason}")

    def _current_scheduler(self) -> Any:
        pipeline = None if self._pipeline is None else self._pipeline()
        return getattr(pipeline, "scheduler", self._scheduler)
