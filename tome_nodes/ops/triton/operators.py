"""Launchers as torch operators, which torch.compile calls and which fall back to plain torch."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import triton
from torch import Tensor

from ..operations import KernelFailed
from .launching import is_traced

log = logging.getLogger("tome_nodes")

_TRACES = torch.__version__ >= "2.11" and not triton.knobs.runtime.interpret
"""Whether torch.compile traces the kernels and launches them as its own.

Otherwise it calls an operator in Python, which takes longer: on an H200 with PyTorch 2.11, a small
SDXL under *fast* took 35.7 ms with such operators, and 29.1 without. Kernels of the interpreter
cannot be traced.
"""


def operator(
    shapes: Callable[..., Any], reference: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a launcher as a torch operator, which torch.compile calls instead.

    A compiler that compiles for one size traces the kernels in it. For sizes that are symbols, it
    calls the operator, so that one graph serves them all. Without torch.compile the launcher is
    called directly: the operator would take longer than a launch. If a launch fails, the reference
    takes over for all arguments of the same shapes and dtypes.

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

        of_any_size: Any = torch.library.custom_op(f"tome_nodes::{name}", call, mutates_args=())
        of_any_size.register_fake(shapes)

        @wraps(launcher)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if any(map(_has_symbols, args)):
                return of_any_size(*args, **kwargs)
            if reference is not None and failed and _kind(args, kwargs) in failed:
                return by_reference(args, kwargs)
            before = is_traced.set(True)
            try:
                return launcher(*args, **kwargs)
            finally:
                is_traced.reset(before)

        own: Any = of_any_size
        if _TRACES:
            own = torch.library.triton_op(f"tome_nodes::{name}_traced", traced, mutates_args=())
            own.register_kernel(None)(call)
            own.register_fake(shapes)
        return call

    return register


def _has_symbols(x: Any) -> bool:
    """Whether a compiler takes an argument as a symbol, or its size as symbols."""
    if isinstance(x, Tensor):
        return any(isinstance(length, torch.SymInt) for length in x.shape)
    if isinstance(x, list):
        return any(map(_has_symbols, x))
    return isinstance(x, torch.SymInt | torch.SymFloat)


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A key that is equal for arguments that differ only in the values of tensors."""
    return tuple(
        (x.shape, x.dtype, x.device)
        if isinstance(x, Tensor)
        # Torch operators get lists in place of tuples.
        else (tuple(x) if isinstance(x, list) else x)
        for x in (*args, *kwargs.values())
    )
