"""The transformers of the diffusers library, whose answers are forecast in some steps.

It has to be known how a transformer predicts a flow (:mod:`tome_nodes.pytorch.flow_call`) and where
a call is in the run of its pipeline (:mod:`tome_nodes.pytorch.pipeline_runs`). A pipeline guides by
itself, in one call of the transformer or in several. At the first call of a step it is decided
whether all of them are forecast.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.decorators import skip

from ..patching.blocks import uncompiled
from ..settings.config import ToMeConfig
from .flow_call import FlowCall, flow_call
from .patched_model import Attachment, Calls, Host
from .pipeline_runs import PipelineRun, PipelineRuns


class DiffusersTransformers(Host):
    """Transformers of pictures and videos.

    The context of a transformer is the runs of its pipeline, None without a pipeline.
    """

    forecasts = True

    def find(self, model: object) -> Sequence[tuple[nn.Module, PipelineRuns | None]]:
        """The transformers of a pipeline, or the model itself if it is one."""
        components = getattr(model, "components", None)
        if not isinstance(components, Mapping):
            own = uncompiled(model)
            kinds = type(own).__mro__ if isinstance(own, nn.Module) else ()
            is_one = any(
                kind.__module__.startswith("diffusers.models.transformers.") for kind in kinds
            )
            return [(own, None)] if is_one else []
        named = ((name, uncompiled(component)) for name, component in components.items())
        runs = PipelineRuns(model)
        return [
            (component, runs)
            for name, component in named
            if name.startswith("transformer") and isinstance(component, nn.Module)
        ]

    def check(self, model: nn.Module, config: ToMeConfig, context: PipelineRuns | None) -> None:
        if not config.forecast:
            raise ValueError(
                "forecast=False is not allowed for a transformer of diffusers: no tokens merge in "
                "it, but its steps can be forecast; pass preset='balanced', or forecast=True"
            )
        if context is None:
            raise ValueError(
                f"a {type(model).__name__} alone does not know its steps, whose answers are to be "
                "forecast; pass its pipeline"
            )

    def calls(self, attachment: Attachment, model: nn.Module) -> "TransformerCalls":
        return TransformerCalls(attachment, model)


class TransformerCalls(Calls):
    """The calls of a transformer in one thread."""

    def __init__(self, attachment: Attachment, network: nn.Module):
        super().__init__(network)
        self._config = attachment.config
        self._runs: PipelineRuns = attachment.context
        self._kind: type | None = None

    @skip
    def call(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        begun = self._begin(args, kwargs)
        if begun is None:
            return forward(*args, **kwargs)
        predicted = self._predict(*begun)
        if predicted is not None:
            return predicted
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            self._runs.end()
            raise
        return self._observe(*begun, result)

    @torch.compiler.disable
    def _begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[PipelineRun, FlowCall] | None:
        """Begin a call; None, and a warning once, if it is not known how to forecast it."""
        call = flow_call(self.network, args, kwargs)
        run = call if isinstance(call, str) else self._runs.begin(call, self._config)
        if isinstance(call, str) or isinstance(run, str):
            self._runs.warn(str(run))
            return None
        return run, call

    @torch.compiler.disable
    def _predict(self, run: PipelineRun, call: FlowCall) -> Any:
        """What the model is forecast to return; None if it has to run."""
        denoised = run.forecasts.predict(run.step, call.latent, run.call)
        if run.is_last_step:
            self._runs.report(run, self._config)
        return None if denoised is None else call.returned(denoised, run.noise, self._kind)

    @torch.compiler.disable
    def _observe(self, run: PipelineRun, call: FlowCall, result: Any) -> Any:
        """Note what the model returned; return what the call is to return."""
        self._kind = type(result)
        denoised = call.denoised(result, run.noise)
        corrected = run.forecasts.observe(run.step, denoised, run.call)
        if run.is_over:
            self._runs.end()
        return result if corrected is denoised else call.returned(corrected, run.noise, self._kind)
