"""The deep blocks of a UNet: run them and keep their features, or leave them out and give those."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from .overrides import Forward, Override, Overrides


class Before(NamedTuple):
    """The state before an evaluation, which may run within another one."""

    overrides: Overrides | None
    given: Tensor | None
    came: Tensor | None
    times: int


class DeepBlocks:
    """All blocks of a UNet but the outermost ones.

    Attributes:
        modules: all modules in them.
    """

    def __init__(self, stand_ins: Sequence[Override], last: nn.Module):
        """Prepare to leave blocks out.

        Args:
            stand_ins: what blocks, or their layers, run in place of their own methods while they
                are left out; for all but the last layer.
            last: the last layer of the deep blocks. Its first argument and its result are feature
                maps, ``[samples, channels, height, width]``; the result is in a tuple if the layer
                is called with ``return_dict=False``.
        """
        self.modules = frozenset(
            part
            for layer in (*(module for module, _, _ in stand_ins), last)
            for part in layer.modules()
        )
        self._stand_ins = stand_ins
        self._last = last
        self._given: Tensor | None = None
        self._came: Tensor | None = None
        self._times = 0
        self._left_out = Overrides(lambda: [*self._stand_ins, (last, "forward", self._give)])
        self._watched = Overrides(lambda: [(last, "forward", self._watch(last.forward))])
        self._now: Overrides | None = None

    def begin(self, given: Tensor | None) -> Before:
        """Begin an evaluation. Call :meth:`end` with the result, whatever happens in between.

        ``given`` are the features to use instead of running the deep blocks, ``[samples, channels,
        height, width]``. If it is None, the blocks run.
        """
        before = Before(self._now, self._given, self._came, self._times)
        if self._now is not None:
            self._now.take_off()
        self._given, self._came, self._times = given, None, 0
        self._now = self._watched if given is None else self._left_out
        try:
            self._now.put_on()
        except BaseException:
            self.end(before)
            raise
        return before

    def end(self, before: Before) -> None:
        """End an evaluation; if it ran within another one, that one goes on."""
        if self._now is not None:
            self._now.take_off()
        self._now, self._given, self._came, self._times = before
        if self._now is not None:
            self._now.put_on()

    @property
    def came(self) -> Tensor | None:
        """The features of an evaluation, ``[samples, channels, height, width]``.

        None if the blocks have not run, or more than once.
        """
        return self._came if self._times == 1 else None

    def _give(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert self._given is not None
        # Later layers may change it in place.
        given = self._given.clone()
        return (given,) if kwargs.get("return_dict") is False else given

    def _watch(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            answer = forward(*args, **kwargs)
            h: Tensor = answer[0] if isinstance(answer, tuple) else answer
            # Later layers may change it in place.
            self._came = h.clone()
            self._times += 1
            return answer

        return run


def no_channels(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a left-out layer returns: a map without channels, so that skip connections are free."""
    nothing = x[:, :0]
    return (nothing,) if kwargs.get("return_dict") is False else nothing
