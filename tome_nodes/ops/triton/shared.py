"""What several kernels and their launchers share."""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operations import KernelFailed

log = logging.getLogger("tome_nodes")

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The dtypes that the kernels accept; they sum and compare in float32."""

HALF = frozenset({torch.float16, torch.bfloat16})
"""The dtypes whose products run on tensor cores without loss."""

# Rows, channels and warps of one program: in half precision 16 bytes a thread, whole cache lines.
BLOCK_ROWS, BLOCK_CHANNELS, BLOCK_WARPS = 8, 64, 2


_is_traced: ContextVar[bool] = ContextVar("is_traced", default=False)
"""Whether a launcher runs for a compiler, which traces it."""


class Launch(NamedTuple):
    """How a kernel is launched for some shapes.

    Arguments go by position, which saves Triton a quarter of its time.

    Attributes:
        grid: the programs.
        numbers: the arguments after the tensors and their strides, in the order of the kernel.
        warps: the warps of a program.
    """

    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    warps: int


def operator(
    shapes: Callable[..., Any], reference: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a launcher as a torch operator, which torch.compile calls instead.

    Without torch.compile the launcher is called directly: the operator would take as much time as a
    launch. If a launch fails, arguments of the same shapes go to the reference.

    Args:
        shapes: takes the same arguments and makes empty results, for tracing.
        reference: takes the same arguments and computes the same; without it, a failure raises
            :class:`tome_nodes.ops.KernelFailed`.
    """

    def register(launcher: Callable[..., Any]) -> Callable[..., Any]:
        name = launcher.__name__
        failed: set[tuple[Any, ...]] = set()

        def by_reference(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if reference is None:
                raise KernelFailed(name)
            # torch.compile relies on results as contiguous as the kernel's.
            result = reference(*args, **kwargs)
            if isinstance(result, tuple):
                return tuple(tensor.contiguous() for tensor in result)
            return result.contiguous()

        @wraps(launcher)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return own(*args, **kwargs)
            if not (failed and _kind(args, kwargs) in failed):
                try:
                    return launcher(*args, **kwargs)
                except (torch.OutOfMemoryError, ValueError):
                    raise
                except Exception as error:
                    # Kernel compilers raise exceptions of their own.
                    failed.add(_kind(args, kwargs))
                    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                    size = next(tuple(x.shape) for x in args if isinstance(x, Tensor))
                    log.warning(
                        "[ToMe] torch takes the place of the Triton kernel %s for tokens of %s: %s",
                        name,
                        size,
                        reason,
                    )
            return by_reference(args, kwargs)

        @wraps(launcher)
        def traced(*args: Any, **kwargs: Any) -> Any:
            known = tuple(map(_without_symbols, args))
            if reference is not None and failed and _kind(known, kwargs) in failed:
                return by_reference(known, kwargs)
            before = _is_traced.set(True)
            try:
                return launcher(*known, **kwargs)
            finally:
                _is_traced.reset(before)

        own = _registered(f"tome_nodes::{name}", call, traced)
        own.register_fake(shapes)

        return call

    return register


def _registered(name: str, call: Callable[..., Any], traced: Callable[..., Any]) -> Any:
    """The operator that torch.compile calls.

    The compiler traces its kernels and launches them as its own. A call of an operator in Python
    takes longer: on an H200 with PyTorch 2.11, a small SDXL under *fast* took 35.7 ms with such
    operators, and 29.1 without. Kernels of the interpreter cannot be traced.

    Args:
        name: the name of the operator.
        call: computes on tensors that are there.
        traced: computes on those of the compiler.
    """
    if torch.__version__ < "2.11" or triton.knobs.runtime.interpret:
        return torch.library.custom_op(name, call, mutates_args=())
    own: Any = torch.library.triton_op(name, traced, mutates_args=())
    own.register_kernel(None)(call)
    return own


def _without_symbols(x: Any) -> Any:
    """An argument with plain numbers, on which a launch depends; so each size has its own graph."""
    if isinstance(x, torch.SymInt):
        return int(x)
    if isinstance(x, list):
        return [*map(_without_symbols, x)]
    if isinstance(x, Tensor) and any(isinstance(length, torch.SymInt) for length in x.shape):
        return x.view([int(length) for length in x.shape])
    return x


def wrap_triton(kernel: Any) -> Any:
    """What to launch for a kernel: while an operator is traced, what puts it into the graph.

    PyTorch looks for calls of this name to tell whether the kernels of an operator have changed.
    """
    return torch.library.wrap_triton(kernel) if _is_traced.get() else kernel


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A key that is equal for arguments that differ only in the values of tensors."""
    return tuple(
        (x.shape, x.dtype, x.device)
        if isinstance(x, Tensor)
        # Torch operators get lists in place of tuples.
        else (tuple(x) if isinstance(x, list) else x)
        for x in (*args, *kwargs.values())
    )


@lru_cache(maxsize=16)
def capability(device: torch.device) -> int:
    """The compute capability of an NVIDIA GPU, such as 89 for 8.9; 0 for AMD's.

    The interpreter counts as 89, so that it takes the branches that most GPUs take.
    """
    if device.type != "cuda":
        return 89
    if torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def has_fast_products(device: torch.device) -> bool:
    """Whether products in half precision run on tensor cores; Triton leaves Turing's unused."""
    return not 0 < capability(device) < 80


def require_tokens(x: Tensor, name: str) -> None:
    """Raise a ValueError that names ``x`` if no kernel accepts it."""
    if x.ndim != 3 or x.dtype not in DTYPES:
        raise ValueError(
            f"{name} is {tuple(x.shape)} of {x.dtype}: it must be [batch, tokens, channels] of "
            "float32, float16 or bfloat16"
        )


def padded(count: int) -> int:
    """The next power of two that Triton's matrix product accepts."""
    return max(16, 1 << (count - 1).bit_length())


@triton.jit
def token_outside_windows(index, width, covered_rows, covered_columns):
    """The numbers, row by row, of the tokens of a grid that fill no window.

    Windows cover the rows and columns at the top left. The tokens to the right of them come first,
    then the tokens below.
    """
    beside = width - covered_columns
    columns = tl.maximum(beside, 1)
    return tl.where(
        index < covered_rows * beside,
        index // columns * width + covered_columns + index % columns,
        index + covered_rows * covered_columns,
    )
