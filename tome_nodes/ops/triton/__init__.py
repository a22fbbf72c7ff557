"""The operations of a plan as Triton kernels, one launch each.

A kernel replaces the several launches of a function of :mod:`tome_nodes.ops.reference`. It uses no
atomics, so its sums have a fixed order. Its file also holds its launcher, which is registered as
a torch operator, and the shapes for tracing, so that torch.compile keeps one graph. From PyTorch
2.11 on, torch.compile sees the kernels in it, unless it compiles for any size.

Triton compiles a kernel anew if an integer argument is 1 or a multiple of 16. Arguments that vary
with the size of the picture are exempt (``do_not_specialize``). Strides are not, since they decide
how many bytes a load moves.

Importing this needs Triton; :func:`tome_nodes.ops.resolve` says whether it is available.
"""

import torch
import triton

from ..operations import Operations
from ..reference import unmerge
from .adding import add_change
from .matching import match_windows
from .merging import merge, merge_keys
from .shared import DTYPES
from .widening import widen

__all__ = [
    "DTYPES",
    "TRITON",
    "add_change",
    "match_windows",
    "merge",
    "merge_keys",
    "runs_on",
    "unmerge",
    "widen",
]

TRITON = Operations("triton", merge, merge_keys, unmerge, add_change, widen, match_windows)
"""The kernels. Unmerging has none, since torch needs only one launch for it, too."""


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on a device: CUDA, ROCm, or a CPU with Triton's interpreter."""
    # Early releases of Triton have no knobs.
    is_interpreted = hasattr(triton, "knobs") and triton.knobs.runtime.interpret
    return device.type == "cuda" or (device.type == "cpu" and is_interpreted)
