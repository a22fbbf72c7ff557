"""The calls of a patched model in one thread.

They have two parts that do not know each other. In each call, the forecasting part is asked for the
answer. If it has none, the model runs, the merging part merges its tokens, and the forecasting part
sees the answer. A model may have only one of the two.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._dynamo.decorators import skip

from .. import reasons
from .forecast_calls import ForecastCalls
from .log_once import log
from .merging_calls import MergingCalls
from .pipeline_runs import PipelineRun, PipelineRuns


class PatchedCalls:
    """The calls of a model in one thread.

    Attributes:
        network: the model that is called.
        is_running: whether a call is going on. PyTorch's own code may call the model once more
            within it, which is part of the same call.
    """

    def __init__(
        self, network: nn.Module, forecasting: ForecastCalls | None, merging: MergingCalls | None
    ):
        self.network = network
        self.is_running = False
        self._forecasting = forecasting
        self._merging = merging

    @skip
    def call(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call of the model returns; ``forward`` calls the model itself."""
        # Of torch.compile, nothing is traced here.
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
        if is_traced or torch.compiler.is_compiling():
            if self._merging is not None:
                self._merging.warn(reasons.TRACED)
            return forward(*args, **kwargs)
        forecasting = self._forecasting
        begun = None if forecasting is None else forecasting.begin(args, kwargs)
        if forecasting is None or begun is None:
            return self._evaluated(forward, args, kwargs, None)
        run, _ = begun
        answer = forecasting.predict(*begun)
        if answer is not None:
            return answer
        try:
            answer = self._evaluated(forward, args, kwargs, run)
        except BaseException:
            forecasting.runs.end()
            raise
        answer = forecasting.observe(*begun, answer)
        self._complete(run, forecasting.runs)
        return answer

    @skip
    def _evaluated(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: PipelineRun | None,
    ) -> Any:
        """What the model returns, which merges tokens if that is what it is patched for."""
        if self._merging is None:
            return forward(*args, **kwargs)
        step, counts = (0, None) if run is None else (run.step.index, run.counts)
        return self._merging.call(forward, args, kwargs, step, counts)

    @torch.compiler.disable
    def _complete(self, run: PipelineRun, runs: PipelineRuns) -> None:
        """Report a run in its last step, and end it. An error is logged, and costs no picture."""
        if not run.is_last_step:
            return
        try:
            last = run.finish()
            if self._merging is not None:
                merged = self._merging.finish(run.counts, run.begun)
                last = replace(merged, unforecast=last.unforecast)
            if runs.once.is_new(last.line):
                last.log()
        except Exception as error:
            log.warning(
                "[ToMe] the report of this run is missing: %s: %s", type(error).__name__, error
            )
        if run.is_over:
            runs.end()
