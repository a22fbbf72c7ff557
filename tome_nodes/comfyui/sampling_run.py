"""One sampling run of a patched model in ComfyUI.

It has two parts that do not know each other. In each step, the forecasting part is asked for the
answer. If it has none, the model runs, in which the merging part merges tokens, and the forecasting
part gets to see the answer. A run may have only one of the two.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from comfy.model_management import InterruptProcessingException

from ..report.last_run import LastRun
from .forecast_run import ForecastRun
from .merging_run import MergingRun
from .run_report import warn

Callback = Callable[..., Any]


class SamplingRun:
    """One sampling run: its parts, of which at least one is there, and what they report."""

    def __init__(
        self,
        forecasting: ForecastRun | None,
        merging: MergingRun | None,
        idle: ForecastRun | None = None,
    ):
        """Prepare a run.

        ``idle`` is the forecasting part where the settings leave the steps of this run alone; it
        only knows what would change that.
        """
        self._forecasting = forecasting
        self._merging = merging
        self._idle = idle

    @contextmanager
    def installed(self, model_options: Mapping[str, Any]) -> Iterator[None]:
        """Take part in a run, whose model options these are."""
        with ExitStack() as parts:
            if self._merging is not None:
                parts.enter_context(self._merging.installed(model_options))
            if self._forecasting is not None:
                parts.enter_context(self._forecasting.installed())
            yield

    def watching(self, callback: Callback | None) -> Callback | None:
        """The callback of the sampler, which calls it in every step, after the step's answer."""
        if self._merging is not None:
            callback = self._merging.watching(callback)
        if self._forecasting is not None:
            callback = self._forecasting.counting(callback)
        return callback

    def finish(self) -> list[LastRun]:
        """The records of the run, one for each class of model; none if nothing was sampled.

        An error, which is logged, never costs the picture.
        """
        try:
            return self._records()
        except Exception as error:
            warn("the report of this run is missing", error)
            return []

    def _records(self) -> list[LastRun]:
        forecasting, merging = self._forecasting, self._merging
        if merging is None:
            return [] if forecasting is None else forecasting.finish()
        if forecasting is None:
            remedy = None if self._idle is None else self._idle.remedy
            return [replace(last, remedy=remedy) for last in merging.finish()]
        steps = forecasting.forecasts.steps
        # A forecast step has no evaluation in which merging could take its time.
        last_runs = merging.finish(steps, forecasting.begun)
        return [replace(last, unforecast=forecasting.reason) for last in last_runs]


def guarded(on_step: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """What shows a step, which is not called again after an error. The error is logged."""
    if on_step is None:
        return None
    works = [True]

    def show(text: str) -> None:
        if not works[0]:
            return
        try:
            on_step(text)
        except InterruptProcessingException:
            raise
        except Exception as error:
            works[0] = False
            warn("the report of this run is not complete", error)

    return show
