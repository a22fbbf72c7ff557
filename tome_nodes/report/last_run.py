"""The record of a patched model's last sampling run."""

import logging
from dataclasses import dataclass

from ..settings.config import ToMeConfig
from ..tuning.search import Measured
from . import log_line
from .counts import Counts
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
        is_forecast: whether steps were to be forecast, in place of merging.
        backend: for example ``torch``, with the reason if it is not Triton; None if the run never
            chose one.
        shallowest: how many times smaller than the latent the largest feature map with attention
            is.
        recording: the details, None if no ToMe Report was connected when the run began.
    """

    model: str
    config: ToMeConfig
    counts: Counts
    obstacle: str | None
    tuned: Measured | None
    is_forecast: bool = False
    backend: str | None = None
    shallowest: int = 1
    recording: Recording | None = None

    @property
    def nothing(self) -> str | None:
        """What did not happen and why, such as ``nothing merged: too few``; None if it happened."""
        what = "nothing was forecast" if self.is_forecast else "nothing merged"
        return None if self.obstacle is None else f"{what}: {self.obstacle}"

    def log(self) -> None:
        """Log what was merged or forecast, or why nothing was."""
        if self.nothing is not None:
            log.warning("[ToMe] %s", self.nothing)
            return
        backend = [] if self.backend in (None, "torch") else [self.backend]
        log.info("[ToMe] %s", log_line.log_line(self.counts, self.config, backend, self.tuned))
