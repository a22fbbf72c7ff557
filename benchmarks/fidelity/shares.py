"""Compare the rows of the fidelity results with each other. Standard library only.

Rows are the figures of every option by name, as ``results/fidelity.json`` has them for a judge and
a number of steps.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

STEPS, CACHE, FORECAST, SIZE = "fewer steps", "cache", "forecast", "lower resolution"
MERGED_STEPS = "fewer steps, merged"
MERGING, OURS = "merging", "ours"
KINDS = STEPS, MERGED_STEPS, CACHE, FORECAST, SIZE, MERGING, OURS
"""The kinds of options."""

TOMESD, TODO = "tomesd q,k,v 0.5", "ToDo k,v 0.75"
PAPER = "q,k,v 0.5, as the paper"
"""The names of the rows that others' methods have."""

Rows = Mapping[str, Mapping[str, Any]]
"""The figures of every option, by name."""
Point = tuple[float, float]
"""Time and error."""


def points(rows: Rows, kinds: Sequence[str] = KINDS) -> dict[str, Point]:
    """Time and error of the rows of these kinds, if they save time."""
    return {
        name: (row["time"], row["error"])
        for name, row in rows.items()
        if row["kind"] in kinds and row["time"] < 0.999 and row["error"] > 0
    }


def front(shown: Mapping[str, Point]) -> list[str]:
    """The names that no other point beats in both time and error, by time."""
    unbeaten: list[str] = []
    for name in sorted(shown, key=lambda name: shown[name]):
        if not unbeaten or shown[name][1] < shown[unbeaten[-1]][1]:
            unbeaten.append(name)
    return unbeaten


def error_at(time: float, rivals: Sequence[Point]) -> float | None:
    """The error of the best rivals at a time, on straight lines between them; None without rivals.

    At a time of 1, the plain run has no error. Below the shortest time, the error of the fastest
    rival counts.
    """
    shown = {str(index): point for index, point in enumerate(rivals)}
    unbeaten = [shown[name] for name in front(shown)]
    if not unbeaten:
        return None
    if time <= unbeaten[0][0]:
        return unbeaten[0][1]
    ends = [*unbeaten, (1.0, 0.0)]
    for (left, high), (right, low) in pairwise(ends):
        if time <= right:
            return high + (low - high) * (time - left) / (right - left)
    return None


def share(rows: Rows, name: str, kind: str) -> float | None:
    """The error of a row over that of the best rivals of a kind in the same time.

    None if the row saves no time, or without rivals.
    """
    own = points({name: rows[name]}) if name in rows else {}
    if name not in own:
        return None
    time, error = own[name]
    other = error_at(time, [*points(rows, (kind,)).values()])
    return error / other if other else None


def best_share(rows: Rows, kind: str) -> float | None:
    """The smallest :func:`share` of all our rows; None if there is none."""
    shares = [share(rows, name, kind) for name in points(rows, (OURS,))]
    return min((each for each in shares if each is not None), default=None)


def spread(errors: Sequence[float], others: Sequence[float]) -> str:
    """The median of errors over others that are not zero, and the least and the most."""
    ratios = [error / other for error, other in zip(errors, others, strict=True) if other]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
