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
from .reference import Call, Ways

Case = tuple[Hashable, ...]
"""Calls that take about as long: the same as texts and whole numbers."""


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


def case_of(call: Call) -> Case:
    """The case of a call: its numbers of tokens and slots count to an eighth.

    These are all but the last of a size, and the only one of an index.
    """
    parts: list[Hashable] = []
    for part in call:
        if not isinstance(part, torch.Size):
            parts.append(part)
        elif len(part) == 1:
            parts.append(_about(part[0]))
        else:
            parts += [*part[:-2], _about(part[-2]), part[-1]]
    return tuple(parts)


def _about(count: int) -> int:
    digits = max(0, count.bit_length() - 4)
    return count >> digits << digits


Choose = Callable[[torch.device, Case, str, Ways], Probed | None]
"""Chooses a way of a case on a device, given the default; None if it cannot be done now."""


_Key = tuple[Call, str, torch.dtype, bool]


class ChoosingOperations:
    """Operations that take the fastest way of each case.

    Under torch.compile they take the default.

    Attributes:
        NAME: that of ``ops``.
        choices: what was chosen so far, by the case.
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
        # By the call itself: rounding its sizes each time would cost as much as a launch.
        self._taken: dict[_Key, str] = {}

    def chosen(self, x: Tensor, call: Call, default: str, ways: Ways) -> str:
        """See :func:`tome_nodes.ops.reference.chosen`."""
        if torch.compiler.is_compiling():
            return default
        key = call, default, x.dtype, x.is_contiguous()
        return self._taken.get(key) or self._take(key, x, ways)

    def _take(self, key: _Key, x: Tensor, ways: Ways) -> str:
        call, default, dtype, is_contiguous = key
        case = (*case_of(call), default, is_contiguous, str(dtype).removeprefix("torch."))
        probed = self._choose(x.device, case, default, ways)
        if probed is None:
            return default
        self.choices[case] = probed
        self._taken[key] = probed.way
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
        arguments = x, slot_of_token, order, offsets, window
        call = "merge", x.shape, offsets.shape, window is not None
        return self._ops_for(call, arguments).merge(*arguments)

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
        arguments = x, slot_of_token, order, offsets, heads, window
        call = "merge_keys", x.shape, offsets.shape, heads, window is not None
        return self._ops_for(call, arguments).merge_keys(*arguments)

    def add_change(self, x: Tensor, before: Tensor, after: Tensor, slot_of_token: Tensor) -> Tensor:
        """See :func:`tome_nodes.ops.reference.add_change`."""
        arguments = x, before, after, slot_of_token
        call = "add_change", x.shape, before.shape
        return self._ops_for(call, arguments).add_change(*arguments)

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
        arguments = q, k, v, log_sizes, heads, scale, constant
        call = "widen", q.shape, k.shape, heads
        return self._ops_for(call, arguments).widen(*arguments)

    def _ops_for(self, call: Call, arguments: tuple[Any, ...]) -> Operations:
        """The backend or plain torch, for the operation that a call begins with."""
        if not self._may_use_torch:
            return self._ops

        def ways() -> Mapping[str, Callable[[], object]]:
            both = (self._ops, reference)
            return {each.NAME: partial(getattr(each, str(call[0])), *arguments) for each in both}

        way = self.chosen(arguments[0], call, self.NAME, ways)
        return reference if way == reference.NAME else self._ops
