"""Report a sampling run: live on the node, in the log, and in a record for ToMe Report.

An error in reporting never stops the sampling.
"""

import logging
from collections.abc import Callable, Set
from threading import Lock
from typing import Any, TypeVar

import torch
from comfy.model_management import InterruptProcessingException

from ..merging.evaluation import Observer, Result
from ..merging.model_run import ModelRun
from ..merging.overrides import Forward
from ..report import log_line
from ..report.counts import Counts
from ..report.recording import Recorder
from ..report.run_record import RunRecord, merging_record
from ..strategies.plan import Grid
from .step_count import StepCount

log = logging.getLogger("tome_nodes")

Told = TypeVar("Told")


class ModelReport(Observer):
    """Follows a model through a sampling run, and reports it at the end."""

    def __init__(
        self,
        total_steps: int,
        latent: Grid,
        device: torch.device,
        on_step: Callable[[str], None] | None,
        with_details: bool,
    ):
        """Start following, just before the first evaluation of a model on ``device``.

        ``on_step`` is called once in every step with a short text on what was merged;
        ``with_details`` is whether to record every block in every step.
        """
        self._counts = Counts(total_steps)
        self._latent = latent
        self._on_step = on_step
        self._details = Recorder(latent, device) if with_details else None
        self._step: int | None = None
        followers = [self._counts.note, self._show]
        if self._details is not None:
            followers.append(self._details.note)
        self._followers = [*map(guarded, followers)]
        self.follows_blocks = with_details
        # ComfyUI may evaluate a model and its clones on several devices at once.
        self._lock = Lock()

    def timed(self, block: str, forward: Forward) -> Forward:
        return forward if self._details is None else self._details.timed(block, forward)

    def note(self, result: Result) -> None:
        with self._lock:
            for follower in self._followers:
                follower(result)

    def _show(self, result: Result) -> None:
        """Show what the first evaluation of a step did."""
        if self._on_step is not None and result.step != self._step:
            self._step = result.step
            self._on_step(log_line.live_line(result, self._counts.total_steps))

    def finish(
        self,
        run: ModelRun,
        model: Any,
        steps: StepCount,
        others: Set[str],
    ) -> RunRecord:
        """The record of the run.

        ``model`` is the BaseModel of ComfyUI that was evaluated, and ``others`` are the nodes that
        may be in the way.
        """
        return merging_record(
            *(type(model.model_config).__name__, run, self._counts, self._latent),
            begun=steps.begun,
            others=others,
            gpu_waited=steps.gpu_waited,
            recording=None if self._details is None else self._details.finish(),
        )


def guarded(tell: Callable[[Told], None]) -> Callable[[Told], None]:
    """A function that is not called again after an error, which is logged."""
    works = True

    def told(what: Told) -> None:
        nonlocal works
        if works:
            try:
                tell(what)
            except InterruptProcessingException:
                raise
            except Exception as error:
                works = False
                warn("the report of this run is not complete", error)

    return told


def warn(lost: str, error: Exception) -> None:
    """Log that a part of a report is lost to an error."""
    log.warning("[ToMe] %s: %s: %s", lost, type(error).__name__, error)
