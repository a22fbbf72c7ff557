"""A plan: a partition of N tokens into M slots, with merge and unmerge."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import TORCH, Operations
from .layout import Grid, Layout


class Plan:
    """A partition of each sample's tokens into slots. Every slot holds at least one token.

    Attributes:
        slot_count: number of slots M in each sample.
    """

    slot_count: int

    def slots(self) -> Tensor:
        """The slot of each token, ``[batch, tokens]`` int64, from 0 to ``slot_count - 1``."""
        raise NotImplementedError

    def log_sizes(self) -> Tensor:
        """The logarithm of how many tokens each slot holds, ``[batch, slots]`` float32."""
        raise NotImplementedError

    def fits(self, x: Tensor) -> bool:
        """Whether ``x`` is ``[batch, tokens, channels]`` with the plan's batch and tokens."""
        raise NotImplementedError

    def merge(self, x: Tensor) -> Tensor:
        """The mean of each slot: ``[batch, tokens, channels]`` to ``[batch, slots, channels]``."""
        raise NotImplementedError

    def merge_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means, from which queries and values are projected, and what keys are projected from.

        ``[batch, tokens, channels]`` to two ``[batch, slots, channels]``.
        """
        return self.merge(x), self.merge_keys(x, 1)

    def merge_keys(self, k: Tensor, heads: int) -> Tensor:
        """The keys of the slots, from ``[batch, tokens, heads * channels]``."""
        return self.merge(k)

    def unmerge(self, y: Tensor) -> Tensor:
        """Copy slots to tokens: ``[batch, slots, channels]`` to ``[batch, tokens, channels]``."""
        raise NotImplementedError

    def add_change(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """``x + unmerge(after - before)``: the change of each slot, added to its tokens."""
        return x + self.unmerge(after - before)


@dataclass(frozen=True, eq=False)
class SlotPlan(Plan):
    """A plan that holds the slot of each token.

    Attributes:
        slot_of_token: ``[batch, tokens]`` int64, slots numbered over the whole batch.
        order: ``[batch * tokens]`` int64, tokens numbered over the whole batch, slot by slot.
        offsets: ``[batch * slots]`` int64, where each slot begins in ``order``.
        log_size_of_slot: ``[batch, slots]`` float32.
        slot_count: see :class:`Plan`.
        ops: the operations that merge and unmerge.
        window: the width of the grid, and the height and width of a window, in tokens. None unless
            every slot lies within one window and all windows have equally many slots. Slots are
            then numbered window by window, row by row, followed by the tokens that fill no window.
    """

    slot_of_token: Tensor
    order: Tensor
    offsets: Tensor
    log_size_of_slot: Tensor
    slot_count: int
    ops: Operations
    window: tuple[int, int, int] | None = None

    @classmethod
    def from_slots(cls, slots: Tensor, slot_count: int, ops: Operations = TORCH) -> "SlotPlan":
        """Build a plan from the slot of each token, ``[batch, tokens]`` int64.

        Every slot must hold at least one token. This is not checked: reading the values would make
        the program wait for the GPU.
        """
        batch = slots.shape[0]
        slot_of_token = slots + torch.arange(batch, device=slots.device)[:, None] * slot_count
        in_order, order = slot_of_token.flatten().sort(stable=True)
        offsets = torch.searchsorted(
            in_order, torch.arange(batch * slot_count, device=slots.device)
        )
        sizes = torch.diff(offsets, append=offsets.new_full((1,), len(order)))
        log_size_of_slot = sizes.log().view(batch, slot_count)
        return cls(slot_of_token, order, offsets, log_size_of_slot, slot_count, ops)

    @classmethod
    def from_owners(cls, owners: Tensor, slot_count: int, ops: Operations = TORCH) -> "SlotPlan":
        """Build a plan from the token that each token merges into, ``[batch, tokens]`` int64.

        A token that stays, whether or not others merge into it, is its own owner. ``slot_count`` is
        the number of owners, equal in all samples. Slots are in the order of their owners.
        """
        stays = owners == torch.arange(owners.shape[1], device=owners.device)
        return cls.from_slots((stays.cumsum(1) - 1).gather(1, owners), slot_count, ops)

    def slots(self) -> Tensor:
        batch = torch.arange(len(self.slot_of_token), device=self.slot_of_token.device)
        return self.slot_of_token - batch[:, None] * self.slot_count

    def log_sizes(self) -> Tensor:
        return self.log_size_of_slot

    def fits(self, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[:2] == self.slot_of_token.shape

    def merge(self, x: Tensor) -> Tensor:
        return self.ops.merge(x, self.slot_of_token, self.order, self.offsets, self.window)

    def merge_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means; for keys, means stretched to the mean length of their tokens.

        A mean is shorter than its tokens, and attention to a shorter key is less sharp (Kim et al.,
        ToFu, WACV 2024). Stretching values as well would increase the error.
        """
        return self._merge_keys(x, 1)

    def merge_keys(self, k: Tensor, heads: int) -> Tensor:
        """Means, stretched in each head to the mean length of the merged keys."""
        _, keys = self._merge_keys(k, heads)
        return keys

    def _merge_keys(self, x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        return self.ops.merge_keys(
            x, self.slot_of_token, self.order, self.offsets, heads, self.window
        )

    def unmerge(self, y: Tensor) -> Tensor:
        return self.ops.unmerge(y, self.slot_of_token)

    def add_change(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        return self.ops.add_change(x, before, after, self.slot_of_token)


@dataclass(frozen=True, eq=False)
class KeptPlan(Plan):
    """A plan in which nothing merges: each token has a slot of its own."""

    batch: int
    slot_count: int
    device: torch.device

    def slots(self) -> Tensor:
        return torch.arange(self.slot_count, device=self.device).expand(self.batch, -1)

    def log_sizes(self) -> Tensor:
        return torch.zeros(self.batch, self.slot_count, device=self.device)

    def fits(self, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[:2] == (self.batch, self.slot_count)

    def merge(self, x: Tensor) -> Tensor:
        return x

    def unmerge(self, y: Tensor) -> Tensor:
        return y


@dataclass(frozen=True, eq=False)
class SequencePlan(Plan):
    """The plans of consecutive pieces of a sequence, whose slots follow each other.

    Attributes:
        batch: number of samples.
        lengths: number of tokens of each piece.
        plans: the plan of each piece.
        slot_count: see :class:`Plan`.
    """

    batch: int
    lengths: tuple[int, ...]
    plans: tuple[Plan, ...]
    slot_count: int

    @classmethod
    def of(cls, batch: int, pieces: Sequence[tuple[int, Plan]]) -> "SequencePlan":
        """A plan for ``batch`` samples, from the number of tokens and the plan of each piece."""
        lengths, plans = zip(*pieces, strict=True)
        return cls(batch, lengths, plans, sum(plan.slot_count for plan in plans))

    def slots(self) -> Tensor:
        slots, first = [], 0
        for plan in self.plans:
            slots.append(plan.slots() + first)
            first += plan.slot_count
        return torch.cat(slots, 1)

    def log_sizes(self) -> Tensor:
        return torch.cat([plan.log_sizes() for plan in self.plans], 1)

    def fits(self, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[:2] == (self.batch, sum(self.lengths))

    def merge(self, x: Tensor) -> Tensor:
        return torch.cat([plan.merge(piece) for plan, piece in self._split(x)], 1)

    def merge_keys(self, k: Tensor, heads: int) -> Tensor:
        return torch.cat([plan.merge_keys(piece, heads) for plan, piece in self._split(k)], 1)

    def unmerge(self, y: Tensor) -> Tensor:
        pieces = y.split([plan.slot_count for plan in self.plans], 1)
        unmerged = [plan.unmerge(piece) for plan, piece in zip(self.plans, pieces, strict=True)]
        return torch.cat(unmerged, 1)

    def _split(self, x: Tensor) -> list[tuple[Plan, Tensor]]:
        return list(zip(self.plans, x.split(list(self.lengths), 1), strict=True))


def plan_of_sequence(
    layout: Layout, features: Tensor, plan_of: Callable[[Tensor, Grid], Plan | None]
) -> Plan | None:
    """The plan of a sequence: each picture merges within itself, and everything else is kept.

    Of a video, each of the :attr:`tome_nodes.merging.layout.Grid.parts` merges within itself.

    Args:
        layout: where the pictures are; it has at least one.
        features: ``[batch, tokens, channels]`` of the whole sequence.
        plan_of: makes the plan of a picture; None if nothing would merge.

    Returns:
        None if no picture merges.
    """
    batch, length, device = len(features), features.shape[1], features.device
    pieces: list[tuple[int, Plan]] = []
    done = 0
    for span in layout.spans:
        start = span.start
        for grid in span.grid.parts:
            plan = plan_of(features[:, start : start + grid.tokens], grid)
            if plan is not None:
                if start > done:
                    pieces.append((start - done, KeptPlan(batch, start - done, device)))
                pieces.append((grid.tokens, plan))
                done = start + grid.tokens
            start += grid.tokens
    if not pieces:
        return None
    if length > done:
        pieces.append((length - done, KeptPlan(batch, length - done, device)))
    return pieces[0][1] if len(pieces) == 1 else SequencePlan.of(batch, pieces)
