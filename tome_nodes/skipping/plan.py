"""Which evaluations of a sampling run are whole, decided before any is shallow.

The others are shallow: only the outermost blocks of the UNet run, on the true noisy latent, and
what comes up from the others goes on from the last whole evaluations (DeepCache, arXiv 2312.00858).
All constants are from benchmarks/FIDELITY.md.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from math import comb, floor

FIRST = 2
"""So many evaluations at the start are always whole."""

FORMING = 3
"""So many are where the picture is still to be formed."""

LEAST = 4
"""The largest number of evaluations that are all whole at any ratio."""

LEAST_SNR = 0.0
"""Where the last step begins with less than this logarithm of signal to noise, and so paints most
of the picture, no evaluation of the run is shallow."""

BLANK = -9.0
"""Below this logarithm of signal to noise there is nothing of a picture yet. Only schedules that
end in zero terminal SNR begin there."""

BEGUN = -4.0
"""A run that begins above this logarithm of signal to noise has its picture from the start, as a
second pass has."""

COARSE = 1.5
"""A step is coarse where that logarithm grows by so many times the mean of the run in it. Under the
scheduler exponential, none is; under karras, only the last ones of a run from noise."""

FINISHED = 4.0
"""At this logarithm of signal to noise, a picture is all but finished. Where the last step begins
below it, it changes much of the picture, so it is whole. Of the steps before it, the last that
begins below this paints what is fine, if it is coarse or if the last step is so long: shallow, it
would leave grain of the noise that a sampler adds."""

LEAST_OF_THREE = 16
"""So many evaluations a run needs to have shallow ones where its sampler swings, see
:func:`swings`."""

_SHARE = 7 / 6
"""The share of the evaluations behind the fourth that is shallow, over the ratio."""


def whole_evaluations(
    ratio: float, levels: Sequence[float], is_grainy: bool = False
) -> frozenset[int]:
    """The whole ones of the evaluations of a run, from 0; the others are shallow.

    They are dense at first: each gap is longer than the one before, and by more each time. If the
    run has its picture from the start and its end is coarse, gaps are equal; if it begins with more
    picture than noise, from the second evaluation on. There are fewer whole ones as ``ratio``
    grows; at a ratio of 0, all evaluations are whole.

    Of the evaluations of one step, which have one level, the last are whole: from their answers,
    samplers make most of the step.

    In noise without a picture, below :data:`BLANK`, features hardly change, so most of the
    evaluations there are shallow before any other is.

    The step that paints what is fine, see :data:`FINISHED`, is whole besides if it would leave
    grain, unless it is the only shallow one.

    Args:
        ratio: the share of the tokens to merge, and of the evaluations to make shallow.
        levels: the logarithm of signal to noise of each evaluation.
        is_grainy: see :func:`leaves_grain`.
    """
    total = len(levels)
    if total <= LEAST:
        return frozenset(range(total))
    shallow = round(min(1.0, _SHARE * ratio) * (total - LEAST))
    blank = sum(level < BLANK for level in levels)
    of_blank = min(shallow, max(0, blank - FORMING))
    begin = {*range(blank)} - {*range(FORMING, FORMING + of_blank)}
    end = {total - 1} if levels[-1] < FINISHED and blank < total else set[int]()
    rest = total - blank - len(end)
    of_rest = min(shallow - of_blank, max(0, rest - LEAST + len(end)))
    is_even = levels[0] > BEGUN and _is_coarse(levels)
    first = FIRST if is_even and levels[0] > 0 else FORMING
    between = _spread(rest, of_rest, first, order=1 if is_even else 3)
    whole = begin | {blank + index for index in between} | end
    plan = frozenset({*range(FIRST), *_last_of_steps(whole, levels)})
    fine = plan | _last_that_paints(levels)
    return fine if is_grainy and len(fine) < total else plan


def _last_of_steps(whole: Collection[int], levels: Sequence[float]) -> Iterator[int]:
    """The last evaluations of each step, as many as are whole; those before the first are left."""
    for _, each in groupby(range(FIRST, len(levels)), levels.__getitem__):
        step = [*each]
        count = sum(index in whole for index in step)
        yield from step[len(step) - count :]


def _last_that_paints(levels: Sequence[float]) -> set[int]:
    """The last evaluation before the last step that paints what is fine, see :data:`FINISHED`."""
    limit = min(FINISHED, levels[-1])
    last = max((index for index, level in enumerate(levels) if level < limit), default=-1)
    is_long = levels[-1] < FINISHED or _is_coarse(levels, last + 1)
    return {last} if last >= 0 and is_long else set()


def _is_coarse(levels: Sequence[float], index: int = -1) -> bool:
    """Whether the step that ends where an evaluation begins is coarse, see :data:`COARSE`."""
    steps = sorted({*levels})
    end = steps.index(levels[index])
    if end == 0:
        return False
    return steps[end] - steps[end - 1] > COARSE * (steps[-1] - steps[0]) / (len(steps) - 1)


def _spread(total: int, shallow: int, first: int, order: int) -> Iterable[int]:
    """The others of ``total`` evaluations, from 0, so many of which are shallow.

    The first ones are whole. After them, gaps grow with their number to the power of ``order`` - 1.
    """
    whole = total - shallow

    def left_out(index: int) -> int:
        return comb(index + order - first, order) if index >= first else 0

    growth = shallow / comb(whole + order - first, order) if shallow else 0.0
    return (round(index + growth * left_out(index)) for index in range(whole))


def shortest(ratio: float) -> int:
    """The smallest number of evaluations of which some are shallow; ``ratio`` is above 0."""
    return LEAST + 1 + floor(0.5 / min(1.0, _SHARE * ratio))


def swings(sampler: str, levels: Sequence[float]) -> bool:
    """Whether a sampler adds noise and goes by its last three answers, with long steps at the end.

    Its results then swing in few steps. ``levels`` are those of the run, at least one.
    """
    return _THREE in sampler and bool(_last_that_paints(levels))


def adds_noise(sampler: str) -> bool:
    """Whether a sampler of this name, ComfyUI's without ``sample_``, adds noise in its steps."""
    return any(word in sampler for word in _NOISY)


def leaves_grain(sampler: str) -> bool:
    """Whether shallow steps leave grain of the noise that a sampler of this name adds.

    A sampler that goes by its last three answers does worse with a whole one among shallow ones.
    """
    return adds_noise(sampler) and _THREE not in sampler


_THREE = "3m_sde"
_NOISY = ("ancestral", "sde", "ddpm", "lcm", "tcd", "seeds", "sa_solver", "sasolver", "s_churn")
