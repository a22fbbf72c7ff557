"""The record of a patched model's last sampling run."""

import logging
from dataclasses import dataclass

from ..settings.config import ToMeConfig
from ..tuning.search import Measured
from . import log_line
from .counts import Counts
from .gain import Gain
from .recording import Recording

log = logging.getLogger("tome_nodes")


@dataclass(frozen=True, kw_only=True)
class LastRun:
    """The record of a patched model's last sampling run.

    Attributes:
        model: the host's name for the kind of model.
        config: the settings.
        counts: what was merged.
        obstacle: why nothing was merged or forecast, None if something was.
        tuned: what ToMe Tune measured with these settings, None if it did not choose them.
        gain: what the run gained; None if nothing was merged or forecast.
        is_forecast: whether steps were to be forecast, in place of merging.
        backend: for example ``torch``, with the reason if it is not Triton; None if the run never
            chose one.
        recording: the details, None if no ToMe Report was connected when the run began.
    """

    model: str
    config: ToMeConfig
    counts: Counts
    obstacle: str | None
    tuned: Measured | None
    gain: Gain | None = None
    is_forecast: bool = False
    backend: str | None = None
    recording: Recording | None = None

    @property
    def nothing(self) -> str | None:
        """What did not happen and why, such as ``nothing merged: too few``; None if it happened."""
        what = "nothing was forecast" if self.is_forecast else "nothing merged"
        return None if self.obstacle is None else f"{what}: {self.obstacle}"

    @property
    def line(self) -> str:
        """What was merged or forecast, or why nothing was: the same for runs that are alike."""
        if self.nothing is not None:
            return self.nothing
        backend = [] if self.backend in (None, "torch") else [self.backend]
        return log_line.log_line(self.counts, self.config, backend, self.tuned)

    def log(self, node: str | None = None, alike: int = 1) -> None:
        """Log the line, and what the run gained.

        Args:
            node: the node that sampled, in words; None if it is not known.
            alike: how many runs of the node had this line, this one the last of them.
        """
        where = "" if node is None else f"{node}: "
        count = "" if alike == 1 else f"{alike} runs: "
        level = logging.INFO if self.nothing is None else logging.WARNING
        gain = "" if self.gain is None or self.tuned is not None else f"; {self.gain.words}"
        log.log(level, "[ToMe] %s%s%s%s", where, count, self.line, gain)
