"""When a node is done, log its runs; runs that are alike share a line."""

import logging
from collections.abc import Sequence

from comfy_execution.progress import NodeProgressState, ProgressHandler, get_progress_state
from comfy_execution.utils import get_executing_context

from ..run.record import RunRecord
from . import workflow
from .neighbours import KEY

log = logging.getLogger("tome_nodes")


def note(last_runs: Sequence[RunRecord]) -> None:
    """Log some runs that have ended: at the end of the running node, or now if there is none.

    An error never stops the sampling; it is logged.
    """
    try:
        context = get_executing_context()
        for last in last_runs:
            if context is None:
                last.log()
            else:
                runs = get_progress_state().handlers.setdefault(KEY, _Runs())
                runs.add(context.node_id, last)
    except Exception as error:
        log.warning("[ToMe] could not log this run: %s: %s", type(error).__name__, error)


def say(text: str) -> None:
    """Log a line of the running node."""
    node = workflow.running_node()
    log.info("[ToMe] %s%s", "" if node is None else f"{workflow.in_words(node)}: ", text)


class _Runs(ProgressHandler):
    """The runs of one prompt that are not logged yet. ComfyUI tells it when a node is done."""

    def __init__(self) -> None:
        super().__init__(KEY)
        self._runs: dict[str, dict[str, tuple[int, RunRecord]]] = {}

    def add(self, node: str, last: RunRecord) -> None:
        runs = self._runs.setdefault(node, {})
        alike, _ = runs.get(last.line, (0, None))
        runs[last.line] = alike + 1, last

    def finish_handler(self, node_id: str, state: NodeProgressState, prompt_id: str) -> None:
        for alike, last in self._runs.pop(node_id, {}).values():
            last.log(workflow.in_words(node_id), alike)
