"""The record of a sampling run, made from what merged or was forecast."""

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from .. import reasons
from ..merging.model_run import ModelRun
from ..settings.config import ToMeConfig
from ..strategies.plan import Grid
from . import log_line
from .counts import Counts
from .gain import Gain, gain_of
from .recording import Recording

log = logging.getLogger("tome_nodes")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a patched model's last sampling run.

    Attributes:
        model: the host's name for the kind of model.
        config: the settings.
        counts: what was merged and skipped.
        unmerged: why nothing was merged; None if something was, or if nothing was to be.
        unforecast: the same for forecasts.
        unshallow: the same for shallow steps.
        stopped: why merging stopped in the run, such as too little memory; None if it did not.
        gain: what the run gained; None if nothing was merged or skipped.
        backend: for example ``torch``, with the reason if it is not Triton; None if the run never
            chose one.
        recording: the details, None if no ToMe Report was connected when the run began.
    """

    model: str
    config: ToMeConfig
    counts: Counts
    unmerged: reasons.Reason | None = None
    unforecast: reasons.Reason | None = None
    unshallow: reasons.Reason | None = None
    stopped: reasons.Reason | None = None
    gain: Gain | None = None
    backend: str | None = None
    recording: Recording | None = None

    @property
    def nothing(self) -> str | None:
        """Why nothing was done, and one thing to do; None if anything was done."""
        if self.counts.merged or self.counts.skipped_steps:
            return None
        unskipped, what = self._unskipped
        if self.unmerged is not None and self.unmerged == unskipped:
            return f"nothing merged, and {what}: {self.unmerged}"
        both = ("nothing merged", self.unmerged), (what, unskipped)
        told = [(what, reason) for what, reason in both if reason is not None]
        # The advice comes last, after its own reason: the first advice that helps, if any does.
        best = min(told, key=lambda each: not each[1].helps)
        told.sort(key=lambda each: each is best)
        return "; ".join([*(f"{what}: {reason.why}" for what, reason in told), best[1].do])

    @property
    def line(self) -> str:
        """What was merged or skipped, or why nothing was: the same for runs that are alike."""
        if self.nothing is not None:
            return self.nothing
        backend = [] if self.backend in (None, "torch") else [self.backend]
        done = log_line.log_line(self.counts, self.config, backend)
        # Where steps are skipped, it does not matter why nothing merges.
        unskipped, what = self._unskipped
        if unskipped is None:
            return done
        return f"{done}; {what}: {unskipped if unskipped.helps else unskipped.why}"

    @property
    def _unskipped(self) -> tuple[reasons.Reason | None, str]:
        """Why no step was skipped, None if no reason is known, and how to say that none was."""
        if self.unshallow is not None:
            return self.unshallow, "no step was shallow"
        return self.unforecast, "nothing was forecast"

    def log(self, node: str | None = None, alike: int = 1) -> None:
        """Log the line, and what the run gained.

        Args:
            node: the node that sampled, in words; None if it is not known.
            alike: how many runs of the node had this line, this one the last of them.
        """
        where = "" if node is None else f"{node}: "
        count = "" if alike == 1 else f"{alike} runs: "
        level = logging.INFO if self.nothing is None else logging.WARNING
        gain = "" if self.gain is None else f"; {self.gain.words}"
        log.log(level, "[ToMe] %s%s%s%s", where, count, self.line, gain)


def forecast_record(
    name: str,
    config: ToMeConfig,
    counts: Counts,
    unforecast: reasons.Reason | None,
    begun: Callable[[], Mapping[int, float]],
) -> RunRecord:
    """The record of a run whose steps were forecast, or were to be.

    ``name`` is the host's name for the kind of model, or for its scheduler. ``begun`` returns when
    each step began, in seconds.
    """
    gain = gain_of(counts, config, begun()) if counts.forecast_steps else None
    return RunRecord(model=name, config=config, counts=counts, unforecast=unforecast, gain=gain)


def merging_record(
    name: str,
    run: ModelRun,
    counts: Counts,
    latent: Grid,
    begun: Callable[[], Mapping[int, float]],
    others: Set[str] = frozenset(),
    gpu_waited: bool = False,
    recording: Recording | None = None,
) -> RunRecord:
    """The record of a run of one model that merged tokens, or was to merge some.

    Args:
        name: the host's name for the kind of model.
        run: its evaluations.
        counts: what merged in them, and which steps were shallow.
        latent: the grid of the latent.
        begun: returns when each step began, in seconds.
        others: the nodes that may be in the way.
        gpu_waited: whether the GPU waited for the host in most steps.
        recording: the details; None if there are none.
    """
    model, engine = run.model, run.engine
    obstacle = counts.most_common_reason
    if obstacle is None and model.shallowest > model.max_downsample:
        obstacle = reasons.levels_left_out(model.max_downsample, model.shallowest)
    obstacle = obstacle or reasons.NOT_CALLED
    gain = None
    if counts.merged or counts.skipped_steps:
        saved = model.saved(latent)
        gain = gain_of(counts, model.config, begun(), saved, model.shallowest, gpu_waited)
    return RunRecord(
        model=name,
        config=model.config,
        counts=counts,
        unmerged=None if counts.merged else reasons.named(obstacle, others),
        stopped=run.stopped,
        backend=None if engine is None else engine.backend(),
        recording=recording,
        gain=gain,
    )
