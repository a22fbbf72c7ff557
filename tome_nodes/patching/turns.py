"""Threads that evaluate the same model take turns."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition, Thread, current_thread
from weakref import WeakKeyDictionary

from torch import nn

# How often a waiting thread checks whether the owner of the turn has left.
_SECONDS = 0.05


class Turns:
    """Lets one thread at a time evaluate a model; turns of the same thread may be nested.

    A turn may be left without being ended: PyTorch runs no hook after a keyboard interrupt or when
    a thread is made to exit. The next thread then undoes what was left on the model.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._owner: Thread | None = None
        self._caller: str | None = None
        self._open: list[ExitStack] = []

    @contextmanager
    def turn(self, caller: str | None = None) -> Iterator[ExitStack]:
        """Wait for a turn and take it.

        Args:
            caller: a file whose code is on the thread's stack as long as the turn lasts; None if
                the turn always ends.

        Yields:
            A stack of what to undo at the end of the turn.
        """
        exits = ExitStack()
        with self._changed:
            while not self._is_free():
                self._changed.wait(_SECONDS)
            if self._owner is not current_thread():
                self._undo()
            self._owner, self._caller = current_thread(), caller
            self._open.append(exits)
        try:
            with exits:
                yield exits
        finally:
            with self._changed:
                if exits in self._open:
                    self._open.remove(exits)
                    if not self._open:
                        self._owner = None
                        self._changed.notify()

    def undo_if_left(self) -> None:
        """Undo what a thread put on the model, if it has left its turn."""
        with self._changed:
            if self._owner is not None and self._is_free():
                self._undo()
                self._owner = None

    def _is_free(self) -> bool:
        owner = self._owner
        return owner is None or owner is current_thread() or _has_left(owner, self._caller)

    def _undo(self) -> None:
        while self._open:
            self._open.pop().close()


def _has_left(thread: Thread, caller: str | None) -> bool:
    """Whether a thread is dead, or no code of the file ``caller`` is on its stack."""
    if not thread.is_alive():
        return True
    if caller is None:
        return False
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_filename == caller:
            return False
        frame = frame.f_back
    return True


_turns: WeakKeyDictionary[nn.Module, Turns] = WeakKeyDictionary()


def turns_of(model: nn.Module) -> Turns:
    """The turns of a model."""
    return _turns.setdefault(model, Turns())
