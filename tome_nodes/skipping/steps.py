"""Where a step is in its run, and which steps of a run the model runs."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

FIRST, FIRST_OF_MANY, MANY = 2, 3, 8
"""The model runs in the first ``FIRST`` steps, and in the first ``FIRST_OF_MANY`` if a run has at
least ``MANY`` steps and is not settled. The earliest forecasts have the largest errors."""

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
            knows it: the active prompts, control, hooks.
        latent_share: the share of its noisy latent in the next one, see :func:`latent_share`; None
            if the answer after a forecast must stay as it is.
        is_even: see :func:`is_even`.
        is_active: whether it is between ``start_percent`` and ``end_percent``.
        follows: whether its latent is where the steps before it led; see
            :mod:`tome_nodes.skipping.trajectory`.
        from_noise: whether the run began with noise alone, not with a picture under some noise.
        may_curve: whether answers may go on along curves, see :mod:`tome_nodes.skipping.course`.
    """

    index: int
    count: int
    log_snr: float
    conditions: Hashable = None
    latent_share: float | None = None
    is_even: bool = True
    is_active: bool = True
    follows: bool = True
    from_noise: bool = True
    may_curve: bool = True


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


def is_even(levels: Sequence[float], index: int, faster: float = FASTER) -> bool:
    """Whether noise falls evenly enough around a step to forecast it.

    Args:
        levels: the logarithm of signal to noise of every step.
        index: the number of the step, from 0.
        faster: how many times as much the logarithm may grow in the next step as in this one.
    """
    if not 0 < index < len(levels) - 1:
        return True
    mean = (levels[-1] - levels[0]) / (len(levels) - 1)
    last, now, after = levels[index - 1 : index + 2]
    return now - last <= _FAST * mean and after - now <= faster * (now - last)


def are_apart(levels: Sequence[float]) -> bool:
    """Whether no two levels, as in :func:`is_even`, are so close that they count as one."""
    return all(after - before >= TOO_CLOSE for before, after in pairwise(levels))


def first_steps(count: int, is_settled: bool) -> int:
    """How many steps the model runs before the first forecast, in a run of ``count``."""
    return FIRST_OF_MANY if count >= MANY and not is_settled else FIRST


def steps_that_run(ratio: float, count: int, is_settled: bool) -> frozenset[int]:
    """The steps of a run that the model runs; the others are forecast.

    Args:
        ratio: the share of the steps between the first few and the last that are forecast; at least
            one of them is.
        count: the number of steps of the run, at least 1.
        is_settled: whether answers change little from the start of the run.
    """
    first = first_steps(count, is_settled)
    between = max(0, count - 1 - first)
    running = min(round(between * (1 - ratio)), max(0, between - 1))
    steps, latest = {*range(min(first, count)), count - 1}, first - 1
    for number in range(1, running + 1):
        place = math.ceil((between + 1) * number / (running + 1) - 0.5)
        latest = max(latest + 1, first - 1 + place)
        steps.add(latest)
    return frozenset(steps)
