"""A lock that processes hold while they use a file, on Windows as elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

if sys.platform == "win32":
    import msvcrt

    def _lock(file: BinaryIO) -> None:
        # It gives up with an error after ten seconds.
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)

    def _unlock(file: BinaryIO) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)

    def _unlock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes and threads out that lock the same file, which is beside ``path``.

    The system lets go of it when the process ends, however it ends. Where nothing can be locked,
    such as in some folders of a network, nothing is kept out.
    """
    try:
        # Nothing is written, so that its place is the same in each process.
        file = path.with_suffix(".lock").open("ab")
    except OSError:
        yield
        return
    with file:
        is_locked = False
        with suppress(OSError):
            _lock(file)
            is_locked = True
        try:
            yield
        finally:
            if is_locked:
                with suppress(OSError):
                    _unlock(file)
