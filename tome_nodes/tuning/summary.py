"""What ToMe Tune found, in words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil

from .search import SPEED, Candidate, Measured, Wish, choose

HINT = (
    "Hint: in a UNet, merging gains more in a larger picture or in the second pass of a hires "
    "workflow; in a transformer, more steps leave more to forecast."
)


@dataclass(frozen=True)
class Found:
    """What was tried for a wish.

    Attributes:
        wish: what the settings should do.
        figures: what was measured, by settings.
        instead: the same for other ways to save time, by name.
        runs: how many sampling runs the trials took; 0 if there were none.
        date: the day of the measurements, if there were no trials now; else empty.
        obstacle: why nothing was tried, None if something could be.
    """

    wish: Wish
    figures: Mapping[Candidate, Measured] = field(default_factory=dict)
    instead: Mapping[str, Measured] = field(default_factory=dict)
    runs: float = 0.0
    date: str = ""
    obstacle: str | None = None

    @property
    def candidate(self) -> Candidate | None:
        """The settings to take, None for the unpatched model."""
        return choose(self.wish, self.figures)

    @property
    def measured(self) -> Measured | None:
        """What was measured with :attr:`candidate`; None for the unpatched model."""
        return None if self.candidate is None else self.figures[self.candidate]

    @property
    def tried(self) -> dict[str, Measured]:
        """All that was measured, by name."""
        by_name = {str(candidate): measured for candidate, measured in self.figures.items()}
        return {**by_name, **self.instead}


def in_words(findings: Found) -> list[str]:
    """What was found, line by line: first the result, then what was tried."""
    lines = [*result(findings)]
    lines += [f"Tried {_line(name, measured)}" for name, measured in findings.tried.items()]
    if findings.runs:
        lines.append(f"Trials: as long as {findings.runs:.1f} sampling runs")
    elif findings.date:
        lines.append(f"No trials: measured on {findings.date}; set measure_again to measure anew")
    return lines


def result(findings: Found) -> Iterator[str]:
    """What came out, whether it helps, and what to do next."""
    wish, taken, measured = findings.wish, findings.candidate, findings.measured
    if findings.obstacle is not None:
        yield f"Unpatched: {findings.obstacle}."
        return
    if wish.needs_nothing:
        yield f"Unpatched: {_wished(wish)} is what the model has without ToMe."
        return
    hint = None
    if taken is None or measured is None:
        what, hint = _unpatched(findings)
        yield f"Unpatched: {what}."
    elif wish.holds(measured):
        yield f"Found: {_line(str(taken), measured)}."
    else:
        yield f"Not reached: nothing tried is {_wished(wish)}."
        yield f"Taken: {_line(str(taken), measured)}."
    best = choose(wish, findings.tried)
    if best is not None and best in findings.instead:
        yield f"Hint: instead, take {_line(best, findings.instead[best])}."
    elif hint is not None:
        yield hint
    elif taken is not None and findings.instead:
        yield "Nothing else that was tried does better."


def _unpatched(findings: Found) -> tuple[str, str | None]:
    """Why the model stays as it is, and a hint."""
    faster = {
        candidate: measured
        for candidate, measured in findings.figures.items()
        if measured.is_faster
    }
    if faster:
        nearest = min(faster, key=lambda candidate: faster[candidate].change)
        # Rounded up to the step of the input.
        allowed = ceil(100 * faster[nearest].change) / 100
        hint = f"Hint: set change to {allowed:.2f} to take {_line(str(nearest), faster[nearest])}."
        return f"nothing that is faster has {_wished(findings.wish)}", hint
    # The highest ratio of the preset that saves most has least in its way.
    for measured in reversed([*findings.figures.values()]):
        if measured.obstacle is not None:
            return measured.obstacle, None
    return "nothing is faster here", HINT


def _wished(wish: Wish) -> str:
    if wish.goal == SPEED:
        return f"{wish.amount:.2f} times as fast"
    return f"a change of {wish.amount:.3f} or less"


def _line(name: str, measured: Measured) -> str:
    if measured.obstacle is not None:
        return f"{name}: {measured.obstacle}"
    done = f" ({measured.done})" if measured.done else ""
    return f"{name}: {measured.speed:.2f} times as fast, change {measured.change:.3f}{done}"
