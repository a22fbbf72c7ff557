"""What is kept of the last sampling run of a patched model."""

from dataclasses import dataclass

from ..config import ToMeConfig
from .counts import Counts
from .recorder import Recording


@dataclass(frozen=True)
class LastRun:
    """What is kept of the last sampling run of a patched model.

    Attributes:
        model: the kind of model, as the host calls it.
        config: the settings.
        counts: what was merged.
        obstacle: why nothing was merged, None if something was.
        backend: such as ``torch``, with the reason where it is not Triton; None if it did not come
            to that.
        worth_from: tokens of a feature map from which merging is worth it, by estimate.
        shallowest: how many times smaller than the latent the largest feature map with attention
            is.
        recording: the details, None if no report was wanted when the run began.
    """

    model: str
    config: ToMeConfig
    counts: Counts
    obstacle: str | None
    backend: str | None
    worth_from: int | None
    shallowest: int
    recording: Recording | None
