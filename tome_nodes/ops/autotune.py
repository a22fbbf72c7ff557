"""Try several implementations of an operation on the user's device, and take the fastest.

All compute the same: which tokens merge depends on the settings alone.
"""

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from . import TORCH, Operation, Operations
from .clock import Clock

log = logging.getLogger("tome_nodes")

_WARM_UPS, _REPEATS = 3, 7

_LONGEST = 1.0
"""The most seconds that all repeats together may take; there are fewer repeats if need be."""

_MARGIN = 1.1
"""How many times as fast as the default a variant must be to take its place."""

Call = tuple[Hashable, ...]
"""An operation and everything that its time depends on: names, numbers, shapes of tensors."""

Case = tuple[Hashable, ...]
"""Calls that take about the same time, described by names and whole numbers."""

Variants = Callable[[], Mapping[str, Callable[[], object]]]
"""Returns the variants of a call by name: functions that each carry out the call once."""


@dataclass(frozen=True)
class Choice:
    """The variant that was chosen, by time, for a case.

    Attributes:
        variant: its name.
        default: the name of the variant that is used where nothing is measured.
        seconds: the time of each variant that ran, by name.
    """

    variant: str
    default: str
    seconds: Mapping[str, float]


class Store(Protocol):
    """Where choices are kept."""

    def read(self, device: torch.device, case: Case, default: str) -> Choice | None:
        """The earlier choice on this device with these versions; None if there is none."""

    def keep(self, device: torch.device, case: Case, choice: Choice) -> None:
        """Store a choice."""


