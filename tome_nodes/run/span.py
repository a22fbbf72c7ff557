"""The part of the sampling in which the settings act."""

from collections.abc import Callable, Sequence
from functools import cached_property

from .. import reasons
from ..settings.config import ToMeConfig


class Span:
    """The noise levels from ``start_percent`` on and before ``end_percent``.

    Attributes:
        is_partial: whether it leaves out a part of the sampling.
    """

    def __init__(self, config: ToMeConfig, noise_at: Callable[[float], float]):
        """``noise_at`` returns the noise level at a point of the sampling, from 0 to 1; it falls.

        Noise levels are in any unit that grows with noise.
        """
        self._percents = config.start_percent, config.end_percent
        self._noise_at = noise_at
        self.is_partial = self._percents != (0, 1)

    def covers(self, noise: float) -> bool:
        """Whether a noise level is in it."""
        if not self.is_partial:
            return True
        first, last = self._bounds
        return last < noise <= first

    def why_none(self, noises: Sequence[float]) -> reasons.Reason | None:
        """Why none of the noise levels of a run, which fall, is in it; None if one is.

        None, too, for a run without steps.
        """
        if not noises or any(map(self.covers, noises)):
            return None
        return self.reason(noises[0])

    def reason(self, first: float) -> reasons.Reason:
        """The reason to report of a run that begins at this noise level, none of which is in it."""
        return reasons.percents(*self._percents, self._point_of(first))

    @cached_property
    def _bounds(self) -> tuple[float, float]:
        first, last = map(self._noise_at, self._percents)
        return first, last

    def _point_of(self, noise: float) -> float:
        """The point of the sampling at a noise level."""
        before, after = 0.0, 1.0
        for _ in range(20):
            middle = (before + after) / 2
            above = self._noise_at(middle) > noise
            before, after = (middle, after) if above else (before, middle)
        return after
