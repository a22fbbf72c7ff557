"""What is logged once."""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from ..run.record import RunRecord
from ..run.sampling_run import SamplingRun

log = logging.getLogger("tome_nodes")


class LogOnce:
    """Logs every line once."""

    def __init__(self) -> None:
        self._said: set[Hashable] = set()

    def is_new(self, what: Hashable) -> bool:
        """Whether this is asked for the first time."""
        is_new = what not in self._said
        self._said.add(what)
        return is_new

    def info(self, line: str) -> None:
        if self.is_new(line):
            log.info("[ToMe] %s", line)

    def warn(self, line: str) -> None:
        if self.is_new(line):
            log.warning("[ToMe] %s", line)

    def report(self, run: SamplingRun, finish: Callable[[], RunRecord]) -> None:
        """Log the record of a run once, unless its line is known. An error costs no picture."""
        if run.is_reported:
            return
        run.is_reported = True
        with self.guarded():
            record = finish()
            if self.is_new(record.line):
                record.log()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Log an error in what is told of a run, once, and go on."""
        try:
            yield
        except Exception as error:
            self.warn(f"the report of this run is missing: {type(error).__name__}: {error}")
