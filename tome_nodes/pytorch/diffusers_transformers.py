"""The transformers of the diffusers library.

Their pictures are found by asking (:mod:`tome_nodes.patching.answer`). Tokens merge where a
transformer calls attention. Its answers can be forecast if it is known how it predicts a flow. The
scheduler of its pipeline tells the steps.
"""

import inspect
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..merging.layout import Grid
from ..patching.answer import Answer, compared, form_of, kept_answer
from ..patching.attention_call import merged_attention
from ..patching.blocks import lists_of, uncompiled
from ..patching.evaluation import Run
from ..patching.merge_attention import AttentionBlock, AttentionHost, TransformerRecord
from ..patching.overrides import Override
from ..patching.schedule import Moment, is_active, is_noise_alone, latent_share, log_snr
from ..patching.tokenwise import TokenwiseEvaluation
from ..settings.config import ToMeConfig
from .bare_copy import bare_copy
from .flow_call import Flow, FlowCall, flow_of, noise_share, timestep_of
from .latents import Latents, latents_of
from .patched_model import REASONS, RECOMPUTED, Attachment, Calls, Host, execution_device
from .reached_attention import AttentionFunction, reaching

_MODULE = "diffusers.models.transformers."
"""The modules of the library that define transformers."""

_COMPONENT = "transformer"
"""The beginning of the names of transformers among the components of a pipeline."""

_BY_STEPS = ("start_percent", "end_percent", "ratio_end")
"""Options that have an effect only if the steps of a run are known."""


def _merging(block: AttentionBlock) -> Iterator[Override]:
    """Overrides that make the attention of a block merge."""

    def attend(func: AttentionFunction, is_plain: bool, *arguments: Any, **kwargs: Any) -> Tensor:
        if not block.model.overrides.are_of_this_thread:
            return func(*arguments, **kwargs)
        if not is_plain:
            block.note_masked()
            return func(*arguments, **kwargs)
        q, k, v, heads, mask = arguments
        return merged_attention(block, {}, func, None, q, k, v, heads, mask, kwargs)

    return reaching(block.module, attend)


_HOST = AttentionHost(REASONS, overrides=_merging)


