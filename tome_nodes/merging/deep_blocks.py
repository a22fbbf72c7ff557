"""The deep blocks of a UNet in evaluations that keep what comes up from them, or leave them out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from .overrides import Forward, Override, Overrides


class Before(NamedTuple):
    """What was going on before an evaluation, within which another one may run."""

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
            stand_ins: what blocks, or their layers, run in place of their own methods where they
                are left out, all but the last.
            last: the last layer of the deep blocks. Its first argument and what it returns is a
                feature map, ``[samples, channels, height, width]``; alone, or in a tuple if it is
                called with ``return_dict=False``.
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
        """Begin an evaluation, which is to be ended whatever happens.

        ``given`` takes the place of what would come up from the deep blocks; they run if it is
        None. Returns what :meth:`end` is to be called with.
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
        """End an evaluation; one within which it ran goes on."""
        if self._now is not None:
            self._now.take_off()
        self._now, self._given, self._came, self._times = before
        if self._now is not None:
            self._now.put_on()

    @property
    def came(self) -> Tensor | None:
        """What has come up in an evaluation, ``[samples, channels, height, width]``.

        None if the blocks have not run, or more than once.
        """
        return self._came if self._times == 1 else None

    def _give(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert self._given is not None
        # What follows may change it in place.
        given = self._given.clone()
        return (given,) if kwargs.get("return_dict") is False else given

    def _watch(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            answer = forward(*args, **kwargs)
            h: Tensor = answer[0] if isinstance(answer, tuple) else answer
            # What follows may change it in place.
            self._came = h.clone()
            self._times += 1
            return answer

        return run


def no_channels(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a layer gives that is left out: a map of no channels, so that skips cost nothing."""
    nothing = x[:, :0]
    return (nothing,) if kwargs.get("return_dict") is False else nothing
