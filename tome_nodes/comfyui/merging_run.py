"""Merge tokens in a sampling run in ComfyUI.

The wrapper of a model evaluation puts ``forward`` overrides on the transformer blocks, and takes
them off again.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from comfy.patcher_extension import WrapperExecutor
from torch import Tensor, nn

from .. import reasons
from ..merging.plan import Grid
from ..ops.clock import Clock, has_nothing_to_do
from ..patching.blocks import uncompiled
from ..patching.engine import MakeStrategy
from ..patching.evaluation import Run
from ..patching.schedule import Moment, is_active, progress_at, step_index
from ..report.last_run import LastRun
from ..settings.config import ToMeConfig
from . import comfy_compiler, host_checks
from .models import record_of
from .models.base import OVERRIDE, ComfyRecord
from .models.unet import is_unpatched
from .run_report import RunReport

KEY = "tome_nodes"
"""The transformer option with the run that an evaluation belongs to."""

GPUS = frozenset({"cuda"})
"""Devices that work on while the host goes on."""

# Not ``__name__``: ComfyUI names the package after its folder.
log = logging.getLogger("tome_nodes")


def apply_model(
    executor: WrapperExecutor,
    x: Tensor,
    t: Tensor,
    c_concat: Tensor | None = None,
    c_crossattn: Tensor | None = None,
    control: Any = None,
    transformer_options: dict[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Wrap one model evaluation."""
    model = executor.class_obj
    options = {} if transformer_options is None else transformer_options
    run: MergingRun | None = options.get(KEY)

    def denoise() -> Tensor:
        # A copy, since a stack that raises leaves its override of attention in it.
        return executor(x, t, c_concat, c_crossattn, control, {**options}, *args, **kwargs)

    if run is None:
        return denoise()
    # With sound, the latent is the first of what is packed into ``x``.
    packed = kwargs.get("latent_shapes")
    return run.evaluate(model, packed[0] if packed else x.shape, kwargs, t, options, denoise)


