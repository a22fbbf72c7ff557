"""Attach token merging to a ComfyUI model, and take it off again.

A patched model is a clone with two wrappers under our key. The outer one creates the state of a
sampling run, and drops it at the end. The inner one puts ``forward`` overrides on the transformer
blocks for one model evaluation, and takes them off again. Weights, patch lists and the source model
are not touched, so LoRA, saving, model merging and other nodes' patches work as before.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, cast

import torch
from comfy.model_patcher import ModelPatcher
from comfy.model_sampling import CONST
from comfy.patcher_extension import CallbacksMP, WrapperExecutor, WrappersMP
from torch import Tensor, nn

from ..merging.layout import Grid, Picture
from ..patching.answer import Answer
from ..patching.blocks import uncompiled
from ..patching.engine import MakeStrategy
from ..patching.evaluation import Run
from ..patching.schedule import Moment, is_active, is_noise_alone, latent_share, log_snr, step_index
from ..report.last_run import LastRun
from ..settings.config import ToMeConfig
from ..strategies import make_strategy
from ..tuning.search import Measured
from . import comfy_compiler, host_checks, workflow
from .asking import ask
from .attention import sparse_attention
from .models import record_of
from .models.base import ComfyRecord, Inputs
from .models.unknown import UnknownTransformer
from .run_report import RunReport

KEY = "tome_nodes"
"""Our key among the wrappers of a model and in its transformer options."""

# Not ``__name__``: ComfyUI names the package after its folder.
log = logging.getLogger("tome_nodes")


def attach(
    model: ModelPatcher,
    config: ToMeConfig,
    make_strategy: MakeStrategy = make_strategy,
    on_step: Callable[[str], None] | None = None,
    wants_details: Callable[[], bool] | None = None,
    tuned: Measured | None = None,
    is_quiet: bool = False,
) -> ModelPatcher:
    """A clone of a model that merges tokens. Its settings replace any earlier ones.

    Args:
        model: the model to clone; it is not changed.
        config: the settings.
        make_strategy: makes the strategy of each run.
        on_step: called once in each step with a short text on what was merged.
        wants_details: called at the start of each run; returns whether to record it in detail.
        tuned: what ToMe Tune measured with these settings, for the log and the report.
        is_quiet: whether runs log nothing.

    Returns:
        The clone; ``model`` itself, and a warning in the log, if a part of this ComfyUI is not as
        the pack knows it.

    Raises:
        ValueError: the model does not belong to a family that can merge tokens.
    """
    changed = host_checks.changed_part(model, record_for(model), _network(model))
    if changed is not None:
        log.warning(
            "[ToMe] the model stays unpatched, as %s has another %s than this version of ToMe "
            "Nodes knows; a later one may know it",
            host_checks.version(),
            changed,
        )
        return model
    clone = detach(model)
    if not config.merges_nothing:
        attachment = _Attachment(config, make_strategy, on_step, wants_details, tuned, is_quiet)
        clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, attachment.pre_run)
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, attachment.outer_sample)
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, attachment.apply_model)
    return clone


def record_for(model: ModelPatcher) -> ComfyRecord:
    """The record of a model.

    Raises:
        ValueError: the model does not belong to a family that can merge tokens.
    """
    if not hasattr(model.model, "diffusion_model"):
        name = type(model.model).__name__
        raise ValueError(f"token merging does not work with a {name}: it is no diffusion model")
    return record_of(_network(model))


def _network(model: ModelPatcher) -> nn.Module:
    return uncompiled(model.get_model_object("diffusion_model"))


def is_model(value: Any) -> bool:
    """Whether a value is a model as ComfyUI's loaders make them."""
    return isinstance(value, ModelPatcher)


def is_attached(model: ModelPatcher) -> bool:
    """Whether a model is patched."""
    return _attachment(model) is not None


def last_run(model: ModelPatcher, samplers: Set[str] | None = None) -> LastRun | None:
    """The last run of a patched model or of a clone of it, None if there was none.

    Args:
        model: a model, patched or not.
        samplers: the ids of nodes, one of which must have sampled; None for any.
    """
    attachment = _attachment(model)
    runs = {} if attachment is None else attachment.runs
    matching = [run for node, run in runs.items() if samplers is None or node in samplers]
    return matching[-1] if matching else None


def _attachment(model: ModelPatcher) -> "_Attachment | None":
    wrappers = model.get_wrappers(WrappersMP.OUTER_SAMPLE, KEY)
    return wrappers[0].__self__ if wrappers else None


def detach(model: ModelPatcher) -> ModelPatcher:
    """A clone of ``model`` without token merging."""
    clone = model.clone()
    clone.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, KEY)
    clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, KEY)
    clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    return clone


def is_empty(latent: Any) -> bool:
    """Whether a latent holds no picture."""
    return latent is None or not picture_of(latent).any()


def picture_of(latent: Any) -> Tensor:
    """The picture or video of a latent, without the sound that may come second."""
    picture: Tensor = latent.unbind()[0] if latent.is_nested else latent
    return picture


