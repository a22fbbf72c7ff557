"""On what the operations of a plan run: plain torch, or Triton kernels where they can be had."""

from types import ModuleType

import torch

from . import reference


def resolve(backend: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str | None]:
    """The backend to use, ``torch`` or ``triton``.

    Args:
        backend: what the settings ask for: ``auto``, ``torch`` or ``triton``.
        device: where the tokens are.
        dtype: of the tokens.

    Returns:
        The backend; and why it is not ``triton`` where that was asked for, or could be expected.
    """
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch", None
    try:
        from . import fused
    except ImportError as error:
        return "torch", str(error)
    if not fused.runs_on(device):
        return "torch", f"its kernels need a CUDA or ROCm device, and the model is on {device}"
    if dtype not in fused.DTYPES:
        return "torch", f"its kernels do not work on {dtype}"
    if torch.is_grad_enabled():
        return "torch", "its kernels give no gradients; torch.no_grad() lets them be used"
    return "triton", None


def operations(backend: str) -> ModuleType:
    """The module that holds the operations: ``reference``, or ``fused`` for ``triton``."""
    if backend != "triton":
        return reference
    from . import fused

    return fused
