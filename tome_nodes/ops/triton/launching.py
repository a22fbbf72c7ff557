"""Launch kernels in little time.

Triton compiles a kernel for kinds of arguments. To find out the kind takes longer than all else
that is done for a launch, so what it has compiled is remembered, and launched without asking again.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_REMEMBERS = torch.__version__ >= "2.11" and torch.version.hip is None
"""Whether what was compiled is remembered. With PyTorch 2.11 comes a Triton that launches it with
the arguments of the kernel. On AMD's GPUs, the kind also depends on the memory around a tensor."""

_ALIGNED = 16
"""Triton compiles wide loads for tensors that begin at a multiple of this many bytes."""

is_traced: ContextVar[bool] = ContextVar("is_traced", default=False)
"""Whether a launcher runs for a compiler, which traces it."""


@dataclass(eq=False)
class Launch:
    """How a kernel is launched for some shapes.

    Attributes:
        grid: the programs, on three sides.
        numbers: the arguments after the tensors and their strides, in the order of the kernel.
        warps: the warps of a program.
        compiled: what Triton has compiled, by all that it depends on besides the numbers.
    """

    grid: tuple[int, int, int]
    numbers: tuple[float, ...]
    warps: int
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)


def launch(
    kernel: Any, how: Launch, tensors: tuple[Tensor | None, ...], strides: tuple[int, ...] = ()
) -> None:
    """Launch a kernel.

    Arguments go by position, which saves Triton a quarter of its time.

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
        if _REMEMBERS and not is_traced.get():
            dtypes: list[torch.dtype | None] = []
            places = 0
            for tensor in tensors:
                dtypes.append(None if tensor is None else tensor.dtype)
                places |= 0 if tensor is None else tensor.data_ptr()
            if places % _ALIGNED == 0:
                kind = kernel, first.get_device(), strides, *dtypes
                compiled = how.compiled.get(kind)
                if compiled is None:
                    how.compiled[kind] = kernel[how.grid](*arguments, num_warps=how.warps)
                else:
                    compiled[how.grid](*arguments)
                return
        kernel[how.grid](*arguments, num_warps=how.warps)


def wrap_triton(kernel: Any) -> Any:
    """What to launch for a kernel: while an operator is traced, what puts it into the graph.

    PyTorch looks for calls of this name to tell whether the kernels of an operator have changed.
    """
    return torch.library.wrap_triton(kernel) if is_traced.get() else kernel
