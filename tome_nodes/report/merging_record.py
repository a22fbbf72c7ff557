"""The record of a run that merged tokens, or was to merge some."""

from collections.abc import Callable, Mapping, Set

from .. import reasons
from ..patching.model_run import ModelRun
from ..patching.prospects import prospects_of
from ..strategies.plan import Grid
from . import log_line
from .counts import Counts
from .gain import gain_of
from .recording import Recording
from .run_record import RunRecord


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
    """The record of a run of one model.

    Args:
        name: the host's name for the kind of model.
        run: its evaluations.
        counts: what merged in them, and which steps were forecast.
        latent: the grid of the latent.
        begun: returns when each step began, in seconds.
        others: the nodes that may be in the way.
        gpu_waited: whether the GPU waited for the host in most steps.
        recording: the details; None if there are none.
    """
    model, engine = run.model, run.engine
    obstacle = log_line.obstacle(counts, model.max_downsample, model.shallowest)
    prospects = gain = None
    if not counts.merged:
        prospects = prospects_of(model, latent, obstacle)
    if counts.merged or counts.forecast_steps:
        saved = model.saved(latent)
        gain = gain_of(counts, model.config, begun(), saved, model.shallowest, gpu_waited)
    return RunRecord(
        model=name,
        config=model.config,
        counts=counts,
        unmerged=None if counts.merged else reasons.named(obstacle, others),
        prospects=prospects,
        stopped=run.stopped,
        backend=None if engine is None else (*engine.in_words(), engine.backend)[0],
        recording=recording,
        gain=gain,
    )
