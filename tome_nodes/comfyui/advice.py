"""What to change so that steps of a run are forecast, tried out on the run before it is said."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from comfy.samplers import calculate_sigmas

from ..forecasting.samplers import SAMPLERS

_SAMPLERS = ("euler", "dpmpp_2m", "res_multistep")
"""The samplers to advise: under these, forecasts change the picture least."""

_SCHEDULERS = ("simple", "sgm_uniform", "normal", "beta")
"""The schedulers to advise, those whose noise falls most evenly first."""

_LONGEST = 20
"""The longest schedule to try, as a multiple of the run: at ``denoise=0.05``, a second pass runs
the last 1/20 of its schedule."""


def samplers_instead(levels: Sequence[float], used: str) -> tuple[str, ...]:
    """The samplers under which steps of a run would be forecast, as far as can be told before it.

    ``levels`` is the logarithm of signal to noise of every step. The sampler that is ``used`` is
    not advised.
    """
    others = (name for name in _SAMPLERS if name != used)
    return tuple(name for name in others if SAMPLERS[name].obstacle(levels) is None)


def scheduler_instead(
    sampling: Any, schedule: Sequence[float], is_forecast: Callable[[Sequence[float]], bool]
) -> str | None:
    """A scheduler under which steps of a run would be forecast; None if none of the usual ones.

    Args:
        sampling: ComfyUI's noise levels of the model.
        schedule: noise levels of the run, one more than there are steps.
        is_forecast: whether anything would be forecast under another schedule of as many steps.
    """
    for name in _SCHEDULERS:
        other = _schedule_of(name, sampling, schedule)
        if other is not None and not _are_alike(other, schedule) and is_forecast(other):
            return name
    return None


def _schedule_of(name: str, sampling: Any, schedule: Sequence[float]) -> list[float] | None:
    """The noise levels of a scheduler that begin nearest to those of a run; None if it has none.

    A second pass takes the last levels of a longer run.
    """
    count = len(schedule) - 1

    def of(total: int) -> list[float]:
        levels: list[float] = calculate_sigmas(sampling, name, total).tolist()
        return levels[-count - 1 :]

    totals = range(count, _LONGEST * count + 1)
    # The longer the whole run, the less noise its last steps begin with.
    place = bisect_left(totals, -schedule[0], key=lambda total: -of(total)[0])
    nearest = [of(total) for total in totals[max(0, place - 1) : place + 1]]
    nearest = [levels for levels in nearest if len(levels) == count + 1]
    return min(nearest, key=lambda levels: abs(levels[0] - schedule[0]), default=None)


def _are_alike(levels: Sequence[float], others: Sequence[float]) -> bool:
    pairs = zip(levels, others, strict=True)
    return all(abs(one - other) <= 0.01 * max(one, other) for one, other in pairs)
