"""Predictions by arithmetic: the speed-ups that FLOPs allow, and the time of a benchmark."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from benchmarks.measure import Subject
from benchmarks.methods import Method

SIDES = (64, 128, 192)
"""Sides of the pictures at which FLOPs are counted."""


@dataclass(frozen=True)
class Forecast:
    """FLOPs of one evaluation as functions of pixels, by method, including ``unpatched``."""

    flops: Mapping[str, Callable[[int], float]]

    def speed_ups(self, size: int) -> dict[str, float]:
        """How many times fewer FLOPs than unpatched each method has, for a square picture."""
        names = [name for name in self.flops if name != "unpatched"]
        return {name: self.unpatched(size) / self.flops[name](size * size) for name in names}

    def unpatched(self, size: int) -> float:
        """FLOPs of the unpatched model, for a square picture."""
        return self.flops["unpatched"](size * size)


def forecast(subject_of: Callable[[int], Subject], methods: Sequence[Method]) -> Forecast:
    """Predict the FLOPs of methods at any size from those at three small sizes.

    The FLOPs of a UNet are quadratic in the number of pixels: convolutions and linear layers are
    proportional to it, self-attention to its square.
    """
    points: dict[str, dict[int, int]] = {}
    for side in SIDES:
        subject = subject_of(side)
        patched = {each.name: each.patch(subject.model) for each in methods}
        for name, model in {"unpatched": subject.model, **patched}.items():
            counter = FlopCounterMode(display=False, custom_mapping=UNLISTED)
            subject.run(model, counter)
            points.setdefault(name, {})[side * side] = counter.get_total_flops()
    return Forecast({name: parabola(values) for name, values in points.items()})


def parabola(points: Mapping[int, float]) -> Callable[[int], float]:
    """The polynomial of least degree through the points."""

    def value(x: int) -> float:
        total = 0.0
        for xi, yi in points.items():
            weight = 1.0
            for xj in points:
                if xj != xi:
                    weight *= (x - xj) / (xi - xj)
            total += yi * weight
        return total

    return value


def _cpu_attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object
) -> int:
    return sdpa_flop_count(query, key, value)


UNLISTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops}
"""The CPU's fused attention, which PyTorch's counter does not know."""


def affordable(
    seconds: float, counts: Mapping[str, int], repeats: int, available: float | None
) -> tuple[str, int] | None:
    """The most methods that fit into the time, and then the most repeats.

    Args:
        seconds: duration of one unpatched evaluation.
        counts: the number of methods in each selection, the larger selection first.
        repeats: requested timed rounds.
        available: available seconds, None for no limit.

    Returns:
        A selection and its repeats; None if not even one round of the smallest fits.
    """
    smallest = list(counts)[-1]
    wishes = [(name, repeats) for name in counts] + [(smallest, 1)]
    for name, rounds in wishes:
        if available is None or total_seconds(seconds, counts[name], rounds) <= available:
            return name, rounds
    return None


def total_seconds(seconds: float, methods: int, repeats: int) -> float:
    """The approximate duration of a comparison: one first run and the timed rounds."""
    return seconds * methods * (1 + repeats)
