"""When to merge: steps and noise levels of a sampling run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..settings.config import ToMeConfig


@dataclass(frozen=True)
class MergingStep:
    """The step of a sampling run that a model evaluation belongs to, as far as merging needs it.

    Attributes:
        index: which step it is, from 0.
        progress: how far the ratio is on its way from ``ratio`` to ``ratio_end``, from 0 to 1.
        picks: decides the random picks, together with the seed; not negative.
        is_active: whether its noise level is between ``start_percent`` and ``end_percent``.
        begins: the share of the model's whole schedule that comes before the run, as far as the
            host knows it.
    """

    index: int
    progress: float
    picks: int
    is_active: bool
    begins: float = 0.0


def is_active(config: ToMeConfig, noise: float, noise_at: Callable[[float], float]) -> bool:
    """Whether merging is on at a noise level: from ``start_percent`` on, before ``end_percent``.

    ``noise_at`` returns the noise level at a point of the sampling, from 0 to 1.
    """
    return noise_at(config.end_percent) < noise <= noise_at(config.start_percent)


def progress_at(noise: float, noise_at: Callable[[float], float]) -> float:
    """The point of the sampling at a noise level, from 0 to 1; ``noise_at`` falls."""
    before, after = 0.0, 1.0
    for _ in range(20):
        middle = (before + after) / 2
        before, after = (middle, after) if noise_at(middle) > noise else (before, middle)
    return after


def step_index(schedule: Sequence[float], sigma: float, since: int) -> int:
    """The step of a sampling run to which an evaluation at noise level ``sigma`` belongs.

    Args:
        schedule: noise levels, one more than there are steps. They fall, or rise where a picture is
            turned into noise.
        sigma: noise level of the evaluation. Higher-order samplers evaluate a step more than once,
            at levels in between. Some go above the first level, and some go back up.
        since: the step of the previous evaluation.
    """
    steps = range(len(schedule) - 1)
    for step in (*steps[since:], *steps[:since]):
        low, high = sorted(schedule[step : step + 2])
        if sigma == schedule[step] or low < sigma < high:
            return step
    return min(steps, key=lambda step: abs(schedule[step] - sigma), default=0)


def ratio_at(config: ToMeConfig, progress: float) -> float:
    """The ratio on the straight line from ``ratio`` to ``ratio_end``, at ``progress`` from 0 to 1.

    The paper (section 4.2) found 60 % falling to 40 % better than a constant 50 %.
    """
    if config.ratio_end < 0:
        return config.ratio
    return config.ratio + (config.ratio_end - config.ratio) * progress