class MergingRun:
    """The state of one sampling run, which may evaluate several models in several threads."""

    def __init__(
        self,
        config: ToMeConfig,
        make_strategy: MakeStrategy,
        on_step: Callable[[str], None] | None,
        with_details: bool,
        sampler: str,
    ):
        """Prepare a run.

        Args:
            config: the settings.
            make_strategy: makes the strategy.
            on_step: called once in every step with a short text on what was merged.
            with_details: whether to record the run in detail.
            sampler: the name of the sampler.
        """
        self._config = config
        self._make_strategy = make_strategy
        self._on_step = on_step
        self._with_details = with_details
        self._records: dict[nn.Module, ComfyRecord | str] = {}
        self._runs: dict[nn.Module, Run | None] = {}
        self._reports: dict[type, tuple[RunReport, Run, Any]] = {}
        self._schedule: list[float] = []
        self._begins = 0.0
        self._step = 0
        self._is_counted = False
        self._may_count = not sampler.startswith(_COUNTS_OTHERWISE)
        self._clock: Clock | None = None
        self._begun: dict[int, Any] = {}
        self._gpu: torch.device | None = None
        self._waits: list[bool] = []
        self._others: set[str] = set()
        self._lock = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MergingRun":
        # Another node may copy the transformer options, which hold this, for every evaluation.
        return self

    @contextmanager
    def installed(self, model_options: Mapping[str, Any]) -> Iterator[None]:
        """Take part in a run, whose model options these are, until ComfyUI drops them."""
        options = model_options["transformer_options"]
        options[KEY] = self
        with comfy_compiler.switched_off(options):
            yield

    def watching(self, callback: Callable[..., Any] | None) -> Callable[..., Any]:
        """The callback of the sampler, which calls it in every step, after the model's answer.

        A GPU that is done by then waits for the host, which has queued its work one by one.
        """

        def watched(step: int, *args: Any, **kwargs: Any) -> Any:
            # Before the clock, whose mark is work for the GPU, too.
            if self._gpu is not None:
                self._waits.append(has_nothing_to_do(self._gpu))
            self._count(step)
            return None if callback is None else callback(step, *args, **kwargs)

        return watched

    def evaluate(
        self,
        model: Any,
        shape: Sequence[int],
        conditions: Mapping[str, Any],
        t: Tensor,
        options: dict[str, Any],
        denoise: Callable[[], Tensor],
    ) -> Tensor:
        """Evaluate a model, merging tokens.

        Args:
            model: a BaseModel of ComfyUI.
            shape: the shape of the latent, or of the part of it that is evaluated.
            conditions: the arguments of the model, by name, besides the latent.
            t: the noise levels of the samples.
            options: the transformer options.
            denoise: evaluates the model.
        """
        diffusion_model = uncompiled(model.diffusion_model)
        record = self._record_of(diffusion_model)
        level = noise_level(t) if self._has_span or not self._is_counted else None
        with self._lock:
            if not self._schedule:
                self._schedule = options.get("sample_sigmas", t[:1]).tolist()
                self._clock = Clock(t.device)
                if self._has_span:
                    to_sigma = model.model_sampling.percent_to_sigma
                    self._begins = progress_at(self._schedule[0], to_sigma)
            if diffusion_model not in self._runs:
                latent = Grid(*shape[-2:])
                self._runs[diffusion_model] = self._run_of(model, record, latent, t.device)
            self._gpu = t.device if t.device.type in GPUS else None
            run = self._runs[diffusion_model]
            moment = self._moment(model, level)
        if run is None or isinstance(record, str):
            return denoise()
        grid = record.grid(diffusion_model, shape)
        obstacle = record.obstacle(diffusion_model, conditions)
        others = _others(options)
        self._others |= {_short(other) for other in others}
        for module, reason in _IN_THE_WAY.items():
            if obstacle is None and any(other.endswith(module) for other in others):
                obstacle = reason
        if torch.is_grad_enabled() and _recomputes(diffusion_model):
            obstacle = reasons.RECOMPUTED
        dtype = model.get_dtype_inference()

        def evaluate() -> Tensor:
            with run.evaluation(moment, grid, t.device, dtype, obstacle, is_unpatched(options)):
                return denoise()

        return run.or_unmerged(evaluate)

    def _record_of(self, network: nn.Module) -> ComfyRecord | str:
        """The record of a diffusion model, or why it cannot merge."""
        if network not in self._records:
            try:
                self._records[network] = record_of(network)
            except ValueError as error:
                self._records[network] = str(error)
        return self._records[network]

    def _run_of(
        self, model: Any, record: ComfyRecord | str, latent: Grid, device: torch.device
    ) -> Run | None:
        """The evaluations of a model that is new in this run.

        None, and a warning in the log, if it cannot merge. Models of one class are deep clones of
        each other, and share a report.
        """
        network = uncompiled(model.diffusion_model)
        is_first = not self._reports
        if isinstance(record, str):
            obstacle: str | None = record
        else:
            changed = None if is_first else record.changed_part(network)
            obstacle = changed and f"{host_checks.version()} has another {changed}"
        if isinstance(record, str) or obstacle is not None:
            log.warning("[ToMe] a second model of this run stays unmerged: %s", obstacle)
            return None
        kind = type(network)
        if kind in self._reports:
            report = self._reports[kind][0]
        else:
            report = RunReport(
                max(1, len(self._schedule) - 1),
                latent,
                device,
                self._on_step if is_first else None,
                is_first and self._with_details,
            )
        config = record.in_effect(self._config)
        run = Run(config, record, network, self._make_strategy, report)
        self._reports.setdefault(kind, (report, run, model))
        return run

    def _count(self, step: int) -> None:
        """Count a step that the sampler says is done, while it says so of one after the other.

        Reading a noise level waits for the GPU, which is then idle until the model runs. So it is
        not read while steps are counted. If a sampler evaluates a step twice, the second evaluation
        counts as the next step's, as the sampler calls back before it.
        """
        clock = self._clock
        # Without a clock for the device, times are taken where a level that was read has made it
        # rest.
        is_next = clock is not None and clock.can_measure and step == self._step
        self._is_counted = self._may_count = self._may_count and is_next
        if self._is_counted:
            self._step += 1
            self._mark()

    def _mark(self) -> None:
        """Note when the present step began."""
        if self._clock is not None and self._step <= self._last_step:
            self._begun.setdefault(self._step, self._clock.now())

    def _moment(self, model: Any, level: float | None) -> Moment:
        """Where an evaluation is in the run; ``level`` is its noise level if it has to be known."""
        config = self._config
        if level is not None and not self._is_counted:
            self._step = step_index(self._schedule, level, self._step)
            self._mark()
        step = min(self._step, self._last_step)
        to_sigma = model.model_sampling.percent_to_sigma
        return Moment(
            step=step,
            progress=step / self._last_step if self._last_step else 0.0,
            picks=step,
            is_active=level is None or not self._has_span or is_active(config, level, to_sigma),
            begins=self._begins,
        )

    @property
    def _has_span(self) -> bool:
        """Whether merging is on in a part of the run only."""
        return self._config.start_percent > 0 or self._config.end_percent < 1

    @property
    def _last_step(self) -> int:
        return max(len(self._schedule) - 2, 0)

    @property
    def _gpu_waited(self) -> bool:
        """Whether the GPU waited for the host in most steps."""
        return sum(self._waits) > len(self._waits) / 2

    def _times(self) -> dict[int, float]:
        """When each step began, in seconds since the first."""
        clock = self._clock
        if clock is None:
            return {}
        clock.wait()
        first = next(iter(self._begun.values()), None)
        return {step: clock.between(first, mark) for step, mark in self._begun.items()}

    def finish(
        self,
        forecast_steps: Set[int] = frozenset(),
        begun: Mapping[int, float] | None = None,
    ) -> list[LastRun]:
        """The records of the run, one for each class of model; none if nothing was evaluated.

        Args:
            forecast_steps: the steps in which no model ran.
            begun: when each step began, in seconds; None to take the times of this part.
        """
        times = self._times if begun is None else lambda: begun
        last_runs = [
            report.finish(run, model, times, self._others, self._gpu_waited, forecast_steps)
            for report, run, model in self._reports.values()
        ]
        return [last for last in last_runs if last is not None]


