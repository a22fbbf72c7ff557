"""Run a Python script that ends with the process that started it, however that one ends.

    python tether.py PORT SCRIPT [ARGUMENT...]

The starter listens on the loopback port PORT while it is alive. The operating system closes the
connection when the starter is gone, even if it was killed and could not clean up.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import sys
import threading
from pathlib import Path


def _end_with_starter(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1)
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _main() -> None:
    _, port, script, *arguments = sys.argv
    connection = socket.create_connection(("127.0.0.1", int(port)))
    threading.Thread(target=_end_with_starter, args=(connection,), daemon=True).start()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _main()
