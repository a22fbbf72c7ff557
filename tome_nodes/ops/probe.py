"""Try several ways to do the same on the user's device, at the real shape, and take the fastest."""

import logging
from collections.abc import Callable, Mapping
from statistics import median
from typing import Protocol

import torch

from .autotune import Case, Probed
from .clock import Clock
from .reference import Ways

log = logging.getLogger("tome_nodes")

_WARM_UPS, _REPEATS = 3, 7

_LONGEST = 1.0
"""Seconds after which a case gets fewer repeats."""

_MARGIN = 1.1
"""How many times as fast as the default another way must be to take its place."""


class Store(Protocol):
    """Where choices are kept."""

    def read(self, device: torch.device, case: Case, default: str) -> Probed | None:
        """What was chosen before on this device with these versions, None if nothing was."""

    def keep(self, device: torch.device, case: Case, probed: Probed) -> None:
        """Keep what was chosen."""


class Probe:
    """Chooses from several ways to do the same by their time, once for each case."""

    def __init__(self, store: Store, clock_of: Callable[[torch.device], Clock] = Clock):
        self._store = store
        self._clock_of = clock_of
        self._known: dict[tuple[torch.device, Case, str], Probed] = {}
        self._has_failed = False

    def is_for(self, device: torch.device) -> bool:
        """Whether there is anything to choose on a device; on a CPU, what is fastest is known."""
        return device.type == "cuda"

    def choose(self, device: torch.device, case: Case, default: str, ways: Ways) -> Probed | None:
        """The fastest way of a case; None while a graph is captured, which cannot be timed.

        An error is no reason to fail: the default is taken then.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        place = device, case, default
        if place not in self._known:
            try:
                self._known[place] = self._chosen(device, case, default, ways())
            except Exception as error:
                self._known[place] = Probed(default, default, {})
                # It would come again with each case.
                if not self._has_failed:
                    log.warning(
                        "[ToMe] which way is the fastest here cannot be tried: %s: %s",
                        type(error).__name__,
                        error,
                    )
                self._has_failed = True
        return self._known[place]

    def _chosen(
        self,
        device: torch.device,
        case: Case,
        default: str,
        ways: Mapping[str, Callable[[], object]],
    ) -> Probed:
        if len(ways) < 2:
            return Probed(default, default, {})
        kept = self._store.read(device, case, default)
        if kept is not None and kept.way in ways:
            return kept
        errors: dict[str, Exception] = {}
        found = fastest(default, ways, self._clock_of(device), errors)
        # Next time, there may be room.
        has_room = not any(isinstance(error, torch.OutOfMemoryError) for error in errors.values())
        if has_room and all(seconds > 0 for seconds in found.seconds.values()):
            self._store.keep(device, case, found)
        return found


def fastest(
    default: str,
    ways: Mapping[str, Callable[[], object]],
    clock: Clock,
    errors: dict[str, Exception] | None = None,
) -> Probed:
    """The way that takes the least time; the default, unless another is clearly faster.

    The ways run in turn, three rounds to warm up and seven that count, or fewer where they take
    more than a second. A way that fails is left out.

    Args:
        default: the name of one of the ways.
        ways: by name.
        clock: that of the device.
        errors: gets those of ways that fail, by name.
    """
    errors = {} if errors is None else errors
    running = dict(ways)

    def rounds(count: int) -> list[dict[str, float]]:
        taken = [_round(running, clock, errors) for _ in range(count)]
        clock.wait()
        return [{name: clock.between(*moments) for name, moments in each.items()} for each in taken]

    rounds(1)
    taken = rounds(1)
    # Where even one round is long, it counts.
    enough = int(_LONGEST / max(sum(taken[0].values()), 1e-9))
    if enough > 0 and len(running) > 1:
        rounds(_WARM_UPS - 2)
        # In a run, the device has its work before it is free.
        clock.occupy()
        taken = rounds(min(_REPEATS, enough))
    seconds = {name: median(each[name] for each in taken) for name in running}
    if len(seconds) < 2:
        return Probed(next(iter(running), default), default, {})
    best = min(seconds, key=lambda name: seconds[name])
    is_clear = default not in seconds or seconds[best] * _MARGIN <= seconds[default]
    return Probed(best if is_clear else default, default, seconds)


def _round(
    ways: dict[str, Callable[[], object]], clock: Clock, errors: dict[str, Exception]
) -> dict[str, tuple[object, object]]:
    """When each way began and ended, one after the other; one that fails leaves ``ways``."""
    moments = {}
    for name, way in list(ways.items()):
        start = clock.now()
        try:
            way()
        except Exception as error:
            # Out of memory, or a kernel that does not compile: whoever takes it will say so.
            errors[name] = error
            del ways[name]
        else:
            moments[name] = start, clock.now()
    return moments
