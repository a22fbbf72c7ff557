"""Attach the pack to a ComfyUI model, and take it off again.

A patched model is a clone with wrappers under our key. In a UNet, tokens merge and some steps are
shallow; in any other model, steps are forecast unless the settings say to merge.
Weights, patch lists and the source model are not touched, so LoRA, saving, model merging and other
nodes' patches work as before.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.model_sampling import CONST
from comfy.patcher_extension import CallbacksMP, WrapperExecutor, WrappersMP
from torch import Tensor, nn

from ..merging.engine import MakeStrategy
from ..merging.model import unwrapped
from ..run.record import RunRecord
from ..run.sampling_run import SamplingRun
from ..run.span import Span
from ..settings.config import ToMeConfig
from ..strategies import make_strategy
from . import host_checks, run_log, workflow
from .comfy_run import ComfyRun, function_of
from .forecast_part import ForecastPart, sampled_streams
from .guided_answers import Latents
from .merging_part import MergingPart, apply_model
from .model_report import guarded, warn
from .models import check_forecasts, family_of, is_unet
from .models.unet import deep_layers
from .neighbours import KEY
from .shallow_part import ShallowPart
from .step_count import StepCount

# Not ``__name__``: ComfyUI names the package after its folder.
log = logging.getLogger("tome_nodes")


def attach(
    model: ModelPatcher,
    config: ToMeConfig,
    make_strategy: MakeStrategy = make_strategy,
    on_step: Callable[[str], None] | None = None,
    wants_details: Callable[[], bool] | None = None,
    is_quiet: bool = False,
) -> ModelPatcher:
    """A clone of a model that runs faster. Its settings replace any earlier ones.

    Args:
        model: the model to clone; it is not changed.
        config: the settings.
        make_strategy: makes the strategy of a run.
        on_step: called once in every step with a short text on what was done.
        wants_details: called at the start of every run; returns whether to record it in detail.
        is_quiet: whether runs log nothing.

    Returns:
        The clone; ``model`` itself, and a warning in the log, if a part of this ComfyUI is not as
        the pack knows it.

    Raises:
        ValueError: the model can neither merge tokens nor be forecast, as the settings say.
    """
    network, does_merge = _network(model), merges(model, config)
    if does_merge:
        changed = host_checks.changed_part(model, family_of(network), network)
    else:
        check_forecasts(network)
        changed = host_checks.changed_for_forecasts(model)
    if changed is not None:
        log.warning(
            "[ToMe] the model stays unpatched, as %s has another %s than this version of ToMe "
            "Nodes knows; a later one may know it",
            host_checks.VERSION,
            changed,
        )
        return model
    clone = detach(model)
    if config.does_nothing(not does_merge):
        return clone
    attachment = _Attachment(config, make_strategy, on_step, wants_details, is_quiet, does_merge)
    clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, attachment.pre_run)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, attachment.sample)
    if does_merge:
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, apply_model)
    return clone


def merges(model: ModelPatcher, config: ToMeConfig) -> bool:
    """Whether tokens merge in a model under some settings; else steps are only forecast."""
    return not config.forecast or is_unet(_network(model))


def _network(model: ModelPatcher) -> nn.Module:
    """The diffusion model of a model.

    Raises:
        ValueError: it has none.
    """
    if not hasattr(model.model, "diffusion_model"):
        raise ValueError(f"a {type(model.model).__name__} is no diffusion model")
    return unwrapped(model.get_model_object("diffusion_model"))


def is_attached(model: ModelPatcher) -> bool:
    """Whether a model is patched."""
    return _attachment(model) is not None


def last_run(model: ModelPatcher, samplers: Set[str] | None = None) -> RunRecord | None:
    """The last run of a model or its clone; None if there was none, or it is not patched.

    ``samplers`` are the ids of nodes, one of which must have sampled; None for any.
    """
    attachment = _attachment(model)
    runs = {} if attachment is None else attachment.runs
    matching = [run for node, run in runs.items() if samplers is None or node in samplers]
    return matching[-1] if matching else None


def _attachment(model: ModelPatcher) -> "_Attachment | None":
    wrappers: Any = model.get_wrappers(WrappersMP.OUTER_SAMPLE, KEY)
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


@dataclass(eq=False)
class _Attachment:
    """The wrappers of one patched model. The attributes not listed are arguments of :func:`attach`.

    Attributes:
        merges: whether tokens merge.
        runs: the last run of every node that samples, by its id, in the order they ended.
            Nothing else of a run is kept.
        running: the number of runs that have not ended.
    """

    config: ToMeConfig
    make_strategy: MakeStrategy
    on_step: Callable[[str], None] | None
    wants_details: Callable[[], bool] | None
    is_quiet: bool
    merges: bool
    runs: dict[str | None, RunRecord] = field(default_factory=dict)
    running: int = 0

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

    def sample(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """Wrap one sampling run."""
        guider = executor.class_obj
        given = {name: kwargs.get(name) for name in host_checks.OUTER_SAMPLE}
        given |= zip(host_checks.OUTER_SAMPLE, args, strict=False)
        run = self._run_of(guider, given)
        part = self._part_of(run, given, kwargs.get("latent_shapes"))
        others = {name: value for name, value in kwargs.items() if name not in given}
        with self._kept() as keep, part.installed(guider.model_options):
            given["callback"] = run.steps.watching(given["callback"])
            result = executor(*given.values(), *args[len(given) :], **others)
            keep(part)
        return result

    def _run_of(self, guider: Any, given: Mapping[str, Any]) -> ComfyRun:
        """A sampling run with some arguments of ``CFGGuider.outer_sample``."""
        config, schedule = self.config, given["sigmas"].tolist()
        sampling: Any = guider.model_patcher.get_model_object("model_sampling")
        on_step = None if self.on_step is None else guarded(self.on_step)
        run = SamplingRun(
            config, Span(config, lambda percent: sampling.percent_to_sigma(percent)), on_step
        )
        run.total_steps = len(schedule) - 1
        sampler = function_of(given["sampler"])
        steps = StepCount(run, schedule, sampler, by_calls=not self.merges)
        latents = Latents(sampler, given["denoise_mask"], guider.model_options)
        return ComfyRun(run, guider, sampler, isinstance(sampling, CONST), steps, latents)

    def _part_of(
        self, run: ComfyRun, given: Mapping[str, Any], latent_shapes: Any
    ) -> MergingPart | ForecastPart:
        """Our part in a sampling run."""
        if not self.merges:
            streams = sampled_streams(latent_shapes, given["denoise_mask"])
            return ForecastPart(run, is_empty(given["latent_image"]), streams)
        shallow = ShallowPart(run) if self._may_be_shallow(run.guider) else None
        with_details = self.wants_details is not None and self.wants_details()
        return MergingPart(run, self.make_strategy, with_details, shallow)

    def _may_be_shallow(self, guider: Any) -> bool:
        """Whether the settings and the model allow shallow steps in a run."""
        config, patcher = self.config, guider.model_patcher
        network = _network(patcher)
        return (
            config.forecast
            and config.ratio > 0
            and bool(deep_layers(network))
            and host_checks.changed_for_forecasts(patcher) is None
        )

    @contextmanager
    def _kept(self) -> Iterator[Callable[[MergingPart | ForecastPart], None]]:
        """Count the run as running; call the yielded function to report it once it has ended."""
        node = workflow.running_node()
        self.runs.pop(node, None)

        def keep(part: MergingPart | ForecastPart) -> None:
            try:
                records = part.finish()
            except Exception as error:
                warn("the report of this run is missing", error)
                records = []
            if records:
                self.runs[node] = records[0]
            if not self.is_quiet:
                run_log.note(records)

        self.running += 1
        try:
            yield keep
        finally:
            self.running -= 1
