"""Interleaved measurements."""

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def interleaved(
    runs: Mapping[Key, Callable[[], float]],
    repeats: int,
    after_round: Callable[[int], object] = lambda _: None,
) -> dict[Key, list[float]]:
    """Call all runs in turn, ``repeats`` times, so that noise affects all of them alike.

    Every other round is reversed, so that a steady drift affects all of them alike too.
    ``after_round`` is called with the number of rounds so far; if it returns True, no more follow.
    """
    results: dict[Key, list[float]] = {name: [] for name in runs}
    for done in range(repeats):
        for name in list(runs)[:: -1 if done % 2 else 1]:
            results[name].append(runs[name]())
        if after_round(done + 1) is True:
            break
    return results
