"""A few combinations of values in which each pair of values occurs."""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Axes = Mapping[str, Sequence[Hashable]]
"""The values of each axis."""


def cover(axes: Axes, apart: Collection[str] = ()) -> list[dict[str, Any]]:
    """Combinations with one value of each axis, in which each pair of values of two axes occurs.

    Each combination begins with a missing pair, from the two axes with most missing pairs. Each
    further axis gets the value that adds most pairs; of equal ones, the value used least.

    Args:
        axes: at least two, without duplicate values.
        apart: axes whose pairs with each other need not occur.
    """
    missing = {
        (one, other): dict.fromkeys(product(axes[one], axes[other]))
        for one, other in combinations(axes, 2)
        if not (one in apart and other in apart)
    }
    used: Counter[tuple[str, Hashable]] = Counter()
    rows = []
    while any(missing.values()):
        one, other = max(missing, key=lambda pair: len(missing[pair]))
        row = dict(zip((one, other), next(iter(missing[one, other])), strict=True))
        for axis in (name for name in axes if name not in row):
            gains = [
                (_gain(row | {axis: value}, axis, missing), -used[axis, value])
                for value in axes[axis]
            ]
            row[axis] = axes[axis][gains.index(max(gains))]
        for pair, values in missing.items():
            values.pop((row[pair[0]], row[pair[1]]), None)
        used.update(row.items())
        rows.append({axis: row[axis] for axis in axes})
    return rows


def _gain(row: Mapping[str, Hashable], axis: str, missing: Mapping[tuple[str, str], Any]) -> int:
    """How many missing pairs a combination has with its value of an axis."""
    return sum(
        (row[one], row[other]) in values
        for (one, other), values in missing.items()
        if axis in (one, other) and one in row and other in row
    )
