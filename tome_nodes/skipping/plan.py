"""Which evaluations of a sampling run are whole, decided before it begins.

The others are shallow: only the outermost blocks of the UNet run, on the true noisy latent, and
what comes up from the others goes on from the last whole evaluations (DeepCache, arXiv 2312.00858).
All constants are from benchmarks/FIDELITY.md.
"""

import math
from collections.abc import Iterable
from math import comb

FIRST = 3
"""So many evaluations at the start are always whole."""

LEAST = 4
"""The largest number of evaluations that are all whole at any ratio."""

LEAST_SNR = 0.0
"""Where the last step begins with less than this logarithm of signal to noise, and so paints most
of the picture, no evaluation of the run is shallow."""

BLANK = -9.0
"""Below this logarithm of signal to noise there is nothing of a picture yet. Only schedules that
end in zero terminal SNR begin there."""

_SHARE = 7 / 6
"""The share of the evaluations behind the fourth that is shallow, over the ratio."""


def whole_evaluations(ratio: float, total: int, blank: int = 0) -> frozenset[int]:
    """The whole ones of ``total`` evaluations, from 0; the others are shallow.

    They are dense at first: each gap is longer than the one before, and by more each time. There
    are fewer of them as ``ratio`` grows; at a ratio of 0, all evaluations are whole.

    The first ``blank`` evaluations are in noise without a picture, below :data:`BLANK`. As their
    features hardly change, most of them are shallow before any other is.
    """
    shallow = round(min(1.0, _SHARE * ratio) * max(0, total - LEAST))
    of_blank = min(shallow, max(0, blank - FIRST))
    rest = range(blank, total)
    of_rest = min(shallow - of_blank, max(0, len(rest) - LEAST))
    begin = {*range(blank)} - {*range(FIRST, FIRST + of_blank)}
    return frozenset(begin) | {blank + index for index in _dense_at_first(len(rest), of_rest)}


def _dense_at_first(total: int, shallow: int) -> Iterable[int]:
    """The others of ``total`` evaluations, from 0, so many of which are shallow."""
    whole = total - shallow
    growth = shallow / comb(whole, 3) if shallow else 0.0
    return (round(index + growth * comb(index, 3)) for index in range(whole))


def shortest(ratio: float) -> int:
    """The smallest number of evaluations of which some are shallow; ``ratio`` is above 0."""
    return LEAST + 1 + math.floor(0.5 / min(1.0, _SHARE * ratio))


def adds_noise(sampler: str) -> bool:
    """Whether a sampler of this name, ComfyUI's without ``sample_``, adds noise in its steps."""
    return any(word in sampler for word in _NOISY)


_NOISY = ("ancestral", "sde", "ddpm", "lcm", "tcd", "seeds", "sa_solver", "sasolver", "s_churn")
