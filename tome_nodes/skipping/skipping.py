"""What shallow steps and forecasts share."""

from collections.abc import Set
from typing import ClassVar

from .. import reasons


class Skipping:
    """Skips steps of one sampling run.

    Attributes:
        nothing_skipped: that no step was skipped, in words.
        obstacle: why no more steps are skipped in the run; None if more may be.
        forecast_steps: the steps that were forecast.
    """

    nothing_skipped: ClassVar[str]
    forecast_steps: Set[int] = frozenset()

    def __init__(self) -> None:
        self.obstacle: reasons.Reason | None = None

    @property
    def reason(self) -> reasons.Reason:
        """Why no step was skipped, as far as is known."""
        raise NotImplementedError

    def stop(self, why: reasons.Reason) -> None:
        """Skip no more steps, and drop what is kept."""
        self.obstacle = why
        self.clear()

    def clear(self) -> None:
        """Drop what is kept of the steps before, which is no guide to the next."""
        raise NotImplementedError
