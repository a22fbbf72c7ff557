"""A plan: a partition of N tokens into M slots, with merge and unmerge."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import TORCH, Operations


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
