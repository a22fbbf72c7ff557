"""Attention to keys that stand for several tokens."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .shared import HALF, operator, padded

_LOG2_OF_E = tl.constexpr(math.log2(math.e))
_WARPS, _STAGES = 8, 2

MOST_CHANNELS = 256
"""The most channels of a head for which the kernel keeps everything in registers."""


@triton.jit(do_not_specialize=("queries", "keys"))
def attend_kernel(
    q,
    k,
    v,
    log_sizes,
    out,
    stride_q_sample,
    stride_q_token,
    stride_q_head,
    stride_k_sample,
    stride_k_token,
    stride_k_head,
    stride_v_sample,
    stride_v_token,
    stride_v_head,
    queries,
    keys,
    heads,
    heads_of_key,
    scale,
    HEAD_CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Softmax attention of ``QUERIES`` queries of one head, ``KEYS`` keys at a time.

    The grid is blocks of queries by heads of all samples. ``heads_of_key`` heads of the queries
    share one head of the keys. The kernel takes powers of 2, not of e: ``scale`` already contains
    log2(e), and the logarithms of the sizes are multiplied by it here. Channels are next to each
    other; ``out`` is contiguous ``[batch, queries, heads, channels]``.
    """
    head = (tl.program_id(1) % heads).to(tl.int64)
    sample = (tl.program_id(1) // heads).to(tl.int64)
    key_head = head // heads_of_key
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    channel = tl.arange(0, PADDED)
    lane = tl.arange(0, KEYS)
    is_query = query < queries
    is_channel = channel < HEAD_CHANNELS
    own = tl.load(
        q
        + sample * stride_q_sample
        + head * stride_q_head
        + query[:, None].to(tl.int64) * stride_q_token
        + channel[None, :],
        mask=is_query[:, None] & is_channel[None, :],
        other=0.0,
    )
    k += sample * stride_k_sample + key_head * stride_k_head
    v += sample * stride_v_sample + key_head * stride_v_head
    of_k = k + (lane * stride_k_token)[:, None] + channel[None, :]
    of_v = v + (lane * stride_v_token)[:, None] + channel[None, :]
    log_sizes += sample * keys + lane
    greatest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    values = tl.zeros((QUERIES, PADDED), tl.float32)
    for first in range(0, keys, KEYS):
        passed = tl.cast(first, tl.int64)
        is_key = first + lane < keys
        held = is_key[:, None] & is_channel[None, :]
        theirs = tl.load(of_k + passed * stride_k_token, mask=held, other=0.0)
        logits = tl.dot(own, tl.trans(theirs)) * scale
        weight = tl.load(log_sizes + first, mask=is_key, other=float("-inf")).to(tl.float32)
        logits += (weight * _LOG2_OF_E)[None, :]
        higher = tl.maximum(greatest, tl.max(logits, axis=1))
        shares = tl.exp2(logits - higher[:, None])
        fading = tl.exp2(greatest - higher)
        total = total * fading + tl.sum(shares, axis=1)
        theirs = tl.load(of_v + passed * stride_v_token, mask=held, other=0.0)
        values = tl.dot(shares.to(theirs.dtype), theirs, values * fading[:, None])
        greatest = higher
    values = values / total[:, None]
    row = (sample * queries + query) * heads + head
    tl.store(
        out + row[:, None] * HEAD_CHANNELS + channel[None, :],
        values.to(out.dtype.element_ty),
        mask=is_query[:, None] & is_channel[None, :],
    )


def _shapes(q, k, v, log_sizes, scale):
    return q.new_empty(q.shape)


@operator(_shapes, reference.attend)
def attend(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor, scale: float) -> Tensor:
    """Attention with a weight for each key; see :func:`tome_nodes.ops.reference.attend`.

    Args:
        q: ``[batch, queries, heads, channels]`` of float16 or bfloat16, at most
            :data:`MOST_CHANNELS`; channels that are not next to each other are copied.
        k: ``[batch, keys, key_heads, channels]`` of the same dtype; ``heads`` is a multiple of
            ``key_heads``.
        v: the same.
        log_sizes: ``[batch, keys]``, of these dtypes or float32.
        scale: factor for the products of queries and keys.

    Returns:
        Contiguous ``[batch, queries, heads, channels]`` of the dtype of ``q``. Sums are in float32.
    """
    batch, queries, heads, channels = q.shape
    keys, key_heads = k.shape[1:3]
    if q.dtype not in HALF or {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: they must all be float16 or "
            "bfloat16"
        )
    if channels > MOST_CHANNELS:
        raise ValueError(f"a head has {channels} channels: at most {MOST_CHANNELS} are allowed")
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, channels) or heads % key_heads:
        raise ValueError(
            f"q, k and v are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}: k and v must "
            "be alike, and their heads a divisor of those of q"
        )
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    lanes = padded(channels)
    # Masks of padded channels take registers, too.
    at_once = 128 if lanes == 128 or lanes == channels < 128 else 64
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        attend_kernel[(-(-queries // at_once), batch * heads)](
            q=q,
            k=k,
            v=v,
            log_sizes=log_sizes.contiguous(),
            out=out,
            **{
                f"stride_{name}_{along}": x.stride(index)
                for name, x in (("q", q), ("k", k), ("v", v))
                for index, along in enumerate(("sample", "token", "head"))
            },
            queries=queries,
            keys=keys,
            heads=heads,
            heads_of_key=heads // key_heads,
            scale=scale * _LOG2_OF_E.value,
            HEAD_CHANNELS=channels,
            PADDED=lanes,
            QUERIES=at_once,
            KEYS=64 if lanes <= 128 else 32,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return out
