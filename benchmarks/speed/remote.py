"""An object in a process of its own, which this process asks."""

from collections.abc import Callable
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import host


class RemoteError(Exception):
    """Something failed in the other process; the message says what."""


class Remote:
    """An object in a process that has ComfyUI on a device.

    Attributes:
        connection: has an answer when the object is made, and after each question.
    """

    def __init__(self, device: str, module: str, name: str, *arguments: Any):
        """Begin to make ``name(*arguments)`` of a module, without waiting for it."""
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        everything = theirs, device, module, name, arguments
        self._process = context.Process(target=_serve, args=everything, daemon=True)
        self._process.start()
        self._is_busy = True
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object, and wait for its answer."""
        self.connection.send((method, arguments))
        self._is_busy = True
        return self.answer()

    def answer(self) -> Any:
        """Wait for an answer.

        Raises:
            RemoteError: the object could not be made, its method failed, or its process ended.
        """
        try:
            answer = self.connection.recv()
        except EOFError:
            raise RemoteError("its process ended") from None
        self._is_busy = False
        if isinstance(answer, RemoteError):
            raise answer
        return answer

    def end(self) -> None:
        """End the process, whatever it does."""
        self.connection.close()
        if self._is_busy:
            self._process.kill()
        self._process.join()


def _serve(connection: Connection, device: str, module: str, name: str, arguments: Any) -> None:
    """What the process does."""

    def answer(call: Callable[[], Any]) -> None:
        try:
            result = call()
        except Exception as error:
            result = RemoteError(f"{type(error).__name__}: {error}".splitlines()[0])
        connection.send(result)

    made: list[Any] = []

    def make() -> None:
        # ComfyUI has to know its device before any of its parts are imported.
        host.use(device)
        made.append(getattr(import_module(module), name)(*arguments))

    answer(make)
    while True:
        try:
            method, given = connection.recv()
        except EOFError:
            return
        answer(lambda: getattr(made[0], method)(*given))  # noqa: B023
