"""The sampling runs of a diffusers pipeline, whose scheduler counts their steps."""

from collections.abc import Mapping
from threading import local
from typing import Any

from .. import reasons
from ..run.counts import Counts
from ..run.record import RunRecord
from ..run.sampling_run import SamplingRun
from ..run.span import Span
from ..settings.config import ToMeConfig
from ..skipping.forecasts import Forecasts
from ..skipping.samplers import SAMPLERS, Sampler
from ..skipping.schedule import Schedule
from ..skipping.steps import is_noise_alone
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
        noise: the noise level of the latest call.
        call: the number of this call within the step, from 0.
        sampling_run: its steps.
    """

    noise: float

    def __init__(self, scheduler: Any, method: Sampler, config: ToMeConfig):
        """Prepare a run under a scheduler of which a method is known."""
        self.scheduler = scheduler
        self.timesteps = scheduler.timesteps
        self.forecasts = Forecasts(config.ratio)
        self.latents = CalledLatents()
        self.call = -1
        self._method = method
        # Percents are of the steps, not of the noise, which is left out.
        self.sampling_run = SamplingRun(config, Span(config, lambda percent: 1 - percent))
        self.sampling_run.skipping = self.forecasts
        # One more than there are timesteps, once it was told the steps.
        self._levels: list[float] = scheduler.sigmas.tolist()
        self._schedule: Schedule | None = None
        self._first = 0
        self._stop = len(self.timesteps)
        self._index: int | None = None
        self._calls_before = 0

    def begin(self, call: FlowCall) -> reasons.Reason | None:
        """Begin a call; return why it is not known to be of this run, None if it is."""
        index, count = self._index_of(call), len(self.timesteps)
        # Without the level after the last step, the scheduler was not told the steps.
        is_told = getattr(self.scheduler, "num_inference_steps", count) is not None
        first = index if self._schedule is None else self._first
        is_in_run = len(self._levels) == count + 1 and first <= index < self._stop
        if not is_told or not is_in_run:
            return reasons.OTHER_NOISE
        noise = self._levels[index]
        if noise <= 0 or abs(noise - call.time) > _ROUNDING:
            return reasons.OTHER_NOISE
        schedule = self._schedule or self._start(first)
        if index == self._index:
            self.call += 1
            return None
        self._calls_before, self.call = self.call + 1, 0
        self._index, self.noise = index, noise
        run = self.sampling_run
        run.begin(index - first, self._left(index))
        # The device is at rest, as the timestep and the prompts have been read from it.
        run.mark(run.index)
        if self.forecasts.obstacle is None:
            follows = self.latents.begin(call.latent)
            step = schedule.step(run.index, noise, call.conditions, run.is_active, follows)
            self.forecasts.begin(step, call.latent)
        return None

    def _start(self, first: int) -> Schedule:
        """Begin the run with a step of the scheduler."""
        levels = self._levels
        from_noise = first == 0 and is_noise_alone(levels[0], most=1.0)
        schedule = Schedule(levels[first : self._stop + 1], True, self._method, from_noise)
        self._first, self._schedule = first, schedule
        self.sampling_run.total_steps = self._stop - first
        left = [self._left(step) for step in range(first, self._stop)]
        self.forecasts.obstacle = self.sampling_run.span.why_none(left) or schedule.obstacle
        return schedule

    @property
    def is_last_step(self) -> bool:
        """Whether the latest call is of the last step."""
        return self.sampling_run.index == self.sampling_run.total_steps - 1

    @property
    def is_over(self) -> bool:
        """Whether the latest call is the last, if the last step has as many as the step before."""
        return self.is_last_step and self.call + 1 >= self._calls_before

    def finish(self) -> RunRecord:
        """The record of the run so far."""
        self.sampling_run.total_steps = self.sampling_run.index + 1
        return self.sampling_run.record(type(self.scheduler).__name__, Counts())

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
            self.end()
            run = self._of_thread.run = PipelineRun(scheduler, method, config)
        return run.begin(call) or run

    def end(self) -> None:
        """End the run of this thread, of which nothing is kept; if it skipped steps, report it.

        One that an error stops between two calls of the network is kept until the next begins.
        """
        run: PipelineRun | None = getattr(self._of_thread, "run", None)
        self._of_thread.run = None
        if run is not None and run.forecasts.forecast_steps:
            self.once.report(run.sampling_run, run.finish)

    def warn(self, reason: reasons.Reason) -> None:
        """Log why nothing was forecast, once."""
        self.once.warn(f"nothing was forecast: {reason}")
