"""The operations of a plan as Triton kernels, one launch each.

Each kernel does without atomics, and so in a fixed order, what a function of
:mod:`tome_nodes.ops.reference` does in several launches. Its file holds the kernel, what launches
it, registered as an operator of torch, and the shapes for tracing, so that torch.compile keeps one
graph.

Importing this needs Triton; :func:`tome_nodes.ops.resolve` says whether it can be had.
"""

import torch
import triton

from ..reference import unmerge
from .adding import add_change
from .key_merging import merge_keys
from .matching import match_windows
from .merging import merge
from .shared import DTYPES
from .widening import widen

__all__ = [
    "DTYPES",
    "NAME",
    "add_change",
    "match_windows",
    "merge",
    "merge_keys",
    "runs_on",
    "unmerge",
    "widen",
]

NAME = "triton"


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run there: on CUDA and ROCm, and on a CPU in Triton's interpreter."""
    return device.type == "cuda" or (device.type == "cpu" and triton.knobs.runtime.interpret)
