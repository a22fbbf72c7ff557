"""The backends of a plan's operations: plain torch, or Triton kernels where available."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from . import reference


class Operations(Protocol):
    """The functions of a backend's module.

    :mod:`tome_nodes.ops.reference` is plain torch and documents the functions.
    :mod:`tome_nodes.ops.triton` is Triton and also has ``match_windows``.

    A plan's arrays number tokens and slots over the whole batch: those of sample ``b`` start at
    ``b * tokens`` and ``b * slots``.

    * ``slot_of_token``: ``[batch, tokens]`` int64, the slot of each token.
    * ``order``: ``[batch * tokens]`` int64, the tokens slot by slot.
    * ``offsets``: ``[batch * slots]`` int64, where each slot begins in ``order``.
    """

    NAME: str
    """``torch`` or ``triton``."""

    def chosen(self, x: Tensor, call: reference.Call, default: str, ways: reference.Ways) -> str:
        """See :func:`tome_nodes.ops.reference.chosen`."""

    def merge(
        self,
        x: Tensor,
        slot_of_token: Tensor,
        order: Tensor,
        offsets: Tensor,
        window: Sequence[int] | None = None,
    ) -> Tensor:
        """See :func:`tome_nodes.ops.reference.merge`."""

    def merge_keys(
        self,
        x: Tensor,
        slot_of_token: Tensor,
        order: Tensor,
        offsets: Tensor,
        heads: int = 1,
        window: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`tome_nodes.ops.reference.merge_keys`."""

    def unmerge(self, y: Tensor, slot_of_token: Tensor, /) -> Tensor:
        """See :func:`tome_nodes.ops.reference.unmerge`."""

    def add_change(self, x: Tensor, before: Tensor, after: Tensor, slot_of_token: Tensor) -> Tensor:
        """See :func:`tome_nodes.ops.reference.add_change`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor, scale: float) -> Tensor:
        """See :func:`tome_nodes.ops.reference.attend`."""

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
        device: device of the tokens.
        dtype: dtype of the tokens.

    Returns:
        The backend, and the reason if it is not ``triton`` although that was asked for, or ``auto``
        on a GPU; otherwise None.
    """
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch", None
    try:
        from . import triton as kernels
    except Exception as error:
        # A Triton that does not fit PyTorch or the system raises anything.
        return "torch", f"{type(error).__name__}: {error}".partition("\n")[0]
    if not kernels.runs_on(device):
        return "torch", f"its kernels need a CUDA or ROCm device, and the model is on {device}"
    if dtype not in kernels.DTYPES:
        return "torch", f"its kernels do not work on {dtype}"
    if torch.is_grad_enabled():
        return "torch", "its kernels give no gradients; torch.no_grad() lets them be used"
    return "triton", None


def operations(backend: str) -> Operations:
    """The module of a backend: Triton's for ``triton``, otherwise plain torch."""
    if backend != "triton":
        return reference
    from . import triton as kernels

    return kernels
