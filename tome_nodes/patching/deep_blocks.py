"""The deep blocks of a UNet in evaluations that keep what comes up from them, or leave them out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .overrides import Forward, Override, Overrides


class DeepBlocks:
    """All blocks of a UNet but the outermost ones."""

    def __init__(self, layers: Sequence[nn.Module]):
        """``layers`` are theirs, in running order.

        Each takes a feature map, ``[samples, channels, height, width]``, as its first argument and
        returns one.
        """
        *self._layers, self._last = layers
        self._given: Tensor | None = None
        self._came: Tensor | None = None
        self._times = 0
        self._left_out = Overrides(self._stand_ins)
        self._watched = Overrides(
            lambda: [(self._last, "forward", self._watch(self._last.forward))]
        )
        self._now: Overrides | None = None

    @contextmanager
    def left_out(self, given: Tensor) -> Iterator[None]:
        """For an evaluation in which ``given`` takes the place of what would come up."""
        before, self._given = self._given, given
        try:
            with self._put_on(self._left_out):
                yield
        finally:
            self._given = before

    @contextmanager
    def watched(self) -> Iterator[None]:
        """For an evaluation in which they run; :attr:`came` is known until its end."""
        before = self._times, self._came
        self._times, self._came = 0, None
        try:
            with self._put_on(self._watched):
                yield
        finally:
            self._times, self._came = before

    @property
    def came(self) -> Tensor | None:
        """What came up in the evaluation that is watched, ``[samples, channels, height, width]``.

        None if the blocks have not run, or more than once.
        """
        return self._came if self._times == 1 else None

    def _stand_ins(self) -> list[Override]:
        return [
            *((layer, "forward", _nothing) for layer in self._layers),
            (self._last, "forward", self._give),
        ]

    def _give(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self._given is not None
        # What follows may change it in place.
        return self._given.clone()

    def _watch(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            h = forward(*args, **kwargs)
            # What follows may change it in place.
            self._came = h.clone()
            self._times += 1
            return h

        return run

    @contextmanager
    def _put_on(self, overrides: Overrides) -> Iterator[None]:
        """Put overrides on, in place of those of an evaluation within which this one runs."""
        outer, self._now = self._now, overrides
        if outer is not None:
            outer.take_off()
        try:
            overrides.put_on()
            yield
        finally:
            overrides.take_off()
            self._now = outer
            if outer is not None:
                outer.put_on()


def _nothing(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What a layer that is left out gives: a map of no channels, so that skips cost nothing."""
    return x[:, :0]
