"""Tell an attention function of the host how many tokens each key stands for.

If key j stands for n_j equal keys, softmax over all of them is softmax over the merged keys with
log n_j added to the logits. There are two ways to add them: a mask, and further channels of queries
and keys. Which one is faster depends on the function and on the GPU.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ...ops import Operations
from ...ops.reference import FURTHER

Attention = Callable[..., Tensor]
Note = Callable[[str | None], None]

# Attention functions of the host that add a mask cheaply.
_TAKE_MASK = frozenset(
    {"attention_basic", "attention_split", "attention_sub_quad", "attention_pytorch"}
)
# Those that take no mask, or are slow with one.
_TAKE_CHANNELS = frozenset({"attention_flash", "attention_xformers"})

# Channels of a head for which PyTorch's flash attention has a kernel; others are padded to these.
_FLASH_HEADS = (32, 64, 96, 128, 192, 256)

_FIRST_WITH_FLASH = 8
"""Ampere, as CUDA counts; AMD's GPUs count higher, from 9 on."""


class Way(Enum):
    """How an attention function is told the sizes."""

    MASK = "mask"
    CHANNELS = "channels"


def way_of(
    function: str,
    head_channels: int,
    has_flash: bool,
    may_widen: bool = True,
) -> Way | None:
    """The fastest way to weigh keys, None if there is none.

    In PyTorch's attention, a mask leaves flash for another kernel, about as fast on new GPUs and
    half as fast on old ones. Further channels keep flash, but cost time where they take a head to
    a larger kernel: from 64 to 96, half as much again.

    Args:
        function: name of the host's attention function.
        head_channels: those of a head.
        has_flash: whether PyTorch would take flash attention without a mask.
        may_widen: whether queries and keys can get further channels.
    """
    if function in _TAKE_CHANNELS and may_widen:
        return Way.CHANNELS
    if function not in _TAKE_MASK:
        return None
    wider = head_channels + FURTHER
    is_free = wider <= _FLASH_HEADS[-1] and _kernel_for(wider) == _kernel_for(head_channels)
    if function == "attention_pytorch" and has_flash and may_widen and is_free:
        return Way.CHANNELS
    return Way.MASK


def _kernel_for(head_channels: int) -> int:
    """The channels of the flash kernel that runs heads of so many; at most 256."""
    return next(channels for channels in _FLASH_HEADS if channels >= head_channels)


def _has_flash(q: Tensor) -> bool:
    """Whether PyTorch would take flash attention for queries, if there is no mask."""
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.float16, torch.bfloat16)
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_properties(q.device).major >= _FIRST_WITH_FLASH
    )


def weighed(
    func: Attention,
    bias: Tensor | None,
    log_sizes: Tensor,
    ops: Operations,
    note: Note,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """``func`` with ``log_sizes`` added to its logits, in the way that is fastest for it.

    Queries, keys and values are in the host's layouts: ``[batch, tokens, heads * channels]``, or
    with ``skip_reshape`` ``[batch, heads, tokens, channels]``. ``bias`` is the mask without the
    sizes, and ``mask`` the one with them, unless the override that calls this passes another.
    """
    if not has_keys(k, log_sizes):
        note("another node changes how the attention is called")
        return func(q, k, v, heads, mask=bias, **kwargs)
    name = getattr(func, "__name__", "an unknown attention function")
    by_head = bool(kwargs.get("skip_reshape"))
    # Queries may have more heads than keys, and heads of their own would have to be copied.
    may_widen = bias is None and _same_heads(q, k, by_head)
    has_flash = not by_head and _has_flash(q)
    head_channels = q.shape[-1] if by_head else q.shape[-1] // heads
    way = way_of(name, head_channels, has_flash, may_widen)
    if way is None:
        note(f"{name} takes no weights")
        return func(q, k, v, heads, mask=bias, **kwargs)
    note(None)
    if way is Way.CHANNELS:
        return _in_channels(func, log_sizes, ops, q, k, v, heads, **kwargs)
    return func(q, k, v, heads, mask=log_sizes[:, None, None] if mask is None else mask, **kwargs)


def _in_channels(
    func: Attention,
    log_sizes: Tensor,
    ops: Operations,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Attention whose logits get ``log_sizes`` from extra channels of queries and keys.

    ``func`` divides the logits by the root of the head dimension, which is now larger. Queries are
    scaled to make up for it.
    """
    q, k, v = (flat(x, skip_reshape) for x in (q, k, v))
    channels = q.shape[2] // heads
    wider = channels + FURTHER
    if "scale" in kwargs:
        scale, constant = 1.0, 1 / kwargs["scale"]
    else:
        scale, constant = (wider / channels) ** 0.5, wider**0.5
    q, k, v = ops.widen(q, k, v, log_sizes, heads, scale, constant)
    out = func(q, k, v, heads, **kwargs).unflatten(2, (heads, wider))[..., :channels]
    return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)


def flat(x: Tensor, by_head: bool) -> Tensor:
    """``x`` as ``[batch, tokens, heads * channels]``, from any layout of the host."""
    if by_head:
        x = x.transpose(1, 2)
    # Values may be [batch, tokens, heads, channels] although queries and keys are flat.
    return x if x.ndim == 3 else x.flatten(2)


def has_keys(k: Tensor, log_sizes: Tensor) -> bool:
    """Whether there is a size for each key, in the host's layouts."""
    return (len(k), k.shape[-2]) == tuple(log_sizes.shape)


def _same_heads(q: Tensor, k: Tensor, by_head: bool) -> bool:
    return q.shape[1] == k.shape[1] if by_head else q.shape[2] == k.shape[2]
