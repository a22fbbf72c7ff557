"""Let an attention function of a host weigh each key by the tokens that it stands for.

If key j stands for n_j equal keys, softmax over all of them is softmax over the merged keys with
log n_j added to the logits. There are three ways to add them: a mask, further channels of queries
and keys, and a kernel of our own in place of the function. Which one is fastest depends on the
function and on the GPU. One is the default; measuring may show that another is faster.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..ops import Operations
from ..ops.reference import FURTHER
from .blocks import Block

Attention = Callable[..., Tensor]

# PyTorch's attention, as ComfyUI and diffusers call it.
_PYTORCH = frozenset({"attention_pytorch", "native"})

# Attention functions that add a mask cheaply: PyTorch's, ComfyUI's, and backends of diffusers.
_TAKE_MASK = _PYTORCH | {
    *("attention_basic", "attention_comfy_kitchen_int8", "attention_split", "attention_sub_quad"),
    *("flex", "_native_cudnn", "_native_efficient", "_native_math"),
}
# Those that take no mask, or are slow with one.
_TAKE_CHANNELS = frozenset(
    {
        *("attention_flash", "attention_xformers"),
        *("flash", "flash_hub", "_flash_3", "_flash_3_hub", "_native_flash", "xformers"),
    }
)

# Channels of a head for which PyTorch's flash attention has a kernel; others are padded to these.
_FLASH_HEADS = (32, 64, 96, 128, 192, 256)

_HEADS_WITH_ROOM = frozenset(
    channels
    for channels in range(1, _FLASH_HEADS[-1] + 1)
    if not any(channels <= kernel < channels + FURTHER for kernel in _FLASH_HEADS)
)
"""Channels of a head to which further ones can be added without needing a larger kernel."""

_MOST_WITH_CUDNN = 128
"""Channels of a head that cuDNN's attention takes."""

_FIRST_WITH_FLASH = 8
"""Ampere's major version of compute capability; those of AMD's GPUs are higher, from 9 on."""

_KNOWN_ARGUMENTS = frozenset(
    {
        "_inside_attn_wrapper",
        "attn_precision",
        "enable_gqa",
        "low_precision_attention",
        "scale",
        "skip_output_reshape",
        "skip_reshape",
        "transformer_options",
    }
)
"""Those of an attention function that mean the same, or nothing, to our kernel."""


CALLED_DIFFERENTLY = "another node changes how the attention is called"
"""The reason for unweighted keys if there are no sizes that fit."""


class Variant(str, Enum):
    """How an attention function gets the sizes."""

    MASK = "mask"
    CHANNELS = "channels"
    KERNEL = "kernel"


@dataclass(frozen=True)
class Capabilities:
    """What runs fast on a device in some dtype.

    Attributes:
        flash: PyTorch's flash attention, which takes no mask.
        cudnn: cuDNN's attention, which is as fast with a mask.
        kernel: :func:`tome_nodes.ops.triton.attend`.
    """

    flash: bool = False
    cudnn: bool = False
    kernel: bool = False


def variant_of(
    function: str,
    head_channels: int,
    capable: Capabilities,
    may_widen: bool = True,
    may_replace: bool = True,
) -> Variant | None:
    """The fastest way to weigh keys, None if there is none.

    In PyTorch's attention, a mask leaves flash for another kernel: cuDNN's, about as fast, or else
    one that takes twice as long. Further channels keep flash, but cost time where they take a head
    to a larger kernel: from 64 to 96, half as much again. Our kernel takes up to a quarter more
    than flash.

    Args:
        function: name of the attention function.
        head_channels: those of a head.
        capable: what the device runs fast.
        may_widen: whether queries and keys can get further channels.
        may_replace: whether our kernel can take the place of the function.
    """
    if function not in _TAKE_MASK | _TAKE_CHANNELS:
        return None
    takes_mask = function in _TAKE_MASK
    if takes_mask and not (function in _PYTORCH and capable.flash):
        return Variant.MASK
    if may_widen and head_channels in _HEADS_WITH_ROOM:
        return Variant.CHANNELS
    if takes_mask and capable.cudnn and head_channels <= _MOST_WITH_CUDNN:
        return Variant.MASK
    if may_replace and capable.kernel and head_channels <= _FLASH_HEADS[-1]:
        return Variant.KERNEL
    if takes_mask:
        return Variant.MASK
    return Variant.CHANNELS if may_widen else None


