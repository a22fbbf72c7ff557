"""A plan: the partition of N tokens into M slots, with merge and unmerge."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Devices whose embedding_bag sums each slot in a fixed order, without atomics.
_BAG_DEVICES = frozenset({"cpu", "cuda", "xpu"})


@dataclass(frozen=True, eq=False)
class Plan:
    """Which slot each token belongs to; every slot holds at least one token.

    Attributes:
        slots: ``[batch, tokens]`` int64, the slot of each token, from 0 to ``slot_count - 1``.
        slot_count: number of slots M.
        rows: ``[batch * tokens]`` int64, the slot of each token counted over the whole batch.
        members: ``[batch * tokens]`` int64, tokens counted over the whole batch, slot by slot.
        starts: ``[batch * slots]`` int64, where each slot begins in ``members``.
    """

    slots: Tensor
    slot_count: int
    rows: Tensor
    members: Tensor
    starts: Tensor

    @classmethod
    def from_slots(cls, slots: Tensor, slot_count: int) -> "Plan":
        """Build a plan from the slot of each token, ``[batch, tokens]`` int64.

        Every slot must hold at least one token; this is not checked, since looking at the values
        would make a GPU wait.
        """
        batch = slots.shape[0]
        first_row = torch.arange(batch, device=slots.device)[:, None] * slot_count
        rows = (slots + first_row).flatten()
        sorted_rows, members = rows.sort(stable=True)
        starts = torch.searchsorted(
            sorted_rows, torch.arange(batch * slot_count, device=slots.device)
        )
        return cls(slots, slot_count, rows, members, starts)

    @classmethod
    def from_owners(cls, owners: Tensor, slot_count: int) -> "Plan":
        """Build a plan from the token that each token merges into, ``[batch, tokens]`` int64.

        A token that stays owns itself, and owners stay. ``slot_count`` is the number of tokens
        that stay, the same in each sample. Slots keep the order of their owners.
        """
        stays = owners == torch.arange(owners.shape[1], device=owners.device)
        return cls.from_slots((stays.cumsum(1) - 1).gather(1, owners), slot_count)

    def fits(self, x: Tensor) -> bool:
        """Whether ``x`` is ``[batch, tokens, channels]`` of the plan's batch and tokens."""
        return x.ndim == 3 and x.shape[:2] == self.slots.shape

    def merge(self, x: Tensor) -> Tensor:
        """The mean of each slot: ``[batch, tokens, channels]`` to ``[batch, slots, channels]``."""
        batch, _, channels = x.shape
        tokens = x.reshape(-1, channels)
        if x.device.type in _BAG_DEVICES:
            means = F.embedding_bag(self.members, tokens, self.starts, mode="mean")
        else:
            sums = tokens.new_zeros(batch * self.slot_count, channels, dtype=torch.float32)
            sizes = torch.diff(self.starts, append=self.starts.new_tensor([self.rows.numel()]))
            sums.index_add_(0, self.rows, tokens.float())
            means = (sums / sizes[:, None]).to(x.dtype)
        return means.view(batch, self.slot_count, channels)

    def unmerge(self, y: Tensor) -> Tensor:
        """Each token's slot: ``[batch, slots, channels]`` to ``[batch, tokens, channels]``."""
        batch, _, channels = y.shape
        return y.reshape(-1, channels).index_select(0, self.rows).view(batch, -1, channels)
