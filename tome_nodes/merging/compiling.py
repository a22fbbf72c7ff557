"""What torch.compile does once it has made as many graphs of a model as it may.

It then runs calls for which it has no graph uncompiled, or raises an error if it was told to
compile whole graphs only.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch._C._dynamo import eval_frame

Result = TypeVar("Result")

_callback: Callable[[], object] | None = getattr(eval_frame, "get_eval_frame_callback", None)


def is_left_uncompiled() -> bool:
    """Whether the caller, which runs as Python, is part of a call that has no graph and gets none.

    False in a model that is not compiled, and under a PyTorch that does not tell, such as 2.4.
    """
    return _callback is not None and _callback() is False


def has_no_more_graphs(error: Exception) -> bool:
    """Whether an error says that the compiler may make no more graphs.

    False before PyTorch 2.6: earlier versions cannot run a model with only the graphs that it has.
    """
    # By name, as importing the compiler takes seconds.
    is_full = type(error).__name__ == "FailOnRecompileLimitHit"
    return is_full and hasattr(torch.compiler, "set_stance")


def with_graphs_so_far(call: Callable[[], Result]) -> Result:
    """The result of a call that may use the graphs so far, but makes no new ones."""
    # ``set_stance`` raises within a compiled frame, so that is left first. Compiled models within
    # the call keep to the stance.
    within = eval_frame.set_eval_frame(False)
    try:
        with torch.compiler.set_stance("eager_on_recompile"):
            return call()
    finally:
        eval_frame.set_eval_frame(within)
