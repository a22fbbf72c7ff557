"""When to merge: steps and noise levels."""

from collections.abc import Sequence
from dataclasses import dataclass

from .config import ToMeConfig


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


def least_tokens(config: ToMeConfig, device_type: str, backend: str) -> int:
    """The smallest feature map to merge, in tokens.

    ``min_tokens``, or where that is 0 the size from which merging is not slower. On a CPU it was
    measured (benchmarks/README.md). On a GPU it is arithmetic only: the time of a few launches,
    or of a few dozen where matching is not one kernel, against that of the attention or of the
    block which they shorten.

    Args:
        config: the settings.
        device_type: such as ``cpu`` or ``cuda``.
        backend: ``torch`` or ``triton``.
    """
    if config.min_tokens:
        return config.min_tokens
    if device_type == "cpu":
        return 256
    if config.scope != "module":
        return 768
    return 2048 if backend == "triton" and config.strategy == "window" else 4096


def ratio_at(config: ToMeConfig, step: int, total_steps: int) -> float:
    """The ratio of one step: from ``ratio`` at the first to ``ratio_end`` at the last, linear.

    The paper (section 4.2) found 60 % falling to 40 % better than a steady 50 %.
    """
    if config.ratio_end < 0 or total_steps < 2:
        return config.ratio
    return config.ratio + (config.ratio_end - config.ratio) * step / (total_steps - 1)
