"""The calls of a transformer whose answers are forecast in some steps, for diffusers.

A pipeline guides by itself, in one call of the model or in several. At the first call of a step it
is decided whether all of them are forecast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.decorators import skip

from ..ranks import Ranks
from ..reasons import Reason
from ..settings.config import ToMeConfig
from .flow_call import FlowCall, flow_call
from .patched_calls import PatchedCalls
from .pipeline_runs import PipelineRun, PipelineRuns


class ForecastCalls(PatchedCalls):
    """Forecasts the answers of a transformer in the calls of one thread."""

    def __init__(self, config: ToMeConfig, network: nn.Module, runs: PipelineRuns):
        """``runs`` are those of its pipeline."""
        super().__init__(network)
        self._config = config
        self._runs = runs
        self._ranks = Ranks(network)
        self._kind: type | None = None

    @skip
    def answer(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call of the model returns: the model runs if it is not forecast."""
        begun = self._begin(args, kwargs)
        answer = self._predict(begun)
        if answer is not None:
            return answer
        if begun is None:
            return forward(*args, **kwargs)
        try:
            answer = forward(*args, **kwargs)
        except BaseException:
            self._runs.end()
            raise
        return self._observe(*begun, answer)

    def end_run(self) -> None:
        self._runs.end()

    @torch.compiler.disable
    def _begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[PipelineRun, FlowCall] | None:
        """Begin a call; None, and a warning once, if it is not known which run it belongs to."""
        call = flow_call(self.network, args, kwargs)
        if isinstance(call, Reason):
            self._runs.warn(call)
            return None
        run = self._runs.begin(call, self._config)
        if isinstance(run, Reason):
            self._runs.warn(run)
            return None
        return run, call

    @torch.compiler.disable
    def _predict(self, begun: tuple[PipelineRun, FlowCall] | None) -> Any:
        """What the model is forecast to return; None if it has to run."""
        if begun is None or begun[0].forecasts.obstacle is not None:
            self._ranks.agree(False)
            return None
        run, call = begun
        own = run.call, call.latent.shape
        denoised = run.forecasts.predict(own, self._ranks.agree)
        if denoised is None:
            return None
        run.latents.note(denoised)
        return call.returned(denoised, run.noise, self._kind)

    @torch.compiler.disable
    def _observe(self, run: PipelineRun, call: FlowCall, result: Any) -> Any:
        """Note what the model returned, and what the run did after its last step.

        Returns what the call is to return.
        """
        answer = result
        if run.forecasts.obstacle is None:
            denoised = call.denoised(result, run.noise)
            self._kind = type(result)
            corrected = run.forecasts.observe(denoised, (run.call, call.latent.shape))
            run.latents.note(corrected)
            if corrected is not denoised:
                answer = call.returned(corrected, run.noise, self._kind)
        if run.is_last_step:
            self._runs.once.report(run.sampling_run, run.finish)
            if run.is_over:
                self._runs.end()
        return answer
