"""The record of a sampling run, made from what merged or was forecast."""

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from .. import reasons
from ..merging.model import PatchedModel
from ..merging.model_run import ModelRun
from ..settings.config import ToMeConfig
from ..strategies.plan import Grid
from . import log_line
from .counts import Counts
from .gain import Gain, gain_of
from .recording import Recording

log = logging.getLogger("tome_nodes")


class Unskipped(NamedTuple):
    """That no step of a run was skipped.

    Attributes:
        what: the same in words, such as "no step was shallow".
        reason: why not.
    """

    what: str
    reason: reasons.Reason


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a patched model's last sampling run.

    Attributes:
        model: the host's name for the kind of model.
        config: the settings.
        counts: what was merged and skipped.
        unmerged: why nothing was merged; None if something was, or if nothing was to be.
        unskipped: why no step was skipped; None if one was, or if none was to be.
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
    unskipped: Unskipped | None = None
    stopped: reasons.Reason | None = None
    gain: Gain | None = None
    backend: str | None = None
    recording: Recording | None = None

    @property
    def nothing(self) -> str | None:
        """Why nothing was done, and one thing to do; None if anything was done."""
        if self.counts.merged or self.counts.skipped_steps:
            return None
        told = [] if self.unmerged is None else [("nothing merged", self.unmerged)]
        told += [] if self.unskipped is None else [self.unskipped]
        if len({reason for _, reason in told}) < len(told):
            return f"{', and '.join(what for what, _ in told)}: {self.unmerged}"
        # What is to be done stands last, behind its reason: the first that helps, if any does.
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
        if self.unskipped is None:
            return done
        what, reason = self.unskipped
        return f"{done}; {what}: {reason if reason.helps else reason.why}"

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


@dataclass(frozen=True, kw_only=True)
class Merged:
    """How the tokens of models of one kind merged in a run.

    Attributes:
        model_run: the evaluations of one of the models.
        latent: the grid of the latent.
        others: the nodes that may be in the way.
        gpu_waited: whether the GPU waited for the host in most steps.
        recording: the details; None if there are none.
    """

    model_run: ModelRun
    latent: Grid
    others: Set[str] = frozenset()
    gpu_waited: bool = False
    recording: Recording | None = None


def make_record(
    name: str,
    config: ToMeConfig,
    counts: Counts,
    begun: Callable[[], Mapping[int, float]],
    merged: Merged | None,
    unskipped: Unskipped | None,
) -> RunRecord:
    """The record of what models of one kind did in a run.

    Args:
        name: the host's for the kind of model, or for its scheduler.
        config: the settings.
        counts: what was merged and skipped.
        begun: returns when each step began, in seconds.
        merged: how tokens merged; None if none were to merge.
        unskipped: see :class:`RunRecord`.
    """
    has_gained = bool(counts.merged or counts.skipped_steps)
    if merged is None:
        gain = gain_of(counts, config, begun()) if has_gained else None
        return RunRecord(model=name, config=config, counts=counts, unskipped=unskipped, gain=gain)
    model, engine = merged.model_run.model, merged.model_run.engine
    gain = None
    if has_gained:
        saved = model.saved(merged.latent)
        gain = gain_of(counts, model.config, begun(), saved, model.shallowest, merged.gpu_waited)
    unmerged = None if counts.merged else _why_unmerged(model, counts, merged.latent)
    if unmerged == reasons.NOT_CALLED and unskipped is not None:
        unskipped = unskipped._replace(reason=unmerged)
    return RunRecord(
        model=name,
        config=model.config,
        counts=counts,
        unmerged=None if unmerged is None else reasons.named(unmerged, merged.others),
        unskipped=unskipped,
        stopped=merged.model_run.stopped,
        backend=None if engine is None else engine.backend(),
        recording=merged.recording,
        gain=gain,
    )


def _why_unmerged(model: PatchedModel, counts: Counts, latent: Grid) -> reasons.Reason:
    obstacle = counts.most_common_reason
    if obstacle is None and model.shallowest > model.max_downsample:
        obstacle = model.levels_left_out(latent)
    return obstacle or reasons.NOT_CALLED