_COUNTS_OTHERWISE = ("dpm_fast", "dpm_adaptive", "ar_video")
"""The samplers whose count of steps is not that of the noise levels."""


def noise_level(t: Tensor) -> float:
    """The highest noise level of some samples."""
    return max(t.flatten().tolist())


def _recomputes(network: nn.Module) -> bool:
    """Whether ComfyUI's node Train LoRA runs modules of a network again for their gradients."""
    return any("org_forward" in vars(module) for module in network.modules())


_IN_THE_WAY = {
    "nodes_tomesd": reasons.CORE_TOME,
    # It needs as many keys as queries, and raises no error if merging leaves fewer.
    "nodes_sparse_attention": reasons.SPARSE_ATTENTION,
}
"""Why nothing merges beside some of ComfyUI's own nodes, by their modules."""


def _others(options: Mapping[str, Any]) -> set[str]:
    """The modules of the functions that other nodes put into attention or blocks."""
    functions = [options.get(OVERRIDE)]
    for name, patches in options.get("patches", {}).items():
        functions += patches if name.startswith("attn") else ()
    for replaced in options.get("patches_replace", {}).values():
        functions += replaced.values()
    modules = {_module_of(each) for each in functions if each}
    return {module for module in modules if KEY not in module}


def _module_of(function: Any) -> str:
    """The module that a function is from, or its class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def _short(module: str) -> str:
    """The name of the pack that a module is from, or of a module of ComfyUI itself."""
    before, _, pack = module.replace("\\", "/").replace(".", "/").rpartition("custom_nodes/")
    return pack.partition("/")[0] if before else pack.rpartition("/")[2]
