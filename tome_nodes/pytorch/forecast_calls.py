"""The part of a model's calls that forecasts answers, for diffusers.

A pipeline guides by itself, in one call of the model or in several. At the first call of a step it
is decided whether all of them are forecast.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..settings.config import ToMeConfig
from .model_call import ModelCall
from .pipeline_runs import PipelineRun, PipelineRuns

View = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], ModelCall | str]
"""Returns a call of a model with some arguments, which a scheduler goes by; or why it cannot be
forecast."""


class ForecastCalls:
    """Forecasts the answers of a model in the calls of one thread.

    Attributes:
        runs: the runs of its pipeline.
    """

    def __init__(self, config: ToMeConfig, network: nn.Module, runs: PipelineRuns, view: View):
        """``view`` views the calls of ``network``."""
        self._config = config
        self._network = network
        self.runs = runs
        self._view = view
        self._kind: type | None = None

    @torch.compiler.disable
    def begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[PipelineRun, ModelCall] | None:
        """Begin a call; None, and a warning once, if it is not known which run it belongs to."""
        call = self._view(self._network, args, kwargs, self.runs.scheduler)
        run = call if isinstance(call, str) else self.runs.begin(call, self._config)
        if isinstance(call, str) or isinstance(run, str):
            self.runs.warn(str(run))
            return None
        return None if run is None else (run, call)

    @torch.compiler.disable
    def predict(self, run: PipelineRun, call: ModelCall) -> Any:
        """What the model is forecast to return; None if it has to run."""
        if run.forecasts is None:
            return None
        denoised = run.forecasts.predict(run.step, call.latent, run.call)
        return None if denoised is None else call.returned(denoised, run.noise, self._kind)

    @torch.compiler.disable
    def observe(self, run: PipelineRun, call: ModelCall, result: Any) -> Any:
        """Note what the model returned; return what the call is to return."""
        denoised = None if run.forecasts is None else call.denoised(result, run.noise)
        if run.forecasts is None or denoised is None:
            return result
        self._kind = type(result)
        corrected = run.forecasts.observe(run.step, denoised, run.call)
        return result if corrected is denoised else call.returned(corrected, run.noise, self._kind)
