"""A plan: a partition of the N tokens of a grid into M slots, with merge and unmerge."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import TORCH, Operations


class Grid(NamedTuple):
    """The size of a feature map in tokens. Tokens are in order of frame, row and column.

    Attributes:
        height: tokens down.
        width: tokens across.
        frames: number of frames, 1 for a picture.
    """

    height: int
    width: int
    frames: int = 1

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    def cells(self, sy: int, sx: int) -> "Grid":
        """How many whole cells of ``sy`` by ``sx`` tokens fit, down and across."""
        return Grid(self.height // sy, self.width // sx)

    def downsampled(self, times: int) -> "Grid":
        """The grid of a UNet's feature map that is ``times`` smaller; each halving rounds up."""
        return Grid(-(-self.height // times), -(-self.width // times), self.frames)


@dataclass(eq=False)
class Plan:
    """A partition of a sample's tokens into slots, for every sample. No slot is empty.

    Nothing changes a plan. The class is not frozen, since many plans are made, and frozen ones take
    longer to make.

    Attributes:
        slot_of_token: ``[batch, tokens]`` int64, slots numbered over the whole batch.
        order: ``[batch * tokens]`` int64, tokens numbered over the whole batch, slot by slot.
        offsets: ``[batch * slots]`` int64, where the slots begin in ``order``.
        log_sizes: ``[batch, slots]``, the logarithm of how many tokens a slot holds; float32 or the
            dtype of the tokens.
        slot_count: number of slots M in a sample.
        ops: the operations that merge and unmerge.
        window: the width of the grid, and the height and width of a window, in tokens. None unless
            every slot lies within one window and all windows have equally many slots. Slots are
            then numbered window by window, row by row, followed by the tokens that fill no window.
    """

    slot_of_token: Tensor
    order: Tensor
    offsets: Tensor
    log_sizes: Tensor
    slot_count: int
    ops: Operations
    window: tuple[int, int, int] | None = None

    @classmethod
    def from_slots(cls, slots: Tensor, slot_count: int, ops: Operations = TORCH) -> "Plan":
        """Build a plan from the slot of each token, ``[batch, tokens]`` int64.

        Every slot must hold at least one token. This is not checked: reading the values would make
        the program wait for the GPU.
        """
        batch = slots.shape[0]
        every = torch.arange(batch * slot_count + 1, device=slots.device)
        slot_of_token = slots + every[:-1:slot_count, None]
        in_order, order = slot_of_token.flatten().sort(stable=True)
        bounds = torch.searchsorted(in_order, every)
        offsets = bounds[:-1]
        log_sizes = bounds.diff().log().view(batch, slot_count)
        return cls(slot_of_token, order, offsets, log_sizes, slot_count, ops)

    @classmethod
    def from_owners(cls, owners: Tensor, slot_count: int, ops: Operations = TORCH) -> "Plan":
        """Build a plan from the token that each token merges into, ``[batch, tokens]`` int64.

        A token that stays, whether or not others merge into it, is its own owner. ``slot_count`` is
        the number of owners, equal in all samples. Slots are in the order of their owners.
        """
        stays = owners == torch.arange(owners.shape[1], device=owners.device)
        return cls.from_slots((stays.cumsum(1) - 1).gather(1, owners), slot_count, ops)

    def slots(self) -> Tensor:
        """The slot of each token, ``[batch, tokens]`` int64, from 0 to ``slot_count - 1``."""
        batch = torch.arange(len(self.slot_of_token), device=self.slot_of_token.device)
        return self.slot_of_token - batch[:, None] * self.slot_count

    def fits(self, x: Tensor) -> bool:
        """Whether ``x`` is ``[batch, tokens, channels]`` with the plan's batch and tokens."""
        return x.ndim == 3 and x.shape[:2] == self.slot_of_token.shape

    def merge(self, x: Tensor) -> Tensor:
        """The means of slots: ``[batch, tokens, channels]`` to ``[batch, slots, channels]``."""
        return self.ops.merge(x, self.slot_of_token, self.order, self.offsets, self.window)

    def merge_keys(self, x: Tensor, heads: int = 1) -> tuple[Tensor, Tensor]:
        """The means, and the means stretched, per head, to the mean length of their tokens.

        The first are for values, the second for keys: a mean is shorter than its tokens, and
        attention to a shorter key is less sharp (Kim et al., ToFu, WACV 2024). Stretching values as
        well would increase the error.

        ``[batch, tokens, heads * channels]`` to two ``[batch, slots, heads * channels]``.
        """
        return self.ops.merge_keys(
            x, self.slot_of_token, self.order, self.offsets, heads, self.window
        )

    def unmerge(self, y: Tensor) -> Tensor:
        """Copy slots to tokens: ``[batch, slots, channels]`` to ``[batch, tokens, channels]``."""
        return self.ops.unmerge(y, self.slot_of_token)

    def add_change(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """``x + unmerge(after - before)``: tokens plus the change of their slots."""
        return self.ops.add_change(x, before, after, self.slot_of_token)
