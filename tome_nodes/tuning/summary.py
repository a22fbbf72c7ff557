"""What ToMe Tune found, in words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil

from .search import FASTER, LIKENESS, SPEED, Candidate, Figures, Measured, Wish, choose

HINT = (
    "Hint: in a UNet, merging gains more in a larger picture or in the second pass of a hires "
    "workflow; in a transformer, more steps leave more to forecast."
)


@dataclass(frozen=True)
class Found:
    """The result of a search for settings.

    Attributes:
        wish: what the settings should do.
        figures: what was measured, by the settings that were tried.
        instead: what was measured of alternatives to merging, by name; empty if the wish was for
            likeness and nothing fulfils it.
        runs: how many sampling runs the trials took; 0 if there were none.
        date: the day of the measurements, if there were no trials now; else empty.
        obstacle: why nothing was tried, None if something could be.
    """

    wish: Wish
    figures: Figures = field(default_factory=dict)
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
        """What was measured of :attr:`candidate`, None for the unpatched model."""
        return None if self.candidate is None else self.figures[self.candidate]


def in_words(found: Found) -> list[str]:
    """What was found, line by line: first the result, then what was tried."""
    lines = [*result(found)]
    lines += [f"Instead {_figures(name, measured)}" for name, measured in found.instead.items()]
    in_order = sorted(found.figures, key=lambda each: (each.preset, each.ratio))
    lines += [f"Tried {_line(candidate, found.figures)}" for candidate in in_order]
    if found.runs:
        lines.append(f"Trials: as long as {found.runs:.1f} sampling runs")
    elif found.date:
        lines.append(f"No trials: measured on {found.date}; set measure_again to measure anew")
    return lines


def result(found: Found) -> Iterator[str]:
    """The settings to take and what they do, or why there are none."""
    wish, figures, candidate = found.wish, found.figures, found.candidate
    if found.obstacle is not None:
        yield f"Unpatched: {found.obstacle}."
    elif wish.needs_nothing:
        yield f"Unpatched: {_wished(wish)} is what the model has without merging."
    elif candidate is not None and wish.holds(figures[candidate]):
        yield f"Found: {_line(candidate, figures)}."
    elif candidate is not None:
        yield f"Not reached: nothing tried is {_wished(wish)}."
        yield f"Taken: {_line(candidate, figures)}."
    elif any(measured.is_faster for measured in figures.values()):
        gentlest = min(
            (each for each in figures if figures[each].is_faster),
            key=lambda each: figures[each].change,
        )
        yield f"Unpatched: nothing that is faster has {_wished(wish)}."
        yield f"Nearest: {_line(gentlest, figures)}."
        # Rounded up to the step of the input.
        allowed = ceil(100 * figures[gentlest].change) / 100
        yield f"Hint: set change to {allowed:.2f} to take it."
    else:
        yield f"Unpatched: nothing is faster here. {_why_not(figures)}"
        if all(measured.obstacle is None for measured in figures.values()):
            yield HINT
    yield from _better(found)


def _better(found: Found) -> Iterator[str]:
    """Which alternative to take instead of the settings found, if one is better.

    If no settings were found, it is one that fulfils the wish.
    """
    wish, measured, instead = found.wish, found.measured, found.instead
    if measured is None:
        fulfil = {name: each for name, each in instead.items() if wish.holds(each)}
        if fulfil:
            least = min(fulfil, key=lambda name: fulfil[name].change)
            yield f"Hint: take {least} instead, which is at least {_wished(wish)}."
        return
    if wish.goal == LIKENESS:
        enough = FASTER * measured.speed
        faster = {
            name: each for name, each in instead.items() if wish.holds(each) and each.speed > enough
        }
        if faster:
            fastest = max(faster, key=lambda name: faster[name].speed)
            yield f"Hint: take {fastest} instead, which is faster and has {_wished(wish)}."
            return
    better = {name: each for name, each in instead.items() if each.beats(measured)}
    if better:
        least = min(better, key=lambda name: better[name].change)
        yield f"Hint: take {least} instead, which is as fast and changes less."
    elif instead:
        yield "Nothing else that was tried is as fast and changes less."


def _why_not(figures: Figures) -> str:
    for measured in figures.values():
        if measured.obstacle is not None:
            return f"{_outcome(measured).capitalize()}: {measured.obstacle}."
    fastest = max(figures, key=lambda each: figures[each].speed, default=None)
    return "Nothing was tried." if fastest is None else f"Best: {_line(fastest, figures)}."


def _wished(wish: Wish) -> str:
    if wish.goal == SPEED:
        return f"{wish.amount:.2f} times as fast"
    return f"a change of {wish.amount:.3f} or less"


def _line(candidate: Candidate, figures: Figures) -> str:
    return _figures(str(candidate), figures[candidate])


def _figures(name: str, measured: Measured) -> str:
    if measured.obstacle is not None:
        return f"{name}: {_outcome(measured)}"
    return f"{name}: {measured.speed:.2f} times as fast, change {measured.change:.3f}"


def _outcome(measured: Measured) -> str:
    return "trial failed" if measured.has_failed else "nothing merged"
