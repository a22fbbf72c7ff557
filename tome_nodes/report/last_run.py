"""The record of a patched model's last sampling run."""

from dataclasses import dataclass

from ..settings.config import ToMeConfig
from ..tuning.search import Measured
from .counts import Counts
from .recording import Recording


@dataclass(frozen=True, kw_only=True)
class LastRun:
    """The record of a patched model's last sampling run.

    Attributes:
        model: the host's name for the kind of model.
        config: the settings.
        counts: what was merged.
        obstacle: why nothing was merged or forecast, None if something was.
        backend: for example ``torch``, with the reason if it is not Triton; None if the run never
            chose one.
        worth_from: the estimated number of tokens from which merging a feature map is worth it;
            None if the run never chose a backend.
        shallowest: how many times smaller than the latent the largest feature map with attention
            is.
        recording: the details, None if no ToMe Report was connected when the run began.
        tuned: what ToMe Tune measured with these settings, None if it did not choose them.
        is_forecast: whether steps were to be forecast, in place of merging.
    """

    model: str
    config: ToMeConfig
    counts: Counts
    obstacle: str | None
    backend: str | None
    worth_from: int | None
    shallowest: int
    recording: Recording | None
    tuned: Measured | None
    is_forecast: bool = False

    @property
    def nothing(self) -> str | None:
        """What did not happen and why, such as ``nothing merged: too few``; None if it happened."""
        what = "nothing was forecast" if self.is_forecast else "nothing merged"
        return None if self.obstacle is None else f"{what}: {self.obstacle}"
