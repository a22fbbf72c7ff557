"""When to merge: steps and noise levels."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NoiseRange:
    """The noise levels at which merging is on: from ``start`` down to, not including, ``end``."""

    start: float
    end: float

    def __contains__(self, sigma: float) -> bool:
        return self.end < sigma <= self.start


def step_index(schedule: Sequence[float], sigma: float) -> int:
    """The step of a sampling run to which an evaluation at noise level ``sigma`` belongs.

    Args:
        schedule: falling noise levels, one more than there are steps.
        sigma: noise level of the evaluation. Samplers of higher order evaluate a step more than
            once, at levels between those of the schedule, and some go above its first level.
    """
    return max(0, sum(level >= sigma for level in schedule[:-1]) - 1)
