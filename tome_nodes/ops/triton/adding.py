"""Tokens plus the change of their slots."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .launching import Launch, launch, wrap_triton
from .operators import operator
from .shared import BLOCK_CHANNELS, BLOCK_ROWS, BLOCK_WARPS, require_tokens


@triton.jit(do_not_specialize=("tokens", "all_tokens"))
def add_change_kernel(
    x,
    before,
    after,
    slot_of_token,
    result,
    stride_sample,
    stride_token,
    stride_channel,
    tokens,
    channels,
    all_tokens,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``x`` plus the change of its slots, for ``TOKENS`` tokens in ``CHANNELS`` channels.

    The grid is blocks of tokens by blocks of channels. ``before``, ``after`` and ``result`` are
    contiguous. The whole batch has ``all_tokens`` tokens, one sample ``tokens``.
    """
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_token = token < all_tokens
    mask = is_token[:, None] & (channel < channels)[None, :]
    slot = tl.load(slot_of_token + token, mask=is_token, other=0)
    change = slot[:, None] * channels + channel[None, :]
    own = token // tokens * stride_sample + token % tokens * stride_token
    value = tl.load(x + own[:, None] + channel[None, :] * stride_channel, mask=mask, other=0.0).to(
        tl.float32
    )
    value += tl.load(after + change, mask=mask, other=0.0).to(tl.float32)
    value -= tl.load(before + change, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        result + token[:, None] * channels + channel[None, :],
        value.to(result.dtype.element_ty),
        mask=mask,
    )


def _shapes(x, before, after, slot_of_token):
    return x.new_empty(x.shape)


@operator(_shapes, reference.add_change)
def add_change(x: Tensor, before: Tensor, after: Tensor, slot_of_token: Tensor) -> Tensor:
    """``x`` plus the change of its slots, as :func:`tome_nodes.ops.reference.add_change`.

    Tensors are of float32, float16 or bfloat16, of any strides; sums are in float32.
    """
    how = _launch_of(x.shape, x.dtype)
    result = _shapes(x, before, after, slot_of_token)
    tensors = x, before.contiguous(), after.contiguous(), slot_of_token, result
    launch(wrap_triton(add_change_kernel), how, tensors, x.stride())
    return result


@lru_cache(maxsize=64)
def _launch_of(shape: torch.Size, dtype: torch.dtype) -> Launch:
    """How the kernel is launched for tokens of this shape and dtype."""
    require_tokens(shape, dtype, "x")
    batch, tokens, channels = shape
    grid = -(-batch * tokens // BLOCK_ROWS), -(-channels // BLOCK_CHANNELS), 1
    numbers = tokens, channels, batch * tokens, BLOCK_ROWS, BLOCK_CHANNELS
    return Launch(grid, numbers, BLOCK_WARPS)
