"""Launch kernels quickly.

Triton compiles a kernel once for each kind of arguments. Finding the kind takes longer than the
rest of a launch. So compiled kernels are remembered by what the kind depends on, and launched
directly.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

_COMPARED = ("3.6.", "3.8.", "3.9.")
"""The releases of Triton for which a test compares what is remembered with Triton's own choice."""

_REMEMBERS = triton.__version__.startswith(_COMPARED) and torch.version.hip is None
"""Whether compiled kernels are remembered. On AMD's GPUs, the kind also depends on the size of a
tensor's storage."""

_ALIGNED = 16
"""Triton compiles wide loads for tensors that begin at a multiple of this many bytes."""

is_traced: ContextVar[bool] = ContextVar("is_traced", default=False)
"""Whether a compiler is tracing the launcher."""


@dataclass(eq=False)
class Launch:
    """How a kernel is launched for some shapes.

    Attributes:
        grid: the number of programs along each of three axes.
        numbers: the arguments after the tensors and their strides, in the order of the kernel.
        warps: the warps of a program.
        compiled: the compiled kernels, by everything that they depend on besides numbers and warps.
    """

    grid: tuple[int, int, int]
    numbers: tuple[float, ...]
    warps: int
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)


def launch(
    kernel: Any, how: Launch, tensors: tuple[Tensor | None, ...], strides: tuple[int, ...] = ()
) -> None:
    """Launch a kernel.

    Arguments go by position, as compiled kernels take them.

    Args:
        kernel: from :func:`wrap_triton`.
        how: the geometry and the numbers.
        tensors: the first arguments; the kernel runs on the device of the first of them.
        strides: the arguments that follow.
    """
    first = tensors[0]
    assert first is not None
    arguments = *tensors, *strides, *how.numbers
    with torch.cuda.device_of(first):
        key = None
        if _REMEMBERS and not is_traced.get():
            # Benchmarks and tests swap kernels. A compiled kernel keeps its source alive, so an
            # ``id`` is never used twice.
            key = _key((id(kernel), first.get_device(), strides), tensors)
        compiled = None if key is None else how.compiled.get(key)
        if compiled is not None:
            compiled[how.grid](*arguments)
            return
        compiled = kernel[how.grid](*arguments, num_warps=how.warps)
        if key is not None:
            how.compiled[key] = compiled


def _key(known: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...] | None:
    """The key of a compiled kernel; None if a tensor is not aligned for wide loads."""
    dtypes: list[torch.dtype | None] = []
    addresses = 0
    for tensor in tensors:
        dtypes.append(None if tensor is None else tensor.dtype)
        addresses |= 0 if tensor is None else tensor.data_ptr()
    return None if addresses % _ALIGNED else (*known, *dtypes)


def wrap_triton(kernel: Any) -> Any:
    """The kernel to launch; while an operator is traced, wrapped so that the graph contains it.

    PyTorch looks for calls of this name to tell whether the kernels of an operator have changed.
    """
    return torch.library.wrap_triton(kernel) if is_traced.get() else kernel
