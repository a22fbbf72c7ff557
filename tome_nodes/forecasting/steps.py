"""Where a step is in its run, and which steps of a run the model runs."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

FIRST, FIRST_OF_MANY, MANY = 2, 3, 8
"""The model runs in the first ``FIRST`` steps, and in the first ``FIRST_OF_MANY`` if a run has at
least ``MANY`` steps and is not settled. The earliest forecasts have the largest errors."""

FIRST_ON_UNET = 5
"""In a long run, a UNet runs in so many first steps: under strong guidance, its early answers go to
and fro."""

LONG_ON_UNET = 20
"""From this many steps on, the run of a UNet is long. In a shorter one that is not settled,
forecasts change the picture about as much as fewer steps do (benchmarks/FIDELITY.md)."""

SHORTEST = FIRST + 2
"""A run has forecasts only from this many steps on."""

LONG = 16
"""From this many steps on, a run is long."""

_FAST, FASTER = 1.4, 2.0
"""A step is uneven if the logarithm of signal to noise grows by more than ``_FAST`` times the mean
of the run in it, or by more than ``FASTER`` times as much in the next one."""

LEAST_SNR = -7.0
"""Below this logarithm of signal to noise, there is next to nothing of a picture: answers always
differ little."""

TOO_CLOSE = 0.02
"""Two noise levels count as one if their logarithms of signal to noise differ by less."""

_MOST_NOISE = 0.99
"""Noise levels of a flow above this one count as this one: pure noise would have no logarithm."""


@dataclass(frozen=True)
class ForecastStep:
    """A step of a sampling run, as the host knows it.

    Attributes:
        index: its number, from 0.
        count: the number of steps of the run.
        log_snr: the logarithm of signal to noise of its latent, in power.
        conditions: everything besides the noise that decides the model's answer, as far as the host
            knows it: the active prompts, the guidance scale, control, hooks.
        latent_share: the share of its noisy latent in the next one, see :func:`latent_share`; None
            if the answer after a forecast must stay as it is.
        is_even: see :func:`is_even`.
        is_active: whether it is between ``start_percent`` and ``end_percent``.
        from_noise: whether the run began with noise alone, not with a picture under some noise.
    """

    index: int
    count: int
    log_snr: float
    conditions: Hashable = None
    latent_share: float | None = None
    is_even: bool = True
    is_active: bool = True
    from_noise: bool = True


def is_noise_alone(noise: float, most: float) -> bool:
    """Whether hardly anything of a picture is left at a noise level; ``most`` is the highest."""
    return noise >= 0.9 * most


def log_snr(noise: float, is_flow: bool) -> float:
    """The logarithm of signal to noise, in power.

    Args:
        noise: the noise level, above 0. For a flow, the share of noise in the latent; otherwise the
            standard deviation of the noise that is added to a picture.
        is_flow: whether the latent goes straight from noise to a picture.
    """
    if not is_flow:
        return -2 * math.log(noise)
    share = min(noise, _MOST_NOISE)
    return 2 * math.log((1 - share) / share)


def log_snrs(noises: Sequence[float], is_flow: bool) -> list[float]:
    """The logarithm of signal to noise of every noise level, see :func:`log_snr`.

    It is infinite where there is no noise, as in the middle of some schedules that users make.
    """
    return [log_snr(noise, is_flow) if noise > 0 else math.inf for noise in noises]


def latent_share(schedule: Sequence[float], index: int) -> float | None:
    """The share of a step's noisy latent in the next one; None if the noise does not fall.

    In Euler's method, the next latent is a mean of this one and of the answer, and the share is the
    noise of the next step over the noise of this one: 0 in the last step.

    Args:
        schedule: noise levels, one more than there are steps.
        index: the number of the step, from 0.
    """
    if index + 1 >= len(schedule):
        return None
    before, after = schedule[index : index + 2]
    return after / before if 0 <= after < before else None


def is_even(
    levels: Sequence[float], index: int, faster: float = FASTER, is_unet: bool = False
) -> bool:
    """Whether noise falls evenly enough around a step to forecast it.

    Args:
        levels: the logarithm of signal to noise of every step.
        index: the number of the step, from 0.
        faster: how many times as much the logarithm may grow in the next step as in this one.
        is_unet: whether the model is a UNet. There, the logarithm may grow fast in a part of the
            run. In a long one, ``faster`` counts as ``FASTER``, but a sampler that looks back,
            which has a ``faster`` of its own, would put a line through the forecast and the next
            answer, so the step after that counts, too.
    """
    if not 0 < index < len(levels) - 1:
        return True
    mean = (levels[-1] - levels[0]) / (len(levels) - 1)
    is_long = is_unet and len(levels) >= LONG_ON_UNET
    steps = 3 if is_long and faster < FASTER else 2
    gaps = [after - before for before, after in pairwise(levels[index - 1 : index + steps])]
    most = FASTER if is_long else faster
    is_fast = gaps[0] > _FAST * mean and not is_unet
    return not is_fast and all(after <= most * before for before, after in pairwise(gaps))


def are_apart(levels: Sequence[float]) -> bool:
    """Whether no two levels, as in :func:`is_even`, are so close that they count as one."""
    return all(after - before >= TOO_CLOSE for before, after in pairwise(levels))


def are_geometric(levels: Sequence[float]) -> bool:
    """Whether the levels, as in :func:`is_even`, are all as far apart."""
    gaps = [after - before for before, after in pairwise(levels)]
    return max(gaps) - min(gaps) < 0.01 * max(gaps)


def begins_slowly(levels: Sequence[float]) -> bool:
    """Whether noise falls slowly at first: much less in the first step than in the second."""
    first, second, third = levels[:3]
    return second - first < 0.6 * (third - second)


def begins_fast(levels: Sequence[float]) -> bool:
    """Whether noise falls faster in the first step than in the second, as under karras it does not.

    For ``levels``, see :func:`is_even`.
    """
    first, second, third = levels[:3]
    return second - first > third - second


def first_steps(count: int, is_settled: bool, is_unet: bool = False) -> int:
    """How many steps the model runs before the first forecast, in a run of ``count``."""
    if is_unet and count >= LONG_ON_UNET:
        return FIRST_ON_UNET
    return FIRST_OF_MANY if count >= MANY and not is_settled else FIRST


def steps_that_run(
    ratio: float, count: int, is_settled: bool, is_unet: bool = False, has_turned: bool = False
) -> frozenset[int]:
    """The steps of a run that the model runs; the others are forecast.

    Args:
        ratio: the share of the steps between the first few and the last that are forecast; at least
            one of them is.
        count: the number of steps of the run, at least 1.
        is_settled: whether answers change little from the start of the run.
        is_unet: whether the model is a UNet.
        has_turned: whether one more step runs before the first forecast, see :class:`Forecasts`.
    """
    first = first_steps(count, is_settled, is_unet) + has_turned
    between = max(0, count - 1 - first)
    running = min(round(between * (1 - ratio)), max(0, between - 1))
    fewest, longer = divmod(between - running, running + 1)
    steps, latest = {*range(min(first, count)), count - 1}, first - 1
    for number in range(1, running + 1):
        if is_unet and count >= LONG_ON_UNET:
            # The late steps of a UNet count least, so most forecasts in a row come last.
            place = number * (fewest + 1) + max(0, number - (running + 1 - longer))
        else:
            place = math.ceil((between + 1) * number / (running + 1) - 0.5)
        latest = max(latest + 1, first - 1 + place)
        steps.add(latest)
    return frozenset(steps)
