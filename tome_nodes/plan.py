"""A plan: the partition of N tokens into M slots, with merge and unmerge."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from .ops import reference


@dataclass(frozen=True, eq=False)
class Plan:
    """Which slot each token belongs to; every slot holds at least one token.

    Attributes:
        rows: ``[batch, tokens]`` int64, the slot of each token counted over the whole batch.
        members: ``[batch * tokens]`` int64, tokens counted over the whole batch, slot by slot.
        starts: ``[batch * slots]`` int64, where each slot begins in ``members``.
        log_sizes: ``[batch, slots]`` float32, the logarithm of how many tokens each slot holds.
        slot_count: number of slots M of a sample.
        ops: :mod:`tome_nodes.ops.reference` or :mod:`tome_nodes.ops.kernels`.
    """

    rows: Tensor
    members: Tensor
    starts: Tensor
    log_sizes: Tensor
    slot_count: int
    ops: ModuleType = reference

    @classmethod
    def from_slots(cls, slots: Tensor, slot_count: int, ops: ModuleType = reference) -> "Plan":
        """Build a plan from the slot of each token, ``[batch, tokens]`` int64.

        Every slot must hold at least one token; this is not checked, since looking at the values
        would make a GPU wait.
        """
        batch = slots.shape[0]
        rows = slots + torch.arange(batch, device=slots.device)[:, None] * slot_count
        sorted_rows, members = rows.flatten().sort(stable=True)
        starts = torch.searchsorted(
            sorted_rows, torch.arange(batch * slot_count, device=slots.device)
        )
        sizes = torch.diff(starts, append=starts.new_full((1,), len(members)))
        log_sizes = sizes.log().view(batch, slot_count)
        return cls(rows, members, starts, log_sizes, slot_count, ops)

    @classmethod
    def from_owners(cls, owners: Tensor, slot_count: int, ops: ModuleType = reference) -> "Plan":
        """Build a plan from the token that each token merges into, ``[batch, tokens]`` int64.

        A token that stays owns itself, and owners stay. ``slot_count`` is the number of tokens
        that stay, the same in each sample. Slots keep the order of their owners.
        """
        stays = owners == torch.arange(owners.shape[1], device=owners.device)
        return cls.from_slots((stays.cumsum(1) - 1).gather(1, owners), slot_count, ops)

    @property
    def slots(self) -> Tensor:
        """The slot of each token, ``[batch, tokens]`` int64, from 0 to ``slot_count - 1``."""
        batch = torch.arange(len(self.rows), device=self.rows.device)
        return self.rows - batch[:, None] * self.slot_count

    def fits(self, x: Tensor) -> bool:
        """Whether ``x`` is ``[batch, tokens, channels]`` of the plan's batch and tokens."""
        return x.ndim == 3 and x.shape[:2] == self.rows.shape

    def merge(self, x: Tensor) -> Tensor:
        """The mean of each slot: ``[batch, tokens, channels]`` to ``[batch, slots, channels]``."""
        return self.ops.merge(x, self.rows, self.members, self.starts)

    def merge_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What queries, keys and values are made of: means, for keys as long as their tokens are.

        A mean is shorter than what it is the mean of, and a shorter key is attended to less
        sharply (Kim et al., ToFu, WACV 2024). Values stretched so would be farther off.

        ``[batch, tokens, channels]`` to three ``[batch, slots, channels]``.
        """
        means, keys = self.ops.merge_keys(x, self.rows, self.members, self.starts)
        return means, keys, means

    def unmerge(self, y: Tensor) -> Tensor:
        """Each token's slot: ``[batch, slots, channels]`` to ``[batch, tokens, channels]``."""
        return self.ops.unmerge(y, self.rows)

    def add_change(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """``x + unmerge(after - before)``: tokens, and what their slots went through."""
        return self.ops.add_change(x, before, after, self.rows)
