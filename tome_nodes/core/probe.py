"""Try several ways to do the same on the user's device, at the real shape, and take the fastest."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch

from ..ops.choosing import Case, Probed, Ways
from .clock import Clock

_WARM_UPS, _REPEATS = 3, 7

_LONGEST = 1.0
"""Seconds after which a case gets fewer repeats."""

_MARGIN = 1.1
"""How many times as fast as the default another way must be to take its place."""


class Store(Protocol):
    """Where choices are kept."""

    def read(self, device: torch.device, case: Case, default: str) -> Probed | None:
        """What was chosen before on this device with these versions, None if nothing was."""

    def keep(self, device: torch.device, case: Case, choice: Probed) -> None:
        """Keep what was chosen."""


class Probe:
    """Chooses from several ways to do the same by their time, once for each case."""

    def __init__(self, store: Store, clock_of: Callable[[torch.device], Clock] = Clock):
        self._store = store
        self._clock_of = clock_of

    def is_for(self, device: torch.device) -> bool:
        """Whether there is anything to choose on a device; on a CPU, what is fastest is known."""
        return device.type == "cuda"

    def choose(self, device: torch.device, case: Case, default: str, ways: Ways) -> Probed | None:
        """The fastest way of a case; None while a graph is captured, which cannot be timed.

        What could not be tried for want of memory is not kept.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        offered = ways()
        known = self._store.read(device, case, default)
        if known is not None and known.way in offered:
            return known
        choice = fastest(default, offered, self._clock_of(device))
        if choice.seconds.keys() == offered.keys():
            self._store.keep(device, case, choice)
        return choice


def fastest(default: str, ways: Mapping[str, Callable[[], object]], clock: Clock) -> Probed:
    """The way that takes the least time; the default, unless another is clearly faster.

    The ways run in turn, three rounds to warm up and seven that count, or fewer where they would
    take more than a second. A way that fails is left out.

    Args:
        default: the name of one of the ways.
        ways: by name.
        clock: that of the device.
    """
    running: dict[str, Callable[[], object]] = {}
    for name, way in ways.items():
        try:
            way()
        except Exception:
            # Out of memory, or a kernel that does not compile: whoever takes it will say so.
            continue
        running[name] = way
    if len(running) < 2:
        return Probed(next(iter(running), default), default, {})
    clock.wait()
    warm = _round(running, clock)
    rounds = min(_REPEATS, max(1, int(_LONGEST / max(sum(warm.values()), 1e-9))))
    for _ in range(_WARM_UPS - 2 if rounds == _REPEATS else 0):
        _round(running, clock)
    times = [_round(running, clock) for _ in range(rounds)]
    seconds = {name: median(each[name] for each in times) for name in running}
    best = min(seconds, key=lambda name: seconds[name])
    is_clear = default not in seconds or seconds[best] * _MARGIN <= seconds[default]
    return Probed(best if is_clear else default, default, seconds)


def _round(ways: Mapping[str, Callable[[], object]], clock: Clock) -> dict[str, float]:
    """Seconds of each way, one after the other."""
    moments = [clock.now()]
    for way in ways.values():
        way()
        moments.append(clock.now())
    clock.wait()
    times = (clock.between(*pair) for pair in pairwise(moments))
    return dict(zip(ways, times, strict=True))
