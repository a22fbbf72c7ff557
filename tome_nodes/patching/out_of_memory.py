"""Whose fault it is that a device has no memory left."""

from traceback import walk_tb

import torch

NO_MEMORY = "the device has no memory left for merging"
"""The reason to report where the device ran out of memory in our own part."""

WITHOUT_IT = f"{NO_MEMORY}: the rest of this run goes on without it"
"""What a host tells when that happens."""

_OURS = __name__.removesuffix("core.memory")

_LIBRARIES = ("torch", "triton")


def ran_out_while_merging(error: torch.OutOfMemoryError) -> bool:
    """Whether it was raised by our code, or by PyTorch or Triton at its request."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    callers = [name for name in modules if name.partition(".")[0] not in _LIBRARIES]
    return bool(callers) and callers[-1].startswith(_OURS)
