"""On what the operations of a plan run: plain torch, or Triton kernels where they can be had."""

from typing import Protocol

import torch
from torch import Tensor

from . import reference


class Operations(Protocol):
    """What the module of a backend offers.

    That is :mod:`tome_nodes.ops.reference` of plain torch, which describes the functions, or
    :mod:`tome_nodes.ops.kernels` of Triton, which has ``match_windows`` besides.

    A plan's arrays count tokens and slots over the whole batch: sample b's tokens are
    ``b * tokens`` and on, its slots ``b * slots`` and on.

    * ``slot_of_token``: ``[batch, tokens]`` int64, the slot of each token.
    * ``order``: ``[batch * tokens]`` int64, tokens slot by slot.
    * ``offsets``: ``[batch * slots]`` int64, where each slot begins in ``order``.
    """

    NAME: str
    """``torch`` or ``triton``."""

    def merge(self, x: Tensor, slot_of_token: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        """See :func:`tome_nodes.ops.reference.merge`."""

    def merge_keys(
        self,
        x: Tensor,
        slot_of_token: Tensor,
        order: Tensor,
        offsets: Tensor,
        heads: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`tome_nodes.ops.reference.merge_keys`."""

    def unmerge(self, y: Tensor, slot_of_token: Tensor, /) -> Tensor:
        """See :func:`tome_nodes.ops.reference.unmerge`."""

    def add_change(self, x: Tensor, before: Tensor, after: Tensor, slot_of_token: Tensor) -> Tensor:
        """See :func:`tome_nodes.ops.reference.add_change`."""

    def widen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_sizes: Tensor,
        heads: int,
        scale: float,
        constant: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :func:`tome_nodes.ops.reference.widen`."""


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
        from . import kernels
    except ImportError as error:
        return "torch", str(error)
    if not kernels.runs_on(device):
        return "torch", f"its kernels need a CUDA or ROCm device, and the model is on {device}"
    if dtype not in kernels.DTYPES:
        return "torch", f"its kernels do not work on {dtype}"
    if torch.is_grad_enabled():
        return "torch", "its kernels give no gradients; torch.no_grad() lets them be used"
    return "triton", None


def operations(backend: str) -> Operations:
    """The operations of a backend: of Triton for ``triton``, else of plain torch."""
    if backend != "triton":
        return reference
    from . import kernels

    return kernels
