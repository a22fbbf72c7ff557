"""Follow the models of a sampling run: live on the node, and in a record for ToMe Report.

An error in reporting never stops the sampling.
"""

import logging
from collections.abc import Callable, Set
from functools import partial
from threading import Lock
from typing import TypeVar

import torch
from comfy.model_management import InterruptProcessingException

from ..merging.evaluation import Evaluation, Observer
from ..merging.model_run import ModelRun
from ..merging.overrides import Forward
from ..run import log_line
from ..run.counts import Counts
from ..run.record import Merged, RunRecord
from ..run.recording import Recorder
from ..run.sampling_run import SamplingRun
from ..strategies.plan import Grid

log = logging.getLogger("tome_nodes")

Told = TypeVar("Told")


class ModelReport(Observer):
    """Follows the models of one class through a sampling run, and reports them at the end."""

    def __init__(self, run: SamplingRun, latent: Grid, device: torch.device, with_details: bool):
        """Start following, just before the first evaluation of a model on ``device``.

        ``with_details`` is whether to record every block in every step.
        """
        self._run = run
        self._counts = Counts()
        self._latent = latent
        self._details = Recorder(latent, device) if with_details else None
        followers = [self._counts.note, self._show]
        if self._details is not None:
            followers.append(self._details.note)
        self._followers = [*map(guarded, followers)]
        self.follows_blocks = with_details
        # ComfyUI may evaluate a model and its clones on several devices at once.
        self._lock = Lock()

    def timed(self, block: str, forward: Forward) -> Forward:
        return forward if self._details is None else self._details.timed(block, forward)

    def note(self, evaluation: Evaluation) -> None:
        with self._lock:
            for follower in self._followers:
                follower(evaluation)

    def _show(self, evaluation: Evaluation) -> None:
        """Show what the first evaluation of a step did."""
        self._run.show(partial(log_line.live_line, evaluation))

    def finish(self, name: str, run: ModelRun, others: Set[str], gpu_waited: bool) -> RunRecord:
        """The record of the run.

        Args:
            name: the host's for the class of models.
            run: the evaluations of one of them.
            others: the nodes that may be in the way.
            gpu_waited: whether the GPU waited for the host in most steps.
        """
        recording = None if self._details is None else self._details.finish()
        merged = Merged(
            model_run=run,
            latent=self._latent,
            others=others,
            gpu_waited=gpu_waited,
            recording=recording,
        )
        return self._run.record(name, self._counts, merged)


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