_MADE_UP_FOR = frozenset(
    f"sample_{name}"
    for name in (
        *("euler", "euler_ancestral", "heun", "dpm_2", "dpmpp_2m", "dpmpp_2m_sde"),
        *("dpmpp_2m_sde_gpu", "dpmpp_sde", "dpmpp_sde_gpu", "res_multistep", "ddpm", "er_sde"),
        *("res_multistep_ancestral", "gradient_estimation", "seeds_2"),
    )
)
"""The functions of samplers that gain if the answer after a forecast makes up for its error
(benchmarks/FIDELITY.md). The correction is that of Euler's method; under some others it does harm.
"""


def _makes_up(sampler: Any, options: Mapping[str, Any]) -> bool:
    """Whether a run with some sampler and model options can make up for errors of forecasts."""
    function = getattr(sampler, "sampler_function", None)
    # A moving mask replaces different parts of the answer in each step.
    has_still_mask = "denoise_mask_function" not in options
    return has_still_mask and getattr(function, "__name__", None) in _MADE_UP_FOR


@dataclass(eq=False)
class _Attachment:
    """The wrappers of one patched model. The attributes not listed are arguments of :func:`attach`.

    Attributes:
        runs: the last run of each node that samples, by its id, in the order in which they ended.
            Nothing else of a run is kept.
        running: the runs that have not ended.
    """

    config: ToMeConfig
    make_strategy: MakeStrategy
    on_step: Callable[[str], None] | None
    wants_details: Callable[[], bool] | None
    tuned: Measured | None
    is_quiet: bool
    runs: dict[str | None, LastRun] = field(default_factory=dict)
    running: "set[_SamplingRun]" = field(default_factory=set)

    def pre_run(self, patcher: ModelPatcher) -> None:
        """Warn if the patched model takes part in a run that is not wrapped.

        A guider of two models uses only the wrappers of the first.
        """
        if not self.running:
            log.warning(
                "[ToMe] the settings of ToMe Patch Model on %s are not used in this run, as it "
                "takes part in the run of another model, for example as the negative model of a "
                "guider; patch that model, whose settings then count for both",
                type(patcher.model).__name__,
            )

    def outer_sample(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """Wrap one sampling run, whose state is in its model options until ComfyUI drops these."""
        node = workflow.running_node()
        self.runs.pop(node, None)
        latent = args[1] if len(args) > 1 else kwargs.get("latent_image")
        sampler = args[2] if len(args) > 2 else kwargs.get("sampler")
        model_options = executor.class_obj.model_options
        run = _SamplingRun(self, is_empty(latent), _makes_up(sampler, model_options))
        options = model_options["transformer_options"]
        options[KEY] = run
        self.running.add(run)
        try:
            with comfy_compiler.switched_off(options):
                result = executor(*args, **kwargs)
        finally:
            self.running.discard(run)
        last = run.finish()
        if last is not None:
            self.runs[node] = last
        return result

    def apply_model(
        self,
        executor: WrapperExecutor,
        x: Tensor,
        t: Tensor,
        c_concat: Tensor | None = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Wrap one model evaluation."""
        model = executor.class_obj
        options = {} if transformer_options is None else transformer_options
        run: _SamplingRun | None = options.get(KEY)

        def denoise(latent: Tensor, options: dict[str, Any]) -> Tensor:
            return executor(latent, t, c_concat, c_crossattn, control, options, **kwargs)

        if run is None:
            return denoise(x, options)
        # With sound, the latent is the first of what is packed into ``x``.
        packed = kwargs.get("latent_shapes")
        inputs = Inputs(tuple(packed[0] if packed else x.shape), kwargs)

        def evaluate_alone(
            latent: Tensor, conditions: Mapping[str, Any], options: dict[str, Any]
        ) -> Tensor:
            return model._apply_model(latent, t, c_concat, c_crossattn, None, options, **conditions)

        asked = partial(ask, model, x, inputs, (c_concat, c_crossattn), options, evaluate_alone)
        return run.evaluate(model, inputs, x, t, options, denoise, asked)


class _SamplingRun:
    """The state of one sampling run, which may evaluate several models in several threads."""

    def __init__(self, attachment: _Attachment, from_noise: bool, makes_up: bool):
        self._attachment = attachment
        self._from_noise = from_noise
        self._makes_up = makes_up
        self._config = attachment.config
        self._records: dict[nn.Module, ComfyRecord | str] = {}
        self._runs: dict[nn.Module, Run | None] = {}
        self._reports: dict[type, tuple[RunReport, Run, Any]] = {}
        self._schedule: list[float] = []
        self._step = 0
        self._sigma: float | None = None
        self._calls: Counter[Hashable] = Counter()
        self._lock = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SamplingRun":
        # Another node may copy the transformer options, which hold this, for each evaluation.
        return self

    def evaluate(
        self,
        model: Any,
        inputs: Inputs,
        x: Tensor,
        t: Tensor,
        options: dict[str, Any],
        denoise: Callable[[Tensor, dict[str, Any]], Tensor],
        asked: Callable[[], Answer],
    ) -> Tensor:
        """Evaluate a model, merging tokens.

        Args:
            model: a BaseModel of ComfyUI.
            inputs: the shape of the latent, and the conditions.
            x: the latent.
            t: the noise level of each sample.
            options: the transformer options.
            denoise: evaluates the model, given a latent and transformer options.
            asked: asks the model where its pictures are.
        """
        latent = Grid(*inputs.shape[-2:])
        diffusion_model = uncompiled(model.diffusion_model)
        record = self._record_of(diffusion_model)
        answer = None
        if isinstance(record, UnknownTransformer):
            answer = asked()
            record = record.answered(answer.stacks, answer.passes_options)
        # Reading the noise level waits for the GPU, which is then idle until the model runs.
        sigma = max(t.flatten().tolist())
        with self._lock:
            if not self._schedule:
                self._schedule = options.get("sample_sigmas", t[:1]).tolist()
            if diffusion_model not in self._runs:
                self._runs[diffusion_model] = self._run_of(model, record, latent, t.device)
            run = self._runs[diffusion_model]
            moment = self._moment(model, sigma, options, len(x))
        if run is None:
            return denoise(x, options)
        record = cast(ComfyRecord, run.model.record)
        layouts = None
        if answer is None:
            pictures, obstacle = _pictures(record, diffusion_model, inputs)
        else:
            pictures, layouts, obstacle = answer.pictures, answer.layouts, answer.obstacle
        obstacle = obstacle or sparse_attention(options)
        dtype = model.get_dtype_inference()

        def evaluate() -> Tensor:
            with run.evaluation(
                moment, latent, t.device, dtype, obstacle, pictures, layouts
            ) as evaluation:
                if evaluation is None:
                    return denoise(x, options)
                own = record.options(options, evaluation)
                return evaluation.or_without_detail(lambda: denoise(x, own))

        forecast = run.forecast(moment, x)
        if forecast is not None:
            return forecast
        return run.answered(moment, run.or_unmerged(evaluate))

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
        attachment, network = self._attachment, uncompiled(model.diffusion_model)
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
            wants_details = attachment.wants_details
            report = RunReport(
                max(1, len(self._schedule) - 1),
                latent,
                device,
                attachment.on_step if is_first else None,
                is_first and wants_details is not None and wants_details(),
            )
        run = Run(self._config, record, network, attachment.make_strategy, report)
        self._reports.setdefault(kind, (report, run, model))
        return run

    def _moment(self, model: Any, sigma: float, options: dict[str, Any], samples: int) -> Moment:
        # Another node may evaluate prompts one by one without saying which.
        is_whole = samples % max(1, len(options.get("cond_or_uncond", ()))) == 0
        is_usable = is_whole and sigma > 0
        step = self._step = step_index(self._schedule, sigma, self._step)
        last_step = len(self._schedule) - 2
        return Moment(
            step=step,
            progress=step / last_step if last_step > 0 else 0.0,
            picks=step,
            part=self._part(uncompiled(model.diffusion_model), options, sigma),
            is_active=is_active(self._config, sigma, model.model_sampling.percent_to_sigma),
            steps_left=max(0, last_step - step),
            from_noise=self._from_noise
            or is_noise_alone(self._schedule[0], float(model.model_sampling.sigma_max)),
            log_snr=log_snr(sigma, isinstance(model.model_sampling, CONST)) if is_usable else None,
            latent_share=latent_share(self._schedule, step) if self._makes_up else None,
        )

    def _part(self, network: nn.Module, options: dict[str, Any], sigma: float) -> Hashable:
        """What an evaluation of a network evaluates, as far as the transformer options tell.

        They do not tell tiles apart. But a network gets its tiles in the same order in each step,
        so calls of a network are counted. Calls of different networks, which may run on several
        devices at once, come in no fixed order.
        """
        window = options.get("context_window")
        composition = (
            *options.get("uuids", ()),
            *options.get("cond_or_uncond", ()),
            None if window is None else tuple(window.index_list),
        )
        if sigma != self._sigma:
            self._sigma = sigma
            self._calls.clear()
        self._calls[network, composition] += 1
        return composition, self._calls[network, composition]

    def finish(self) -> LastRun | None:
        """Report the run, and return the record of its first model; None if nothing was evaluated.

        A second model of another class is reported only in the log.
        """
        attachment = self._attachment
        last_runs = [
            report.finish(
                run,
                model,
                self._config,
                attachment.tuned,
                attachment.is_quiet,
                cast(ComfyRecord, run.model.record).remarks,
            )
            for report, run, model in self._reports.values()
        ]
        return last_runs[0] if last_runs else None


def _pictures(
    record: ComfyRecord, diffusion_model: nn.Module, inputs: Inputs
) -> tuple[tuple[Picture, ...], str | None]:
    """The pictures in the sequence, and why nothing can merge (None if something can)."""
    obstacle = record.obstacle(diffusion_model)
    if obstacle is not None:
        return (), obstacle
    try:
        return record.pictures(diffusion_model, inputs), None
    except Exception as error:
        # A later ComfyUI or another node may pass inputs in another form.
        return (), f"the inputs of the model are of an unknown form: {error}"
