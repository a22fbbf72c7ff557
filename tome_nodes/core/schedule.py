"""When to merge: steps and noise levels."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ..config import ToMeConfig


@dataclass(frozen=True)
class NoiseRange:
    """The noise levels at which merging is on: from ``start`` down to, not including, ``end``."""

    start: float
    end: float

    @classmethod
    def of(cls, config: ToMeConfig, noise_at: Callable[[float], float]) -> "NoiseRange":
        """The range of some settings, where ``noise_at`` gives the noise level of a percent."""
        return cls(noise_at(config.start_percent), noise_at(config.end_percent))

    def __contains__(self, noise: float) -> bool:
        return self.end < noise <= self.start


@dataclass(frozen=True)
class Moment:
    """Where a model evaluation is in its sampling run, as the host knows it.

    Attributes:
        step: the step it belongs to, from 0 on.
        progress: how far ``ratio`` is on its way to ``ratio_end``, from 0 to 1.
        picks: what the random picks are drawn for, beside the seed; not negative.
        part: what it evaluates: which samples of a batch, which tile or window of a picture. A
            plan is kept for the same part of a later step.
        is_active: whether its noise level is between ``start_percent`` and ``end_percent``.
    """

    step: int
    progress: float
    picks: int
    part: Hashable
    is_active: bool


def step_index(schedule: Sequence[float], sigma: float) -> int:
    """The step of a sampling run to which an evaluation at noise level ``sigma`` belongs.

    Args:
        schedule: falling noise levels, one more than there are steps.
        sigma: noise level of the evaluation. Samplers of higher order evaluate a step more than
            once, at levels between those of the schedule, and some go above its first level.
    """
    return max(0, sum(level >= sigma for level in schedule[:-1]) - 1)


def ratio_at(config: ToMeConfig, progress: float) -> float:
    """The ratio, ``progress`` of the way from ``ratio`` to ``ratio_end``, in a straight line.

    The paper (section 4.2) found 60 % falling to 40 % better than a steady 50 %.
    """
    if config.ratio_end < 0:
        return config.ratio
    return config.ratio + (config.ratio_end - config.ratio) * progress