class Autotune:
    """Chooses the fastest variants, once for each case in a process, and stores its choices."""

    def __init__(self, store: Store, clock_of: Callable[[torch.device], Clock] = Clock):
        self._store = store
        self._clock_of = clock_of
        self._known: dict[tuple[torch.device, Case, str], Choice] = {}
        self._has_failed = False

    def is_for(self, device: torch.device) -> bool:
        """Whether there is anything to choose on a device; on a CPU, the defaults are fastest."""
        return device.type == "cuda"

    def choose(
        self, device: torch.device, case: Case, default: str, variants: Variants
    ) -> Choice | None:
        """The fastest variant of a case, or the default after an error.

        None while a CUDA graph is captured, since nothing can be timed then.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        place = device, case, default
        if place not in self._known:
            try:
                self._known[place] = self._chosen(device, case, default, variants())
            except Exception as error:
                self._known[place] = Choice(default, default, {})
                # Other cases would probably fail in the same way, so one warning is enough.
                if not self._has_failed:
                    log.warning(
                        "[ToMe] what is fastest here could not be measured, so defaults are used: "
                        "%s: %s",
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
        variants: Mapping[str, Callable[[], object]],
    ) -> Choice:
        if len(variants) < 2:
            return Choice(default, default, {})
        kept = self._store.read(device, case, default)
        if kept is not None and kept.variant in variants:
            return kept
        errors: dict[str, Exception] = {}
        found = fastest(default, variants, self._clock_of(device), errors)
        # If memory ran out, the next process may have enough and choose differently.
        has_room = not any(isinstance(error, torch.OutOfMemoryError) for error in errors.values())
        if has_room and all(seconds > 0 for seconds in found.seconds.values()):
            self._store.keep(device, case, found)
        return found


def fastest(
    default: str,
    variants: Mapping[str, Callable[[], object]],
    clock: Clock,
    errors: dict[str, Exception] | None = None,
) -> Choice:
    """The fastest variant if it is clearly faster than the default, else the default.

    The variants take turns: three rounds to warm up, then seven rounds that count, or fewer if
    seven would take more than a second. A variant that fails is left out.

    Args:
        default: the name of one of the variants.
        variants: by name.
        clock: measures time on the device.
        errors: receives the errors of the variants that fail, by name.
    """
    errors = {} if errors is None else errors
    running = dict(variants)

    def rounds(count: int) -> list[dict[str, float]]:
        taken = [_round(running, clock, errors) for _ in range(count)]
        clock.wait()
        return [{name: clock.between(*moments) for name, moments in each.items()} for each in taken]

    rounds(1)
    taken = rounds(1)
    # If a single round takes more than a second, the second one counts.
    enough = int(_LONGEST / max(sum(taken[0].values()), 1e-9))
    if enough > 0 and len(running) > 1:
        rounds(_WARM_UPS - 2)
        # In a sampling run, too, work is queued before the device is free for it.
        clock.occupy()
        taken = rounds(min(_REPEATS, enough))
    seconds = {name: median(each[name] for each in taken) for name in running}
    if len(seconds) < 2:
        return Choice(next(iter(running), default), default, {})
    best = min(seconds, key=lambda name: seconds[name])
    is_clear = default not in seconds or seconds[best] * _MARGIN <= seconds[default]
    return Choice(best if is_clear else default, default, seconds)


def _round(
    variants: dict[str, Callable[[], object]], clock: Clock, errors: dict[str, Exception]
) -> dict[str, tuple[object, object]]:
    """Run the variants in turn and return when each began and ended.

    A variant that fails is removed from ``variants``, and its error goes into ``errors``.
    """
    moments = {}
    for name, variant in list(variants.items()):
        start = clock.now()
        try:
            variant()
        except Exception as error:
            # Such as out of memory, or a kernel that does not compile. If the variant is used
            # nevertheless, it raises the error again.
            errors[name] = error
            del variants[name]
        else:
            moments[name] = start, clock.now()
    return moments


class Tuner:
    """The variants chosen for one model; under torch.compile, the defaults.

    Attributes:
        choices: the choices so far, by case.
    """

    def __init__(self, choose: Callable[[torch.device, Case, str, Variants], Choice | None]):
        """``choose`` is :meth:`Autotune.choose`, or stands in for it."""
        self.choices: dict[Case, Choice] = {}
        self._choose = choose
        # By call, not by case: computing the case each time would take as long as a launch.
        self._taken: dict[tuple[Call, str, torch.dtype, bool], str] = {}

    def variant(self, x: Tensor, call: Call, default: str, variants: Variants) -> str:
        """The name of the variant to use.

        Args:
            x: a tensor of the call, whose device, dtype and contiguity count.
            call: the operation, and what its time depends on.
            default: the name of one of the variants.
            variants: returns the variants.
        """
        if torch.compiler.is_compiling():
            return default
        key = call, default, x.dtype, x.is_contiguous()
        taken = self._taken.get(key)
        if taken is not None:
            return taken
        case = (*case_of(call), default, x.is_contiguous(), str(x.dtype).removeprefix("torch."))
        choice = self._choose(x.device, case, default, variants)
        if choice is None:
            return default
        self.choices[case] = choice
        self._taken[key] = choice.variant
        return choice.variant


_SIZES: Mapping[str, Callable[..., Call]] = {
    "merge": lambda x, slot_of_token, order, offsets, window=None: (
        x.shape,
        offsets.shape,
        window is not None,
    ),
    "merge_keys": lambda x, slot_of_token, order, offsets, heads=1, window=None: (
        x.shape,
        offsets.shape,
        heads,
        window is not None,
    ),
    "add_change": lambda x, before, after, slot_of_token: (x.shape, before.shape),
    "widen": lambda q, k, v, log_sizes, heads, scale, constant: (q.shape, k.shape, heads),
}
"""Returns what the time of an operation depends on, given its arguments."""


def tuned(ops: Operations, tuner: Tuner) -> Operations:
    """The operations ``ops``, with plain torch in their place wherever it is faster."""

    def faster(name: str) -> Operation:
        own, plain, sizes_of = getattr(ops, name), getattr(TORCH, name), _SIZES[name]

        def operation(*arguments: Any) -> Any:
            def variants() -> Mapping[str, Callable[[], object]]:
                return {
                    ops.name: lambda: own(*arguments),
                    TORCH.name: lambda: plain(*arguments),
                }

            variant = tuner.variant(arguments[0], (name, *sizes_of(*arguments)), ops.name, variants)
            return own(*arguments) if variant == ops.name else plain(*arguments)

        return operation

    changed: dict[str, Any] = {name: faster(name) for name in _SIZES}
    return replace(ops, **changed)


def case_of(call: Call) -> Case:
    """The case of a call: numbers of tokens and slots are rounded down, by an eighth at most.

    These numbers are the second to last side of a tensor, and the only side of an index.
    """
    parts: list[Hashable] = []
    for part in call:
        if not isinstance(part, torch.Size):
            parts.append(part)
        elif len(part) == 1:
            parts.append(_about(part[0]))
        else:
            parts += [*part[:-2], _about(part[-2]), part[-1]]
    return tuple(parts)


def _about(count: int) -> int:
    digits = max(0, count.bit_length() - 4)
    return count >> digits << digits
