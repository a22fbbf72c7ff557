"""Keep ComfyUI's compiler away from runs that merge tokens.

From version 0.34 on, ComfyUI records which memory the blocks of some models allocate, and hands out
the same memory in later steps. A tensor that outlives a block, or has another size in another step,
then crashes the process. Merging makes both kinds of tensors.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from comfy.cli_args import args

OPTION = "disable_comfy_compiler"
"""The name of ComfyUI's command line option, and of the transformer option of later versions."""

_lock = Lock()
_runs = 0
_before: Any = None


@contextmanager
def switched_off(transformer_options: dict[str, Any]) -> Iterator[None]:
    """Keep the compiler off during a run. Runs may be nested, or overlap in several threads.

    If this ComfyUI has the transformer option, that is enough. Otherwise the command line option is
    set, for the whole process, until the last run that merges has ended.

    Args:
        transformer_options: the transformer options of the run.
    """
    global _runs, _before
    transformer_options[OPTION] = True
    if not hasattr(args, OPTION) or _host_takes_option():
        yield
        return
    with _lock:
        if _runs == 0:
            _before = getattr(args, OPTION)
            setattr(args, OPTION, True)
        _runs += 1
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            if _runs == 0:
                setattr(args, OPTION, _before)


def _host_takes_option() -> bool:
    """Whether ComfyUI checks the transformer option before it records anything."""
    try:
        from comfy.model_prefetch import malloc_graph_enabled
    except ImportError:
        return False
    return "transformer_options" in inspect.signature(malloc_graph_enabled).parameters
