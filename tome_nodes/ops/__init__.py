"""The operations of a plan, in plain torch or as Triton kernels where available."""

import torch

from . import reference
from .operations import KernelFailed, Operation, Operations

__all__ = ["TORCH", "KernelFailed", "Operation", "Operations", "operations", "resolve"]

TORCH = Operations(
    "torch",
    reference.merge,
    reference.merge_keys,
    reference.unmerge,
    reference.add_change,
    reference.widen,
)
"""Plain torch, on any device."""


def resolve(backend: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str | None]:
    """The backend to use, ``torch`` or ``triton``.

    Args:
        backend: what the settings ask for: ``auto``, ``torch`` or ``triton``.
        device: device of the tokens.
        dtype: dtype of the tokens.

    Returns:
        The backend, and a reason if it is ``torch`` although the settings ask for ``triton``, or
        for ``auto`` on a GPU; otherwise the reason is None.
    """
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch", None
    try:
        from . import triton as kernels
    except Exception as error:
        # A Triton that does not fit PyTorch or the system may raise any error.
        return "torch", f"{type(error).__name__}: {error}".partition("\n")[0]
    if not kernels.runs_on(device):
        return "torch", f"its kernels need a CUDA or ROCm device, and the model is on {device}"
    if dtype not in kernels.DTYPES:
        return "torch", f"its kernels do not work on {dtype}"
    if torch.is_grad_enabled():
        return "torch", "its kernels give no gradients; torch.no_grad() lets them be used"
    return "triton", None


def operations(backend: str) -> Operations:
    """The operations of a backend, ``torch`` or ``triton``."""
    if backend != "triton":
        return TORCH
    from .triton import TRITON

    return TRITON
