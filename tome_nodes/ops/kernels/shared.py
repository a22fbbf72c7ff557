"""Parts that several kernels and their launchers share."""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The dtypes that the kernels accept; they sum and compare in float32."""

# Rows and channels of one program: 16 bytes a thread in half precision, whole cache lines.
BLOCK_ROWS, BLOCK_CHANNELS, BLOCK_WARPS = 8, 64, 2


def require_tokens(x: Tensor, name: str) -> None:
    """Raise a ValueError that names ``x`` if no kernel accepts it."""
    if x.ndim != 3 or x.dtype not in DTYPES:
        raise ValueError(
            f"{name} is {tuple(x.shape)} of {x.dtype}: it must be [batch, tokens, channels] of "
            "float32, float16 or bfloat16"
        )


def strides(x: Tensor) -> dict[str, int]:
    """The strides of ``[batch, tokens, channels]``, by the kernels' parameter names."""
    names = ("stride_sample", "stride_token", "stride_channel")
    return dict(zip(names, x.stride(), strict=True))


def padded(count: int) -> int:
    """The next power of two that Triton's matrix product accepts."""
    return max(16, 1 << (count - 1).bit_length())


@triton.jit
def slot_extent(offsets, slot, is_slot, slots, all_tokens):
    """Where slots begin in the order, and how many tokens they hold; 0 beyond the last slot.

    ``slots`` and ``all_tokens`` are of the whole batch.
    """
    start = tl.load(offsets + slot, mask=is_slot, other=0)
    end = tl.load(offsets + slot + 1, mask=slot + 1 < slots, other=all_tokens)
    return start, tl.where(is_slot, end - start, 0)


@triton.jit
def load_of_slots(
    x,
    order,
    start,
    size,
    index,
    channel,
    is_channel,
    stride_sample,
    stride_token,
    stride_channel,
    tokens,
):
    """Token ``index`` of each slot in float32; 0 for a slot that holds fewer."""
    is_held = index < size
    token = tl.load(order + start + index, mask=is_held, other=0)
    place = token // tokens * stride_sample + token % tokens * stride_token
    return tl.load(
        x + place[:, None] + channel[None, :] * stride_channel,
        mask=is_held[:, None] & is_channel[None, :],
        other=0.0,
    ).to(tl.float32)
