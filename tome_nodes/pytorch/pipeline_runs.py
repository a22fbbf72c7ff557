"""The sampling runs of a diffusers pipeline, whose scheduler counts their steps."""

from threading import local
from typing import Any
from weakref import ref

from ..forecasting import reasons
from ..forecasting.forecasts import Forecasts
from ..forecasting.steps import Step, latent_share, log_snr
from ..patching.schedule import is_active, is_noise_alone
from ..report.counts import Counts
from ..report.log_line import log_line
from ..settings.config import ToMeConfig
from .flow_call import FlowCall
from .patched_model import log

_CORRECTED = "FlowMatchEulerDiscreteScheduler"
"""The scheduler under which the answer after a forecast makes up for its error."""

_SCHEDULERS = frozenset(
    {
        *(_CORRECTED, "FlowMatchLCMScheduler", "UniPCMultistepScheduler"),
        *("DPMSolverMultistepScheduler", "DEISMultistepScheduler", "SASolverScheduler"),
    }
)
"""Schedulers that evaluate a step once, and whose methods were tried (benchmarks/FIDELITY.md)."""

_ROUNDING = 0.01
"""The most that a timestep may be off, as a whole number or in bfloat16."""


class PipelineRun:
    """One sampling run of a pipeline.

    Attributes:
        scheduler: the scheduler.
        timesteps: its timesteps; each run has a tensor of its own.
        forecasts: the forecasts of the run.
        step: the step of the latest call.
        noise: its noise level.
        call: the number of this call within the step, from 0.
    """

    step: Step
    noise: float

    def __init__(self, scheduler: Any, config: ToMeConfig):
        self.scheduler = scheduler
        self.timesteps = scheduler.timesteps
        self.forecasts = Forecasts(config.ratio)
        self.call = -1
        self._config = config
        self._levels: list[float] = scheduler.sigmas.tolist()
        self._first: int | None = None
        self._index: int | None = None
        self._calls_before = 0

    def begin(self, call: FlowCall) -> bool:
        """Begin a call; return whether it is at the noise level that the scheduler says."""
        index, count = self._index_of(call), len(self.timesteps)
        # Without the level after the last step, the scheduler was not told the steps.
        if len(self._levels) != count + 1 or index >= count:
            return False
        noise = self._levels[index]
        if noise <= 0 or abs(noise - call.noise) > _ROUNDING:
            return False
        if index == self._index:
            self.call += 1
            return True
        self._calls_before, self.call = self.call + 1, 0
        self._index, self.noise = index, noise
        first = self._first = index if self._first is None else self._first
        self.step = Step(
            index=index - first,
            count=count - first,
            log_snr=log_snr(noise, is_flow=True),
            course=call.course,
            latent_share=latent_share(self._levels, index) if self._is_corrected else None,
            is_active=is_active(self._config, 1 - index / count, lambda percent: 1 - percent),
            from_noise=first == 0 and is_noise_alone(self._levels[0], most=1.0),
        )
        return True

    @property
    def is_last_step(self) -> bool:
        """Whether the latest call is of the last step."""
        return self.step.index == self.step.count - 1

    @property
    def is_over(self) -> bool:
        """Whether the latest call is the last, if the last step has as many as the one before."""
        return self.is_last_step and self.call + 1 >= self._calls_before

    @property
    def _is_corrected(self) -> bool:
        name = type(self.scheduler).__name__
        return name == _CORRECTED and not self.scheduler.config.stochastic_sampling

    def _index_of(self, call: FlowCall) -> int:
        """The step of a call, as the scheduler counts; its own count begins after the first."""
        for index in (self.scheduler.step_index, self.scheduler.begin_index):
            if index is not None:
                return int(index)
        steps = range(len(self.timesteps))
        return min(steps, key=lambda step: abs(self._levels[step] - call.noise))


class PipelineRuns:
    """The sampling runs of a pipeline, one at a time in each thread.

    The transformers of a pipeline share them, as experts take turns in a run.
    """

    def __init__(self, pipeline: Any = None, scheduler: Any = None):
        """Follow the current scheduler of ``pipeline``; without a pipeline, ``scheduler``."""
        # A reference here must not keep the pipeline alive.
        self._pipeline = None if pipeline is None else ref(pipeline)
        self._scheduler = getattr(pipeline, "scheduler", scheduler)
        self._of_thread = local()
        self._said: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return PipelineRuns, (None, self._current_scheduler())

    def begin(self, call: FlowCall, config: ToMeConfig) -> PipelineRun | str:
        """The run that a call belongs to, which has begun it; or why it cannot be forecast."""
        scheduler = self._current_scheduler()
        name = type(scheduler).__name__
        if name not in _SCHEDULERS:
            return reasons.unknown_scheduler(name)
        run: PipelineRun | None = getattr(self._of_thread, "run", None)
        if run is None or run.timesteps is not scheduler.timesteps:
            run = self._of_thread.run = PipelineRun(scheduler, config)
        return run if run.begin(call) else reasons.OTHER_NOISE

    def end(self) -> None:
        """End the run of this thread. Nothing of it is kept."""
        self._of_thread.run = None

    def report(self, run: PipelineRun, config: ToMeConfig) -> None:
        """Log what was forecast in a run, or why nothing was; each line once."""
        reason = run.forecasts.reason
        if reason is not None:
            self.warn_once(reason)
            return
        counts = Counts(run.step.count)
        counts.forecast_steps = run.forecasts.steps
        line = log_line(counts, config, [])
        if self._is_new(line):
            log.info("[ToMe] %s", line)

    def warn_once(self, reason: str) -> None:
        """Log why nothing was forecast."""
        if self._is_new(reason):
            log.warning("[ToMe] nothing was forecast: %s", reason)

    def _is_new(self, line: str) -> bool:
        is_new = line not in self._said
        self._said.add(line)
        return is_new

    def _current_scheduler(self) -> Any:
        pipeline = None if self._pipeline is None else self._pipeline()
        return getattr(pipeline, "scheduler", self._scheduler)
