"""Which settings to try next, and which of those tried to take: a search on figures alone.

A ladder is a preset at rising ratios: each rung is faster than the one below it and changes the
picture more. So halving the range finds the rung at which a wish begins to hold, or ceases to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SPEED, LIKENESS = "speed", "likeness"

FASTER = 1.03
"""Times as fast as the unpatched model from which settings count as faster, not as noise."""

ALIKE = 1.05
"""Two changes that differ by less than this factor count as equal; speeds, by :data:`FASTER`."""

# For a higher speed, merging in attention alone is rarely enough in a picture.
_MODEST = 1.25


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
        """The options that it sets, by name."""
        return {"preset": self.preset, "ratio": self.ratio}

    def __str__(self) -> str:
        return f"{self.preset}, ratio {self.ratio:.2f}"


Ladder = Sequence[Candidate]
Figures = Mapping[Candidate, "Measured"]
"""What is known of the settings that were tried."""

# Neither quality, whose points balanced has too (benchmarks/FIDELITY.md), nor paper.
BALANCED: Ladder = [Candidate("balanced", ratio) for ratio in (0.3, 0.45, 0.6, 0.75, 0.85)]
FAST: Ladder = [Candidate("fast", ratio) for ratio in (0.3, 0.4, 0.5, 0.6, 0.7)]
LADDERS = (BALANCED, FAST)

UNPATCHED = Candidate("balanced", 0.0)
"""Settings that merge nothing."""


@dataclass(frozen=True)
class Measured:
    """What a trial of some settings found.

    Attributes:
        seconds: of a run with them, over the steps of the unpatched run.
        unpatched: the same without them.
        change: the root mean square of what they change in the latent at the end, in standard
            deviations of the unpatched one.
        obstacle: why nothing merged, or the error of the trial; None if there is neither.
        has_failed: whether it is an error, which need not happen again.
    """

    seconds: float
    unpatched: float
    change: float
    obstacle: str | None = None
    has_failed: bool = False

    @property
    def speed(self) -> float:
        """Times as fast as the unpatched model."""
        return self.unpatched / self.seconds

    @property
    def is_faster(self) -> bool:
        """Whether it gains more than noise."""
        return self.obstacle is None and self.speed >= FASTER

    def beats(self, other: "Measured") -> bool:
        """Whether it is as fast as another, and changes no more."""
        is_as_fast = self.is_faster and FASTER * self.speed >= other.speed
        return is_as_fast and self.change <= other.change


@dataclass(frozen=True)
class Wish:
    """What settings should do.

    Attributes:
        goal: :data:`SPEED`, for the least change at a speed; :data:`LIKENESS`, for the highest
            speed at a change.
        amount: the speed, 1 being that of the unpatched model, or the change.
    """

    goal: str
    amount: float

    @property
    def needs_nothing(self) -> bool:
        """Whether the unpatched model fulfils it best."""
        return self.amount <= (1.0 if self.goal == SPEED else 0.0)

    def holds(self, measured: Measured) -> bool:
        """Whether some settings fulfil it."""
        if self.goal == SPEED:
            return measured.is_faster and measured.speed >= self.amount
        return measured.is_faster and measured.change <= self.amount

    def is_passed(self, measured: Measured) -> bool:
        """Whether settings are beyond what was asked for, and so are those of higher ratios.

        That is, they are fast enough, or change too much.
        """
        if self.goal == SPEED:
            return measured.speed >= max(self.amount, FASTER)
        return measured.change > self.amount

    def best(self, figures: Figures) -> Candidate | None:
        """The settings that fulfil it best, None if none do; of equal ones, the gentler."""
        fulfil = {each: measured for each, measured in figures.items() if self.holds(measured)}
        if self.goal == LIKENESS:
            return _fastest(fulfil)
        least = min((measured.change for measured in fulfil.values()), default=0.0)
        equal = [each for each, found in fulfil.items() if found.change <= ALIKE * least]
        return min(equal, key=_gentleness, default=None)


def _fastest(figures: Figures) -> Candidate | None:
    """The fastest of some settings; of equal ones, the one that changes least."""
    most = max((measured.speed for measured in figures.values()), default=0.0)
    equal = [each for each, measured in figures.items() if FASTER * measured.speed >= most]
    return min(equal, key=lambda each: (figures[each].change, *_gentleness(each)), default=None)


def _gentleness(candidate: Candidate) -> tuple[bool, float]:
    return candidate.preset == FAST[0].preset, candidate.ratio


def choose(wish: Wish, figures: Figures) -> Candidate | None:
    """The settings to take, of those tried; None for the unpatched model.

    Where none is fast enough, the fastest. Where none that is faster than the unpatched model
    changes as little as wished for, that model.
    """
    if wish.needs_nothing:
        return None
    best = wish.best(figures)
    # Who asks for likeness prefers a slower run to a larger change.
    if best is not None or wish.goal == LIKENESS:
        return best
    return _fastest({each: measured for each, measured in figures.items() if measured.is_faster})


def next_candidate(wish: Wish, figures: Figures, ladders: Sequence[Ladder]) -> Candidate | None:
    """The settings to try next, None if the best that fulfil a wish are known."""
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
                # The rung most likely to show that this ladder has nothing better.
                return ladder[low if wish.goal == SPEED else high - 1]
            return ladder[(low + high) // 2]
    return None


def _is_beaten(
    wish: Wish, known: Mapping[int, Measured], low: int, high: int, bound: Measured
) -> bool:
    """Whether no rung from ``low`` to ``high`` can be better than what fulfils the wish already."""
    if wish.goal == SPEED:
        # All of them change more than any rung below.
        return any(measured.change >= bound.change for i, measured in known.items() if i < low)
    return any(measured.speed <= bound.speed for i, measured in known.items() if i >= high)


def find(
    wish: Wish,
    figures: Figures,
    ladders: Sequence[Ladder],
    trial: Callable[[Candidate], Measured],
) -> dict[Candidate, Measured]:
    """Try settings until the best that fulfil a wish are known.

    Args:
        wish: what they should do.
        figures: what is known already.
        ladders: settings that may be tried.
        trial: measures some settings.

    Returns:
        What is known then.
    """
    known = dict(figures)
    while (candidate := next_candidate(wish, known, ladders)) is not None:
        known[candidate] = trial(candidate)
    return known
