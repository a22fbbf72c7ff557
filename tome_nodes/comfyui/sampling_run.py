"""One sampling run of a patched model in ComfyUI.

In a UNet, the merging part merges tokens, and the shallow part may say that only the outermost
blocks run. In any other model whose tokens do not merge, the forecasting part is asked for the
answer of each step. If it has none, the model runs, and the forecasting part sees the answer.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from .. import reasons
from ..report.run_record import RunRecord
from .forecast_part import ForecastPart
from .merging_part import MergingPart
from .model_report import warn
from .shallow_part import ShallowPart
from .step_count import StepCount


class SamplingRun:
    """One sampling run: its parts, and what they report.

    Attributes:
        steps: counts its steps.
    """

    def __init__(
        self,
        steps: StepCount,
        merging: MergingPart | None = None,
        shallow: ShallowPart | None = None,
        forecasting: ForecastPart | None = None,
    ):
        self.steps = steps
        self._merging = merging
        self._shallow = shallow
        self._forecasting = forecasting

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
        try:
            if self._forecasting is not None:
                return self._forecasting.finish()
            records = [] if self._merging is None else self._merging.finish()
            if self._shallow is None:
                return records
            return [_with_reason(record, self._shallow.reason) for record in records]
        except Exception as error:
            warn("the report of this run is missing", error)
            return []


def _with_reason(record: RunRecord, why: reasons.Reason) -> RunRecord:
    """A record with the reason why no step was shallow, if none was."""
    if record.counts.shallow_steps:
        return record
    unseen = record.unmerged == reasons.NOT_CALLED
    return replace(record, unshallow=reasons.NOT_CALLED if unseen else why)
