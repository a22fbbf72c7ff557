"""Attach the pack to a ComfyUI model, and take it off again.

A patched model is a clone with wrappers under our key. In a UNet, tokens merge
(:mod:`tome_nodes.comfyui.merging_run`); in any other model, steps are forecast
(:mod:`tome_nodes.comfyui.forecast_run`), unless the settings say to merge. So are those of a UNet
in a long run in which merging would save next to nothing. Weights, patch lists and
the source model are not touched, so LoRA, saving, model merging and other nodes' patches work as
before.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrapperExecutor, WrappersMP
from torch import Tensor, nn

from ..patching.blocks import uncompiled
from ..patching.engine import MakeStrategy
from ..report.last_run import LastRun
from ..settings.config import ToMeConfig
from ..strategies import make_strategy
from ..tuning.search import Measured
from . import host_checks, run_log, workflow
from .forecast_run import ForecastRun, function_of, suits_unet
from .merging_run import KEY, MergingRun, apply_model, saves_little
from .models import check_forecasts, is_unet, record_of

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
    """A clone of a model that runs faster. Its settings replace any earlier ones.

    Args:
        model: the model to clone; it is not changed.
        config: the settings.
        make_strategy: makes the strategy of a run.
        on_step: called once in every step with a short text on what was done.
        wants_details: called at the start of every run; returns whether to record it in detail.
        tuned: what ToMe Tune measured with these settings, for the log and the report.
        is_quiet: whether runs log nothing.

    Returns:
        The clone; ``model`` itself, and a warning in the log, if a part of this ComfyUI is not as
        the pack knows it.

    Raises:
        ValueError: the model can neither merge tokens nor be forecast, as the settings say.
    """
    network, forecasts = _network(model), not merges(model, config)
    if forecasts:
        check_forecasts(network)
        changed = host_checks.changed_for_forecasts(model)
    else:
        changed = host_checks.changed_part(model, record_of(network), network)
    if changed is not None:
        log.warning(
            "[ToMe] the model stays unpatched, as %s has another %s than this version of ToMe "
            "Nodes knows; a later one may know it",
            host_checks.version(),
            changed,
        )
        return model
    clone = detach(model)
    if config.does_nothing(forecasts):
        return clone
    attachment = _Attachment(config, make_strategy, on_step, wants_details, tuned, is_quiet)
    clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, attachment.pre_run)
    if forecasts:
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, attachment.forecast)
    else:
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, attachment.merge)
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, apply_model)
    return clone


def merges(model: ModelPatcher, config: ToMeConfig) -> bool:
    """Whether tokens merge in a model under some settings; else steps are forecast."""
    return not config.forecast or is_unet(_network(model))


def _network(model: ModelPatcher) -> nn.Module:
    """The diffusion model of a model.

    Raises:
        ValueError: it has none.
    """
    if not hasattr(model.model, "diffusion_model"):
        raise ValueError(f"a {type(model.model).__name__} is no diffusion model")
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


_ARGUMENTS = ("noise", "latent_image", "sampler", "sigmas", "denoise_mask", "callback")
"""The first arguments of ``CFGGuider.outer_sample``, by position."""


@dataclass(eq=False)
class _Attachment:
    """The wrappers of one patched model. The attributes not listed are arguments of :func:`attach`.

    Attributes:
        runs: the last run of every node that samples, by its id, in the order in which they ended.
            Nothing else of a run is kept.
        running: the number of runs that have not ended.
    """

    config: ToMeConfig
    make_strategy: MakeStrategy
    on_step: Callable[[str], None] | None
    wants_details: Callable[[], bool] | None
    tuned: Measured | None
    is_quiet: bool
    runs: dict[str | None, LastRun] = field(default_factory=dict)
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

    def merge(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """Wrap one sampling run, which merges tokens, or is forecast where that saves little."""
        if self.config.forecast and self._is_better_forecast(executor.class_obj, args, kwargs):
            return self.forecast(executor, *args, **kwargs)
        run = MergingRun(
            self.config,
            self.make_strategy,
            self.on_step,
            self.wants_details is not None and self.wants_details(),
            function_of(_argument("sampler", args, kwargs)),
        )
        with self._kept() as keep, run.installed(executor.class_obj.model_options):
            result = _with_callback(executor, run.watching, args, kwargs)
            keep(run)
        return result

    def _is_better_forecast(
        self, guider: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether the steps of a run of a UNet are forecast."""
        noise, sampler, sigmas = (
            _argument(name, args, kwargs) for name in ("noise", "sampler", "sigmas")
        )
        model = guider.model_patcher
        return (
            is_unet(_network(model))
            and suits_unet(sampler, sigmas)
            and host_checks.changed_for_forecasts(model) is None
            and saves_little(self.config, _network(model), picture_of(noise).shape)
        )

    def forecast(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """Wrap one sampling run, of which some steps are forecast."""
        sampler, sigmas, latent = (
            _argument(name, args, kwargs) for name in ("sampler", "sigmas", "latent_image")
        )
        guider = executor.class_obj
        run = ForecastRun(
            self.config,
            guider,
            sampler,
            sigmas,
            is_empty(latent),
            is_unet(_network(guider.model_patcher)),
            self.on_step,
        )
        with self._kept() as keep, run.installed():
            result = _with_callback(executor, run.counting, args, kwargs)
            keep(run)
        return result

    @contextmanager
    def _kept(self) -> Iterator[Callable[[MergingRun | ForecastRun], None]]:
        """Count a run while it goes on; yields what reports it once it has ended well."""
        node = workflow.running_node()
        self.runs.pop(node, None)

        def keep(run: MergingRun | ForecastRun) -> None:
            last_runs = run.finish(self.tuned)
            if last_runs:
                self.runs[node] = last_runs[0]
            if not self.is_quiet:
                run_log.note(last_runs)

        self.running += 1
        try:
            yield keep
        finally:
            self.running -= 1


def _with_callback(
    executor: WrapperExecutor,
    wrap: Callable[[Callable[..., Any] | None], Callable[..., Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call ``CFGGuider.outer_sample`` with its callback wrapped."""
    given = {name: _argument(name, args, kwargs) for name in _ARGUMENTS}
    given["callback"] = wrap(given["callback"])
    others = {name: value for name, value in kwargs.items() if name not in given}
    return executor(*given.values(), *args[len(given) :], **others)


def _argument(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An argument of ``CFGGuider.outer_sample``; None if it was not given."""
    place = _ARGUMENTS.index(name)
    return args[place] if place < len(args) else kwargs.get(name)
