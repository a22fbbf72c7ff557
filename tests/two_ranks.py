"""Two ranks of torch.distributed on this machine, which run functions side by side."""

import logging
import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import wait
from unittest.mock import patch

import torch

LIMIT = 60
"""After so many seconds, a rank hangs. None of the functions takes a sixth of that."""

START = 300
"""So many seconds a rank gets to start, which may take long on a busy machine."""

GRACE = 2
"""So many seconds a rank gets to end if another has raised an error."""

_SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
}


class TwoRanks:
    """Two processes, which start when they are first needed."""

    def __init__(self):
        self._pipes = []
        self._processes = []
        self._has_failed = False

    def __call__(self, function, *args):
        """What a function returns on each rank, and the lines that the pack logs there.

        The function gets the number of its rank and ``args``. If it raises or hangs on a rank, this
        raises an error that says so.
        """
        ends = self.ends(function, *args)
        assert not [error for _, _, error in ends if error], "\n".join(e for *_, e in ends if e)
        return [result for result, *_ in ends], [lines for _, lines, _ in ends]

    def ends(self, function, *args):
        """The same of each rank, with its error as a third: its text, or that it hung; or None."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        ends = [(None, [], f"rank {rank} hung") for rank in range(2)]
        waiting, limit = [*self._pipes], LIMIT
        while waiting and (ready := wait(waiting, limit)):
            for pipe in ready:
                waiting.remove(pipe)
                rank = self._pipes.index(pipe)
                try:
                    ends[rank] = pipe.recv()
                except EOFError:
                    ends[rank] = None, [], f"rank {rank} ended"
                if ends[rank][-1]:
                    limit = GRACE
        if any(error for *_, error in ends):
            # What they have begun together, they cannot end any more.
            self._has_failed = True
            self.stop()
        return ends

    def stop(self):
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if not self._has_failed:
                pipe.send(None)
                process.join(LIMIT)
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def _start(self):
        context = multiprocessing.get_context("spawn")
        self._has_failed = False
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store
        with patch.dict(os.environ, _SETTINGS):
            for rank in range(2):
                own, other = context.Pipe()
                process = context.Process(
                    target=_serve, args=(rank, store.port, other), daemon=True
                )
                process.start()
                self._pipes.append(own)
                self._processes.append(process)
            assert all(pipe.poll(START) and pipe.recv() for pipe in self._pipes), "no start"


def _serve(rank, port, pipe):
    """Run functions in a process group of two."""
    # Slow to import.
    import models.pipelines  # noqa: F401

    torch.set_num_threads(1)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tome_nodes").addHandler(handler)
    logging.getLogger("tome_nodes").setLevel(logging.INFO)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        function, args = task
        lines.clear()
        try:
            with torch.no_grad():
                end = function(rank, *args), [*lines], None
        except BaseException:
            end = None, [*lines], traceback.format_exc()
        pipe.send(end)
