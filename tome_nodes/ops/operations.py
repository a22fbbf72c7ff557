"""The operations that a backend provides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Operation = Callable[..., Any]


class KernelFailed(Exception):
    """A kernel cannot be compiled or launched, and plain torch has no function in its place."""


@dataclass(frozen=True)
class Operations:
    """Functions that do the same on any backend; :mod:`tome_nodes.ops.reference` documents them.

    Attributes:
        name: ``torch`` or ``triton``.
        merge: :func:`tome_nodes.ops.reference.merge`.
        merge_keys: :func:`tome_nodes.ops.reference.merge_keys`.
        unmerge: :func:`tome_nodes.ops.reference.unmerge`.
        add_change: :func:`tome_nodes.ops.reference.add_change`.
        widen: :func:`tome_nodes.ops.reference.widen`.
        match_windows: :func:`tome_nodes.ops.triton.match_windows`; None if there is no kernel.
    """

    name: str
    merge: Operation
    merge_keys: Operation
    unmerge: Operation
    add_change: Operation
    widen: Operation
    match_windows: Operation | None = None

    def without_fallback(self) -> "Operations":
        """The same, but a kernel that fails raises its error."""
        # The wrapper around a launcher falls back to torch.
        parts = {name: getattr(part, "__wrapped__", part) for name, part in vars(self).items()}
        return Operations(**parts)
