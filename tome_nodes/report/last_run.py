"""The record of a patched model's last sampling run."""

import logging
from dataclasses import dataclass

from ..settings.config import ToMeConfig
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
        counts: what was merged and forecast.
        unmerged: why nothing was merged; None if something was, or if nothing was to be.
        unforecast: the same of forecasts.
        stopped: why merging stopped in the run, such as too little memory; None if it did not.
        gain: what the run gained; None if nothing was merged or forecast.
        backend: for example ``torch``, with the reason if it is not Triton; None if the run never
            chose one.
        recording: the details, None if no ToMe Report was connected when the run began.
    """

    model: str
    config: ToMeConfig
    counts: Counts
    unmerged: str | None = None
    unforecast: str | None = None
    stopped: str | None = None
    gain: Gain | None = None
    backend: str | None = None
    recording: Recording | None = None

    @property
    def nothing(self) -> str | None:
        """Why nothing was done, such as ``nothing merged: too few``; None if anything was."""
        if self.counts.merged or self.counts.forecast_steps:
            return None
        both = ("nothing merged", self.unmerged), ("nothing was forecast", self.unforecast)
        return "; ".join(f"{what}: {why}" for what, why in both if why is not None)

    @property
    def line(self) -> str:
        """What was merged and forecast, or why nothing was: the same for runs that are alike."""
        if self.nothing is not None:
            return self.nothing
        backend = [] if self.backend in (None, "torch") else [self.backend]
        done = log_line.log_line(self.counts, self.config, backend)
        # Where steps are forecast, it does not matter why nothing merges.
        missing = "" if self.unforecast is None else f"; nothing was forecast: {self.unforecast}"
        return done + missing

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