class Steps:
    """The steps of a pipeline, as its scheduler counts them."""

    def __init__(self, pipeline: Any = None, scheduler: Any = None):
        """Follow the current scheduler of ``pipeline``; without a pipeline, ``scheduler``."""
        # A reference here must not keep the pipeline alive.
        self._pipeline = None if pipeline is None else ref(pipeline)
        self._scheduler = getattr(pipeline, "scheduler", scheduler)

    def __reduce__(self) -> tuple[Any, ...]:
        return Steps, (None, self.scheduler)

    @property
    def scheduler(self) -> Any:
        """The scheduler, None if nothing tells the steps."""
        pipeline = None if self._pipeline is None else self._pipeline()
        return getattr(pipeline, "scheduler", self._scheduler)

    def schedule(self) -> Tensor | None:
        """The timesteps of the run, None if unknown. Each run has a tensor of its own."""
        timesteps = getattr(self.scheduler, "timesteps", None)
        return timesteps if isinstance(timesteps, Tensor) and len(timesteps) else None

    def first(self) -> int:
        """The step at which the run begins: not 0 if it begins with a picture."""
        return getattr(self.scheduler, "begin_index", None) or 0

    def counted(self) -> int | None:
        """The step of an evaluation, None if the scheduler does not count them."""
        if not hasattr(self.scheduler, "step_index"):
            return None
        # It is None until the first step has ended.
        index: int | None = self.scheduler.step_index
        return self.first() if index is None else min(index, len(self.scheduler.timesteps) - 1)

    def latent_share(self, step: int) -> float | None:
        """See :class:`tome_nodes.patching.schedule.Moment`; the model must predict a flow."""
        is_euler = type(self.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
        if not is_euler or self.scheduler.config.stochastic_sampling:
            return None
        levels = self.scheduler.sigmas
        return latent_share(levels[step : step + 2].tolist(), 0)

    def from_noise(self) -> bool:
        """Whether the run begins with pure noise: at the first step, at the highest noise level.

        If the noise levels are unknown, only the step counts.
        """
        levels = getattr(self.scheduler, "sigmas", None)
        is_most = levels is None or is_noise_alone(float(levels[0]), most=1.0)
        return is_most and self.first() == 0


class DiffusersTransformers(Host):
    """Transformers of pictures and videos."""

    def find(self, model: object) -> Sequence[tuple[nn.Module, Steps]]:
        """The transformers of a pipeline, or the model itself if it is one."""
        components = getattr(model, "components", None)
        if not isinstance(components, Mapping):
            own = uncompiled(model)
            kinds = type(own).__mro__ if isinstance(own, nn.Module) else ()
            is_one = any(kind.__module__.startswith(_MODULE) for kind in kinds)
            return [(own, Steps())] if is_one else []
        named = ((name, uncompiled(each)) for name, each in components.items())
        steps = Steps(model)
        return [
            (each, steps)
            for name, each in named
            if name.startswith(_COMPONENT) and isinstance(each, nn.Module)
        ]

    def check(self, model: nn.Module, config: ToMeConfig, context: Steps) -> None:
        super().check(model, config, context)
        for name in _BY_STEPS:
            value, default = getattr(config, name), getattr(ToMeConfig, name)
            if context.scheduler is None and value != default:
                raise ValueError(
                    f"{name}={value} needs a pipeline, whose scheduler counts the steps: pass the "
                    f"pipeline instead of its transformer, or leave {name} at {default}"
                )

    def has_blocks(self, model: nn.Module) -> bool:
        return any(True for _ in lists_of(model))

    def calls(self, attachment: Attachment, model: nn.Module) -> "TransformerCalls":
        return TransformerCalls(attachment, model)


class TransformerCalls(Calls):
    """The calls of a transformer in one thread, and their place in a sampling run."""

    def __init__(self, attachment: Attachment, network: nn.Module):
        super().__init__(attachment, network)
        self._make_strategy = attachment.make_strategy
        self._steps: Steps = attachment.context
        self._schedule: Tensor | None = None
        self._step = self._call = 0
        self._timestep = math.nan
        self._flow: Flow | None = None
        self._flow_call: FlowCall | None = None
        self._last_result: Any = None

    @torch.compiler.disable
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = _by_name(self.network, args, kwargs)
        channels = getattr(getattr(self.network, "config", None), "in_channels", None)
        latents = latents_of(given, channels)
        if latents is None:
            name = type(self.network).__name__
            self.warn_once(f"the latent of this {name} is of an unknown form")
            return False
        self._follow(given)
        device = execution_device(self.network, latents.one)
        answer = _ask(self.network, given, latents, device)
        if self.run is None:
            self.run = self._run_of(answer)
        self._flow_call = None
        self._flow = flow_of(self.network, given) if self.config.forecast else None
        if self._flow is not None and answer.obstacle is None:
            grid = _latent_grid(answer)
            self._flow_call = FlowCall(self._flow, self.network, given, latents, grid)
        form = latents.one.shape, latents.sides
        self.prepare(
            form,
            self._moment(form, _timestep(given)),
            Grid(*latents.sides[0][1:]),
            device,
            latents.one.dtype,
            answer.obstacle or self._obstacle(),
            answer.pictures,
            answer.layouts,
        )
        return True

    @torch.compiler.disable
    def forecast(self) -> Any:
        call = self._flow_call
        if call is None or self._last_result is None:
            return None
        latent = call.latent
        denoised = self.own_run.forecast(self._moment_of_call, latent)
        if denoised is None:
            return None
        self._flow_call = None
        return call.returned(latent, denoised, self._last_result)

    @torch.compiler.disable
    def __exit__(self, *error: Any) -> bool | None:
        if error[0] is not None:
            # Do not keep the inputs of the model alive.
            self._flow_call = None
        return super().__exit__(*error)

    @torch.compiler.disable
    def answered(self, result: Any) -> Any:
        call, self._flow_call = self._flow_call, None
        if call is None:
            return result
        self._last_result = result
        latent = call.latent
        denoised = call.denoised(latent, result)
        corrected = self.own_run.answered(self._moment_of_call, denoised)
        return result if corrected is denoised else call.returned(latent, corrected, result)

    @property
    def _moment_of_call(self) -> Moment:
        moment: Moment = self._arguments[0]
        return moment

    def _run_of(self, answer: Answer) -> Run:
        """The evaluations of the model, given where the pictures of its first inputs are."""
        blocks = answer.stacks or tuple(lists_of(self.network))
        record = TransformerRecord(blocks=blocks, host=_HOST)
        return Run(self.config, record, self.network, self._make_strategy, self.latest)

    def _obstacle(self) -> str | None:
        """Why nothing can merge while the model computes gradients, None if something can."""
        recomputes = getattr(self.network, "is_gradient_checkpointing", False)
        return RECOMPUTED if recomputes and torch.is_grad_enabled() else None

    def _follow(self, arguments: Mapping[str, Any]) -> None:
        """Find the step of an evaluation, and count the calls of a step."""
        schedule, step = self._steps.schedule(), self._steps.counted()
        if schedule is None or step is None:
            # Only now read the timestep: if it is on a GPU, that means waiting for it.
            before, self._timestep = self._timestep, _timestep(arguments)
            if schedule is None:
                step = self._step + (self._timestep != before)
            else:
                step = int((schedule.double().cpu() - self._timestep).abs().argmin())
        begins = schedule is not self._schedule or step < self._step or not self.completed
        if begins and self.run is not None:
            self.run.restart()
            self._last_result = None
        self._call = 0 if begins or step != self._step else self._call + 1
        self._schedule, self._step = schedule, step

    def _moment(self, form: Hashable, timestep: float) -> Moment:
        first, step = self._steps.first(), self._step
        steps = step + 1 if self._schedule is None else len(self._schedule)
        last = steps - 1
        flow = self._flow
        noise = None if flow is None else float(noise_share(flow, torch.tensor(timestep)))
        return Moment(
            step=step,
            progress=(step - first) / (last - first) if last > first else 0.0,
            picks=step,
            part=(self._call, form),
            is_active=is_active(self.config, 1 - step / steps, lambda percent: 1 - percent),
            steps_left=None if self._schedule is None else last - step,
            from_noise=self._steps.from_noise(),
            log_snr=None if noise is None else log_snr(noise, is_flow=True),
            latent_share=self._steps.latent_share(step),
        )


def _by_name(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Mapping[str, Any]:
    """The arguments of a call by name, in the order of the signature; none if they do not fit."""
    try:
        bound = inspect.signature(type(network).forward).bind_partial(network, *args, **kwargs)
    except TypeError:
        # Other code may have replaced the forward by one with other arguments.
        return {}
    _, *names = bound.arguments
    others = bound.arguments.get("kwargs", {})
    return {name: bound.arguments[name] for name in names if name != "kwargs"} | others


def _timestep(arguments: Mapping[str, Any]) -> float:
    """The timestep of a call, 0 if it has none."""
    value = timestep_of(arguments)
    return float(value.max()) if isinstance(value, Tensor) else float(value)


def _latent_grid(answer: Answer) -> Grid:
    """The grid of the latent's tokens: the latent is the first picture in the longest sequence."""
    layouts = (each for found in answer.layouts.values() for each in found.values())
    longest = max((each for each in layouts if each is not None), key=lambda each: each.length)
    return longest.spans[0].grid


def _ask(
    network: nn.Module, arguments: Mapping[str, Any], latents: Latents, device: torch.device
) -> Answer:
    """Where the pictures of a transformer are; asked once for arguments of one form."""

    def ask() -> Answer:
        copy = bare_copy(network, device)
        latent = next(iter(arguments))

        def watched(value: Any) -> TokenwiseEvaluation:
            evaluation = _Tokenwise(copy, copy)
            with evaluation.installed():
                copy.forward(**{**arguments, latent: value})
            return evaluation

        def evaluations() -> list[TokenwiseEvaluation]:
            found = [watched(latents.value), watched(latents.with_changed(references=False))]
            if references:
                found.append(watched(latents.with_changed(references=True)))
            return found

        name = type(network).__name__
        sides, *references = latents.sides
        return compared(name, evaluations, sides, references, len(latents.value), copy, device)

    return kept_answer(network, (latents.sides, form_of(arguments)), ask)


class _Tokenwise(TokenwiseEvaluation):
    """Follows attention where it is called. No linear layer is computed."""

    def overrides(self) -> Iterator[Override]:
        yield from super().overrides()
        yield from reaching(self.network, self._reached)

    def not_computed(self) -> Iterator[nn.Module]:
        yield from self.network.modules()

    def _reached(
        self,
        func: AttentionFunction,
        is_plain: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        if not is_plain:
            mask = torch.empty(q.shape[-2], k.shape[-2], device="meta")
        return self.attention(True, q, k, v, heads, mask, **kwargs)
