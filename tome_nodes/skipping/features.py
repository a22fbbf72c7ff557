"""What comes up from the deep blocks of a UNet, kept from its last whole evaluations."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

DAMPING = 0.5
"""The share of the line through the last two features along which the next ones go on, but never
further than the two are apart: the last steps of some schedules are far away."""


class Features:
    """The features of all conditions of a sampling run."""

    def __init__(self, goes_on: bool):
        """``goes_on`` is whether features go on along a line; else the last are copied."""
        self._goes_on = goes_on
        self._kept: dict[Hashable, list[tuple[float, Tensor]]] = {}
        self._last = 0.0

    def keep(self, keys: Sequence[Hashable], place: float, features: Tensor) -> None:
        """Keep those of a whole evaluation.

        Args:
            keys: what tells each condition of the evaluation from others.
            place: the logarithm of signal to noise.
            features: ``[samples, channels, height, width]``, of one condition after another.
        """
        if place != self._last:
            # Where windows move, each evaluation has others.
            current = {key: kept for key, kept in self._kept.items() if kept[-1][0] == self._last}
            self._kept, self._last = current, place
        # What a CUDA graph has made, it overwrites the next time.
        for key, own in zip(keys, features.clone().chunk(len(keys)), strict=True):
            before = self._kept.get(key, [])[-1:] if self._goes_on else []
            fits = all(last < place and _alike(kept, own) for last, kept in before)
            self._kept[key] = [*(before if fits else ()), (place, own)]

    def at(self, keys: Sequence[Hashable], place: float) -> Tensor | None:
        """Those of an evaluation at a later place; None unless each condition has some.

        Those of a condition that was left out where others were kept last are too old.
        """
        kept = [self._kept.get(key, []) for key in keys]
        if place < self._last or not all(each and each[-1][0] == self._last for each in kept):
            return None
        found = [_at(each, place) for each in kept]
        return torch.cat(found) if all(_alike(each, found[0]) for each in found) else None

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()


def _at(kept: Sequence[tuple[float, Tensor]], place: float) -> Tensor:
    (first, before), (last, features) = kept[0], kept[-1]
    if first == last:
        return features
    share = DAMPING * (place - last) / (last - first)
    return torch.lerp(before, features, 1 + min(1.0, share))


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
