"""Decide which settings to try next, and which of those tried to take, from figures alone.

A ladder is a preset at rising ratios: each rung is faster than the one below it and changes the
picture more. So bisection finds the rung from which, or up to which, a wish is fulfilled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SPEED, LIKENESS = "speed", "likeness"

FASTER = 1.03
"""Settings at least this many times as fast as the unpatched model are faster; less is noise.

Two speeds that differ by less than this factor count as equal.
"""

ALIKE = 1.05
"""Two changes that differ by less than this factor count as equal."""

_MODEST = 1.25
"""The highest speed that merging in attention alone usually reaches in a picture."""


@dataclass(frozen=True)
class Candidate:
    """Settings to try.

    Attributes:
        preset: one of :data:`tome_nodes.settings.presets.PRESETS`.
        ratio: the share of the tokens to merge.
    """

    preset: str
    ratio: float

    @property
    def settings(self) -> dict[str, Any]:
        """These settings as inputs of the node, by name."""
        return {"preset": self.preset, "ratio": self.ratio}

    def __str__(self) -> str:
        return f"{self.preset}, ratio {self.ratio:.2f}"


Ladder = Sequence[Candidate]
Figures = Mapping[Candidate, "Measured"]
"""What was measured, by the settings that were tried."""

BALANCED: Ladder = [Candidate("balanced", ratio) for ratio in (0.3, 0.45, 0.6, 0.75, 0.85)]
FAST: Ladder = [Candidate("fast", ratio) for ratio in (0.3, 0.4, 0.5, 0.6, 0.7)]

UNPATCHED = Candidate("balanced", 0.0)
"""Settings that merge nothing."""


@dataclass(frozen=True)
class Measured:
    """What a trial of some settings found.

    Attributes:
        seconds: the time of a run with the settings, divided by the steps of the unpatched run.
        unpatched: the time of the unpatched run, divided by its steps.
        change: the root mean square difference between the final latents of the two runs, in
            standard deviations of the unpatched one.
        obstacle: why nothing merged, or the error of the trial; None if there is neither.
        has_failed: whether the obstacle is an error, which another trial may not have.
    """

    seconds: float
    unpatched: float
    change: float
    obstacle: str | None = None
    has_failed: bool = False

    @property
    def speed(self) -> float:
        """How many times as fast as the unpatched model it is."""
        return self.unpatched / self.seconds

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than the unpatched model by more than noise."""
        return self.obstacle is None and self.speed >= FASTER

    def beats(self, other: "Measured") -> bool:
        """Whether it is about as fast as another, or faster, and changes the picture no more."""
        is_as_fast = self.is_faster and FASTER * self.speed >= other.speed
        return is_as_fast and self.change <= other.change


@dataclass(frozen=True)
class Wish:
    """What settings should do.

    Attributes:
        goal: :data:`SPEED` for the least change at a speed of at least ``amount``;
            :data:`LIKENESS` for the highest speed at a change of at most ``amount``.
        amount: a speed or a change, as in :class:`Measured`.
    """

    goal: str
    amount: float

    @property
    def needs_nothing(self) -> bool:
        """Whether the unpatched model fulfils the wish best."""
        return self.amount <= (1.0 if self.goal == SPEED else 0.0)

    def holds(self, measured: Measured) -> bool:
        """Whether settings with these figures fulfil the wish."""
        if self.goal == SPEED:
            return measured.is_faster and measured.speed >= self.amount
        return measured.is_faster and measured.change <= self.amount

    def is_passed(self, measured: Measured) -> bool:
        """Whether higher ratios are no better, as this one is fast enough or changes too much."""
        if self.goal == SPEED:
            return measured.speed >= max(self.amount, FASTER)
        return measured.change > self.amount

    def best(self, figures: Figures) -> Candidate | None:
        """The settings that fulfil the wish best, None if none do; of equal ones, the gentlest."""
        fulfil = {each: measured for each, measured in figures.items() if self.holds(measured)}
        if self.goal == LIKENESS:
            return _fastest(fulfil)
        least = min((measured.change for measured in fulfil.values()), default=0.0)
        equal = [each for each, found in fulfil.items() if found.change <= ALIKE * least]
        return min(equal, key=_gentleness, default=None)


def _fastest(figures: Figures) -> Candidate | None:
    """The fastest settings; of equally fast ones, those that change least."""
    most = max((measured.speed for measured in figures.values()), default=0.0)
    equal = [each for each, measured in figures.items() if FASTER * measured.speed >= most]
    return min(equal, key=lambda each: (figures[each].change, *_gentleness(each)), default=None)


def _gentleness(candidate: Candidate) -> tuple[bool, float]:
    return candidate.preset == FAST[0].preset, candidate.ratio


def choose(wish: Wish, figures: Figures) -> Candidate | None:
    """The settings to take, of those tried; None for the unpatched model.

    If none fulfil a wish for speed, take the fastest of those faster than the unpatched model. If
    none fulfil a wish for likeness, take that model: a slower run is better than a larger change.
    """
    if wish.needs_nothing:
        return None
    best = wish.best(figures)
    if best is not None or wish.goal == LIKENESS:
        return best
    return _fastest({each: measured for each, measured in figures.items() if measured.is_faster})


def next_candidate(wish: Wish, figures: Figures, ladders: Sequence[Ladder]) -> Candidate | None:
    """The settings to try next, None if those that fulfil a wish best are known."""
    if wish.needs_nothing:
        return None
    best = wish.best(figures)
    bound = None if best is None else figures[best]
    first = FAST if wish.goal == SPEED and wish.amount > _MODEST else BALANCED
    for ladder in sorted(ladders, key=lambda ladder: ladder is not first):
        known = {i: figures[each] for i, each in enumerate(ladder) if each in figures}
        if any(measured.obstacle is not None for measured in known.values()):
            continue
        passed = [i for i, measured in known.items() if wish.is_passed(measured)]
        low = max((i + 1 for i in known if i not in passed), default=0)
        high = min(passed, default=len(ladder))
        if low < high and not (bound is not None and _is_beaten(wish, known, low, high, bound)):
            if bound is not None and not known:
                # Other settings fulfil the wish already. This is the rung most likely to show that
                # this ladder has nothing better.
                return ladder[low if wish.goal == SPEED else high - 1]
            return ladder[(low + high) // 2]
    return None


def _is_beaten(
    wish: Wish, known: Mapping[int, Measured], low: int, high: int, bound: Measured
) -> bool:
    """Whether no rung from ``low`` to below ``high`` can be better than ``bound``, which holds.

    A rung changes more than any below it, and is slower than any above it. ``known`` is what was
    measured, by rung.
    """
    if wish.goal == SPEED:
        return any(measured.change >= bound.change for i, measured in known.items() if i < low)
    return any(measured.speed <= bound.speed for i, measured in known.items() if i >= high)


def find(
    wish: Wish,
    figures: Figures,
    ladders: Sequence[Ladder],
    trial: Callable[[Candidate], Measured],
) -> dict[Candidate, Measured]:
    """Try settings until those that fulfil a wish best are known.

    Args:
        wish: what the settings should do.
        figures: what was measured before.
        ladders: the settings that may be tried.
        trial: measures some settings.

    Returns:
        ``figures`` and what was measured now.
    """
    known = dict(figures)
    while (candidate := next_candidate(wish, known, ladders)) is not None:
        known[candidate] = trial(candidate)
    return known
