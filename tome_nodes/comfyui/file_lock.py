"""A lock between processes for the use of a file, on all systems."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

if sys.platform == "win32":
    import msvcrt

    def _lock(file: BinaryIO) -> None:
        # It raises an OSError after ten seconds.
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
    """Hold a lock: other processes and threads that lock the same ``path`` wait.

    The lock is on a file next to ``path``. The system releases it when the process ends, even by a
    crash. If there can be no lock, as in some network folders, go on without one.
    """
    try:
        # On Windows, the byte at the position is locked: it stays the same, as nothing is written.
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
