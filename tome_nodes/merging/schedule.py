"""Which step of a run a noise level is of, and how much merges in it."""

from collections.abc import Sequence

from ..settings.config import ToMeConfig


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