def variants_of(
    function: str, head_channels: int, capable: Capabilities, may_widen: bool, may_replace: bool
) -> list[Variant]:
    """All ways to weigh keys, for the arguments of :func:`variant_of`."""
    possible = {
        Variant.MASK: function in _TAKE_MASK,
        Variant.CHANNELS: may_widen,
        Variant.KERNEL: may_replace and capable.kernel and head_channels <= _FLASH_HEADS[-1],
    }
    return [variant for variant, is_possible in possible.items() if is_possible]


def capabilities(q: Tensor, ops: Operations) -> Capabilities:
    """What runs fast where queries are, in their dtype."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return Capabilities()
    return _capabilities(q.device, ops.name == "triton")


@lru_cache(maxsize=16)
def _capabilities(device: torch.device, has_kernels: bool) -> Capabilities:
    """What runs fast on a GPU in half precision; asking it takes longer than a launch."""
    is_new = torch.cuda.get_device_properties(device).major >= _FIRST_WITH_FLASH
    is_nvidia = torch.version.hip is None
    cuda = torch.backends.cuda
    return Capabilities(
        flash=is_new and cuda.is_flash_attention_available(),
        cudnn=is_new
        and is_nvidia
        and torch.backends.cudnn.is_available()
        and cuda.cudnn_sdp_enabled(),
        # On AMD's GPUs it spills registers, and there a mask is as fast.
        kernel=is_new and is_nvidia and has_kernels,
    )


def attend(
    block: Block,
    func: Attention,
    theirs: Callable[..., Tensor] | None,
    bias: Tensor | None,
    log_sizes: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    kwargs: dict[str, Any],
) -> Tensor:
    """Call an attention function, through the override of other code if there is one.

    Args:
        block: the one that attends, which notes why its keys are not weighed.
        func: the attention function.
        theirs: the override of other code, which is called with ``func`` in front of its arguments.
            It may ignore that function, so it also gets the sizes as a mask. None for none.
        bias: the mask without the sizes, to add to the logits; None for none.
        log_sizes: ``[batch, keys]``, to add to the logits; None for none.
        q: queries, as for :func:`weighed`; so are keys and values.
        k: keys.
        v: values.
        heads: the number of heads of the queries.
        kwargs: the other arguments of the function.
    """
    if theirs is None:
        if log_sizes is None:
            return func(q, k, v, heads, mask=bias, **kwargs)
        return weighed(block, func, bias, log_sizes, q, k, v, heads, **kwargs)
    mask = bias
    if log_sizes is not None:
        mask = with_sizes(bias, log_sizes)
        block.note_unweighted(None)
        func = partial(weighed, block, func, bias, log_sizes, given=mask)
    return theirs(func, q, k, v, heads, mask=mask, **kwargs)


def weighed(
    block: Block,
    func: Attention,
    bias: Tensor | None,
    log_sizes: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    given: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """``func`` with ``log_sizes`` added to its logits, in the way that is fastest for it.

    Queries, keys and values are in the host's layouts: ``[batch, tokens, heads * channels]``, or
    with ``skip_reshape`` ``[batch, heads, tokens, channels]``. ``bias`` is the mask without the
    sizes, ``given`` the one with them that another node's override got, and ``mask`` what it passes
    on, which is used if it is another.
    """
    if mask is not None and mask is not given:
        return func(q, k, v, heads, mask=mask, **kwargs)
    ops, tuner = block.ops, block.tuner
    if not has_keys(k, log_sizes):
        block.note_unweighted(CALLED_DIFFERENTLY)
        return func(q, k, v, heads, mask=bias, **kwargs)
    name = getattr(func, "__name__", "an unknown attention function")
    by_head = bool(kwargs.get("skip_reshape"))
    head_channels = q.shape[-1] if by_head else q.shape[-1] // heads
    # Queries may have more heads than keys, and heads of their own would have to be copied.
    may_widen = bias is None and _same_heads(q, k, by_head) and not (by_head and name in _TAKE_MASK)
    is_plain = k.shape == v.shape and q.dtype == k.dtype == v.dtype
    may_replace = is_plain and bias is None and kwargs.keys() <= _KNOWN_ARGUMENTS
    capable = capabilities(q, ops)
    default = variant_of(name, head_channels, capable, may_widen, may_replace)
    if default is None:
        block.note_unweighted(f"{name} takes no weights")
        return func(q, k, v, heads, mask=bias, **kwargs)
    block.note_unweighted(None)

    def attend_by(variant: str) -> Tensor:
        if variant == Variant.CHANNELS:
            return _in_channels(func, log_sizes, ops, q, k, v, heads, **kwargs)
        if variant == Variant.KERNEL:
            return _in_kernel(log_sizes, ops, q, k, v, head_channels, **kwargs)
        own = with_sizes(bias, log_sizes) if mask is None else mask
        return func(q, k, v, heads, mask=own, **kwargs)

    def variants() -> Mapping[str, Callable[[], Tensor]]:
        possible = variants_of(name, head_channels, capable, may_widen, may_replace)
        return {each.value: partial(attend_by, each.value) for each in possible}

    # What another node's override does is not tried out.
    if mask is not None or tuner is None:
        return attend_by(default)
    call = (
        *("weights", name, q.shape, k.shape, k.shape[-2] % 8 == 0, heads, by_head),
        *(k.is_contiguous(), may_widen, may_replace, kwargs.get("attn_precision") is not None),
    )
    return attend_by(tuner.variant(q, call, default.value, variants))


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
    if kwargs.get("scale") is not None:
        scale, constant = 1.0, 1 / kwargs["scale"]
    else:
        kwargs.pop("scale", None)
        scale, constant = (wider / channels) ** 0.5, wider**0.5
    q, k, v = ops.widen(q, k, v, log_sizes, heads, scale, constant)
    out = func(q, k, v, heads, **kwargs)
    out = out.reshape(*out.shape[:2], heads, wider).narrow(3, 0, channels)
    return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)


def _in_kernel(
    log_sizes: Tensor,
    ops: Operations,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_channels: int,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """Attention by a kernel that adds ``log_sizes`` to its logits."""

    def by_token(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if skip_reshape else x.unflatten(2, (-1, head_channels))

    scale = head_channels**-0.5 if scale is None else scale
    out = ops.attend(by_token(q), by_token(k), by_token(v), log_sizes, scale)
    return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)


def with_sizes(bias: Tensor | None, log_sizes: Tensor) -> Tensor:
    """A mask that adds the sizes to the logits, and a bias, if there is one."""
    mask = log_sizes.view(log_sizes.shape[0], 1, 1, -1)
    return mask if bias is None else bias + mask.to(bias.dtype)


def flat(x: Tensor, by_head: bool) -> Tensor:
    """``x`` as ``[batch, tokens, heads * channels]``, from any layout of the host."""
    if by_head:
        x = x.transpose(1, 2)
    # Values may be [batch, tokens, heads, channels] although queries and keys are flat.
    return x if x.ndim == 3 else x.flatten(2)


def has_keys(k: Tensor, log_sizes: Tensor) -> bool:
    """Whether there is a size for each key, in the host's layouts."""
    return k.shape[0] == log_sizes.shape[0] and k.shape[-2] == log_sizes.shape[1]


def _same_heads(q: Tensor, k: Tensor, by_head: bool) -> bool:
    return q.shape[1] == k.shape[1] if by_head else q.shape[2] == k.shape[2]
