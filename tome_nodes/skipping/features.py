"""What comes up from the deep blocks of a UNet, kept from its last whole evaluations."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FIRST_SHARE = 0.5
"""How far along the line features go on until it is known how far they keep to lines."""


class _Line(NamedTuple):
    """How features came to where they are.

    Attributes:
        distance: how far apart the places of the last two are, above 0.
        change: the last ones without those before, of the same shape.
        share: how far the next ones go on along the line, from 0 to 1: a number for all samples,
            ``[]``, or for each, ``[samples, 1, 1, 1]``.
    """

    distance: float
    change: Tensor
    share: Tensor


class _Kept(NamedTuple):
    """The last features of a condition, ``[samples, channels, height, width]``."""

    place: float
    features: Tensor
    line: _Line | None


class Features:
    """The features of all conditions of a sampling run.

    They go on along the line through the last two, as far as the last ones kept to the line before.
    Where a sampler adds noise, they turn in each step, and so hardly go on.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}
        self._last = 0.0

    def __bool__(self) -> bool:
        """Whether any are kept."""
        return bool(self._kept)

    def keep(self, keys: Sequence[Hashable], place: float, features: Tensor) -> None:
        """Keep those of a whole evaluation.

        Args:
            keys: what tells each condition of the evaluation from others.
            place: the logarithm of signal to noise.
            features: ``[samples, channels, height, width]``, of one condition after another.
        """
        if place != self._last:
            # Where windows move, each evaluation has others.
            current = {key: kept for key, kept in self._kept.items() if kept.place == self._last}
            self._kept, self._last = current, place
        # What a CUDA graph has made, it overwrites the next time.
        for key, own in zip(keys, features.clone().chunk(len(keys)), strict=True):
            self._kept[key] = _Kept(place, own, _line(self._kept.get(key), place, own))

    def at(self, keys: Sequence[Hashable], place: float) -> Tensor | None:
        """Those of an evaluation at a later place; None unless each condition has some.

        Those of a condition that was left out where others were kept last are too old.
        """
        kept = [self._kept[key] for key in keys if key in self._kept]
        are_all = len(kept) == len(keys) and all(each.place == self._last for each in kept)
        if place < self._last or not are_all:
            return None
        found = [_at(each, place) for each in kept]
        return torch.cat(found) if all(_alike(each, found[0]) for each in found) else None

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()


def _line(last: _Kept | None, place: float, features: Tensor) -> _Line | None:
    """From the last features to the next ones; None if these do not follow on them."""
    if last is None or last.place >= place or not _alike(last.features, features):
        return None
    distance, change = place - last.place, features - last.features
    if last.line is None:
        # torch.tensor would wait for the GPU.
        share = torch.full((), FIRST_SHARE, device=change.device)
    else:
        share = _kept_to(last.line.change, change, distance / last.line.distance)
    return _Line(distance, change, share)


def _kept_to(before: Tensor, change: Tensor, times: float) -> Tensor:
    """How far a change kept to what a line foretold, from 0 to 1, ``[samples, 1, 1, 1]``.

    The line foretold the change before it, so many ``times``. What is given back is the part of the
    change along the line over the longer of both, squared. It is 0 where the change turns back, and
    less the more the change turns aside or falls behind.
    """
    # Half precision may overflow.
    line, came = before.flatten(1).float(), change.flatten(1).float()
    length = line.norm(dim=1)
    product = length * torch.maximum(times * length, came.norm(dim=1))
    part = torch.linalg.vecdot(line, came).clamp(min=0) / product.clamp(min=1e-30)
    return part.square().view(-1, 1, 1, 1)


def _at(kept: _Kept, place: float) -> Tensor:
    line = kept.line
    if line is None:
        return kept.features
    # Never further than the last two are apart: the last steps of some schedules are far away.
    share = (line.share * ((place - kept.place) / line.distance)).clamp(max=1)
    return torch.addcmul(kept.features, line.change, share.to(kept.features.dtype))


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
