"""One sampling run of a patched model in ComfyUI.

In each step, the forecasting part is asked for the answer. If it has none, the model runs, the
merging part merges its tokens, and the forecasting part sees the answer. In a UNet that may run
shallowly, the shallow part takes the place of the forecasting part. A run may have only one part.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from ..report.run_record import RunRecord
from .forecast_part import ForecastPart
from .merging_part import MergingPart
from .model_report import warn
from .shallow_part import ShallowPart
from .step_count import StepCount


class SamplingRun:
    """One sampling run: its parts, of which at least one is there, and what they report.

    Attributes:
        steps: counts its steps.
    """

    def __init__(
        self,
        steps: StepCount,
        forecasting: ForecastPart | None,
        merging: MergingPart | None,
        shallow: ShallowPart | None = None,
        idle: ForecastPart | None = None,
    ):
        """Prepare a run.

        ``idle`` is the forecasting part where the settings leave the steps of this run alone; it
        only knows what would change that.
        """
        self.steps = steps
        self._forecasting = forecasting
        self._merging = merging
        self._shallow = shallow
        self._idle = idle

    @contextmanager
    def installed(self, model_options: Mapping[str, Any]) -> Iterator[None]:
        """Take part in a run, whose model options these are."""
        with ExitStack() as parts:
            if self._merging is not None:
                parts.enter_context(self._merging.installed(model_options))
            if self._forecasting is not None:
                parts.enter_context(self._forecasting.installed())
            if self._shallow is not None:
                parts.enter_context(self._shallow.installed())
            yield

    def finish(self) -> list[RunRecord]:
        """The records of the run, one for each class of model; none if nothing was sampled.

        An error, which is logged, never costs the picture.
        """
        forecasting, merging = self._forecasting, self._merging
        try:
            if merging is None:
                return [] if forecasting is None else forecasting.finish()
            if self._shallow is not None:
                why = self._shallow.reason
                return [
                    replace(record, unshallow=None if record.counts.shallow_steps else why)
                    for record in merging.finish()
                ]
            if forecasting is None:
                remedy = None if self._idle is None else self._idle.remedy
                return [replace(record, remedy=remedy) for record in merging.finish()]
            records = merging.finish(forecasting.forecasts.steps)
            return [replace(record, unforecast=forecasting.reason) for record in records]
        except Exception as error:
            warn("the report of this run is missing", error)
            return []
