"""Operations that may be carried out in several ways, of which the fastest is to be taken.

Only implementations are chosen here. What merges follows from the settings alone.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import Operations, reference

Case = tuple[Hashable, ...]
"""What is done, and after that all that its time depends on, as texts and whole numbers."""

Ways = Callable[[], Mapping[str, Callable[[], object]]]
"""Makes the ways to do the same, by name; to call one is to do it once."""


@dataclass(frozen=True)
class Probed:
    """A way that was chosen from several by their time.

    Attributes:
        way: its name.
        default: the name of the way that is taken where nothing is measured.
        seconds: of the ways that ran, by name.
    """

    way: str
    default: str
    seconds: Mapping[str, float]


def about(count: int) -> int:
    """A number of tokens or slots, to about an eighth, so that nearly equal ones are one case."""
    # What is compiled for any size has symbols for numbers, and nothing is chosen there.
    if torch.compiler.is_compiling():
        return count
    digits = max(0, count.bit_length() - 4)
    return count >> digits << digits


def _sizes(x: Tensor) -> tuple[int, int, int]:
    batch, tokens, channels = x.shape
    return batch, about(tokens), channels


Choose = Callable[[torch.device, Case, str, Ways], Probed | None]
"""Chooses a way of a case on a device, given the default; None if it cannot be done now."""


class ChoosingOperations:
    """Operations that take the fastest way of each case.

    Under torch.compile they take the default.

    Attributes:
        NAME: that of ``ops``.
        choices: what was chosen so far.
    """

    def __init__(self, ops: Operations, choose: Choose, may_use_torch: bool):
        """Let ``choose`` choose the ways.

        Args:
            ops: the operations of a backend.
            choose: chooses; asked once for each case.
            may_use_torch: whether plain torch may take the place of any of ``ops``.
        """
        self.NAME = ops.NAME
        self.choices: dict[Case, Probed] = {}
        self.attend = ops.attend
        self.unmerge = ops.unmerge
        self._ops = ops
        self._choose = choose
        self._may_use_torch = may_use_torch and ops.NAME != reference.NAME

    def chosen(self, x: Tensor, case: Case, default: str, ways: Ways) -> str:
        """See :func:`tome_nodes.ops.reference.chosen`."""
        if torch.compiler.is_compiling():
            return default
        case = (*case, default, x.is_contiguous(), x.dtype)
        probed = self.choices.get(case)
        if probed is None:
            of_texts = (*case[:-1], str(x.dtype).removeprefix("torch."))
            probed = self._choose(x.device, of_texts, default, ways)
            if probed is None:
                return default
            self.choices[case] = probed
        return probed.way

    def merge(
        self,
        x: Tensor,
        slot_of_token: Tensor,
        order: Tensor,
        offsets: Tensor,
        window: Sequence[int] | None = None,
    ) -> Tensor:
        """See :func:`tome_nodes.ops.reference.merge`."""
        case = "merge", *_sizes(x), about(len(offsets)), window is not None
        merged: Tensor = self._run(case, x, slot_of_token, order, offsets, window)
        return merged

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
        case = "merge_keys", *_sizes(x), about(len(offsets)), heads, window is not None
        merged: tuple[Tensor, Tensor] = self._run(
            case, x, slot_of_token, order, offsets, heads, window
        )
        return merged

    def add_change(self, x: Tensor, before: Tensor, after: Tensor, slot_of_token: Tensor) -> Tensor:
        """See :func:`tome_nodes.ops.reference.add_change`."""
        case = "add_change", *_sizes(x), about(before.shape[1])
        added: Tensor = self._run(case, x, before, after, slot_of_token)
        return added

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
        case = "widen", *_sizes(q), about(k.shape[1]), heads
        wider: tuple[Tensor, Tensor, Tensor] = self._run(
            case, q, k, v, log_sizes, heads, scale, constant
        )
        return wider

    def _run(self, case: Case, *arguments: Any) -> Any:
        """Run the operation that a case begins with, by the backend or by plain torch."""
        ops, name = self._ops, case[0]
        if self._may_use_torch:

            def ways() -> Mapping[str, Callable[[], object]]:
                both = (self._ops, reference)
                return {each.NAME: partial(getattr(each, str(name)), *arguments) for each in both}

            if self.chosen(arguments[0], case, self.NAME, ways) == reference.NAME:
                ops = reference
        return getattr(ops, str(name))(*arguments)
