"""Whose fault it is that a device has no memory left."""

import sys
from pathlib import Path
from traceback import walk_tb

import torch

NO_MEMORY = "the device has no memory left for merging"
"""The reason to report where the device ran out of memory in our own part."""

_OURS = str(Path(__file__).parents[1])


def ran_out_while_merging(error: torch.OutOfMemoryError) -> bool:
    """Whether it was raised by our code, or by PyTorch or Triton at its request."""
    libraries = [
        str(Path(module.__file__).parent)
        for module in (sys.modules.get(name) for name in ("torch", "triton"))
        if module is not None and module.__file__ is not None
    ]
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    callers = [file for file in files if not file.startswith(tuple(libraries))]
    return bool(callers) and callers[-1].startswith(_OURS)
