"""Which settings to try, and which of all that was tried fulfils a wish best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

SPEED, LIKENESS = "speed", "likeness"

FASTER = 1.03
"""Settings count as faster if they are at least this many times as fast as the unpatched model.

Less is noise: two speeds that differ by less than this factor count as equal.
"""


@dataclass(frozen=True)
class Candidate:
    """Settings to try.

    Attributes:
        preset: one of :data:`tome_nodes.settings.presets.PRESETS`.
        ratio: the share of the tokens to merge, or of the steps to forecast.
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
"""A preset at rising ratios: each is faster than the one before, and changes more."""

BALANCED: Ladder = [Candidate("balanced", ratio) for ratio in (0.3, 0.6, 0.85)]
FAST: Ladder = [Candidate("fast", ratio) for ratio in (0.3, 0.5, 0.7)]

UNPATCHED = Candidate("balanced", 0.0)
"""Settings that do nothing."""


@dataclass(frozen=True)
class Measured:
    """What a trial measured.

    Attributes:
        seconds: the time of the trial's run, divided by the steps of the unpatched run.
        unpatched: the time of the unpatched run, divided by its steps.
        change: the root mean square difference between the final latents of the two runs, in
            standard deviations of the unpatched one.
        obstacle: what did not happen and why, such as ``nothing merged: too few tokens``, or the
            error of the trial; None if there is neither.
        done: what was merged or skipped, in words; empty for a run without ToMe.

    Raises:
        ValueError: a number is not finite, or a time is not positive.
    """

    seconds: float
    unpatched: float
    change: float
    obstacle: str | None = None
    done: str = ""

    def __post_init__(self) -> None:
        numbers = self.seconds, self.unpatched, self.change
        if not all(map(isfinite, numbers)) or min(self.seconds, self.unpatched) <= 0:
            raise ValueError(f"times must be positive and all figures finite; got {numbers}")

    @property
    def speed(self) -> float:
        """How many times as fast as the unpatched model it is."""
        return self.unpatched / self.seconds

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than the unpatched model by more than noise."""
        return self.obstacle is None and self.speed >= FASTER


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
        is_enough = (
            measured.speed >= self.amount if self.goal == SPEED else measured.change <= self.amount
        )
        return measured.is_faster and is_enough


_Name = TypeVar("_Name")


def choose(wish: Wish, figures: Mapping[_Name, Measured]) -> _Name | None:
    """The best of everything that was tried, the first of equals; None for the unpatched model.

    If nothing fulfils a wish for speed, the best is the fastest that is faster than the unpatched
    model. If nothing fulfils a wish for likeness, it is the unpatched model: a slower run is better
    than a larger change.
    """
    faster = {name: measured for name, measured in figures.items() if measured.is_faster}
    best = {name: measured for name, measured in faster.items() if wish.holds(measured)}
    if wish.goal == LIKENESS or not best:
        others = best if wish.goal == LIKENESS else faster
        most = max((measured.speed for measured in others.values()), default=0.0)
        best = {
            name: measured for name, measured in others.items() if FASTER * measured.speed >= most
        }
    return min(best, key=lambda name: best[name].change, default=None)
