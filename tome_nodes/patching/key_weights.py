"""Make an attention function of a host weigh each merged key as much as its tokens together.

If a merged key stands for n equal keys, adding log n to its logits gives the same softmax as the n
keys would. There are three ways to add these logarithms, called *sizes* here: a mask, extra
channels in queries and keys, or a kernel of our own instead of the function. Which one is fastest
depends on the function and the GPU. One is the default; measuring may show that another is faster.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..ops import Operations
from ..ops.reference import EXTRA_CHANNELS
from .blocks import Block

Attention = Callable[..., Tensor]

# PyTorch's attention, as ComfyUI and diffusers call it.
_PYTORCH = frozenset({"attention_pytorch", "native"})

# Attention functions that add a mask at little cost: those of PyTorch, ComfyUI and diffusers.
_TAKE_MASK = _PYTORCH | {
    *("attention_basic", "attention_comfy_kitchen_int8", "attention_split", "attention_sub_quad"),
    *("flex", "_native_cudnn", "_native_efficient", "_native_math"),
}
# Attention functions that take no mask, or are slow with one; they get extra channels.
_TAKE_CHANNELS = frozenset(
    {
        *("attention_flash", "attention_xformers"),
        *("flash", "flash_hub", "_flash_3", "_flash_3_hub", "_native_flash", "xformers"),
    }
)

# The channels of a head for which PyTorch's flash attention has kernels; it pads others to these.
_FLASH_HEADS = (32, 64, 96, 128, 192, 256)

_HEADS_WITH_ROOM = frozenset(
    channels
    for channels in range(1, _FLASH_HEADS[-1] + 1)
    if not any(channels <= kernel < channels + EXTRA_CHANNELS for kernel in _FLASH_HEADS)
)
"""The channels of a head to which extra channels can be added without needing a larger kernel."""

_MOST_WITH_CUDNN = 128
"""The most channels of a head that cuDNN's attention takes."""

_FIRST_WITH_FLASH = 8
"""The major compute capability of Ampere, the first with flash attention. AMD's GPUs report 9 or
more."""

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
"""The arguments of an attention function that our kernel follows or may ignore."""

CALLED_DIFFERENTLY = "another node changes how the attention is called"
"""The reason for unweighted keys if the sizes do not fit the keys."""


class Variant(str, Enum):
    """How an attention function gets the sizes."""

    MASK = "mask"
    CHANNELS = "channels"
    KERNEL = "kernel"


@dataclass(frozen=True)
class Capabilities:
    """Which kinds of attention run fast on a device in some dtype.

    Attributes:
        flash: PyTorch's flash attention, which takes no mask.
        cudnn: cuDNN's attention, which is as fast with a mask as without.
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
    """The way to weigh keys that should be fastest; None if there is none.

    In PyTorch's attention, a mask rules out flash attention: the call goes to cuDNN, which is about
    as fast, or to a kernel that takes twice as long. Extra channels allow flash attention, but cost
    time where the head then needs a larger kernel: from 64 to 96 channels, half as much again. Our
    kernel takes up to a quarter longer than flash attention.

    Args:
        function: name of the attention function.
        head_channels: the number of channels of a head.
        capable: what the device runs fast.
        may_widen: whether queries and keys can get extra channels.
        may_replace: whether our kernel can run instead of the function.
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
    """All ways to weigh keys; the arguments are those of :func:`variant_of`."""
    possible = {
        Variant.MASK: function in _TAKE_MASK,
        Variant.CHANNELS: may_widen,
        Variant.KERNEL: may_replace and capable.kernel and head_channels <= _FLASH_HEADS[-1],
    }
    return [variant for variant, is_possible in possible.items() if is_possible]


def capabilities(q: Tensor, ops: Operations) -> Capabilities:
    """What runs fast on the device of the queries, in their dtype."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return Capabilities()
    return _capabilities(q.device, ops.name == "triton")


@lru_cache(maxsize=16)
def _capabilities(device: torch.device, has_kernels: bool) -> Capabilities:
    """What runs fast on a GPU in half precision; cached, since asking is slower than a launch."""
    is_new = torch.cuda.get_device_properties(device).major >= _FIRST_WITH_FLASH
    is_nvidia = torch.version.hip is None
    cuda = torch.backends.cuda
    return Capabilities(
        flash=is_new and cuda.is_flash_attention_available(),
        cudnn=is_new
        and is_nvidia
        and torch.backends.cudnn.is_available()
        and cuda.cudnn_sdp_enabled(),
        # On AMD's GPUs the kernel spills registers, and a mask is as fast.
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
    """Call an attention function, through an override by other code if there is one.

    Args:
        block: the block that attends; it notes why its keys are not weighed.
        func: the attention function.
        theirs: an override by other code, called with ``func`` before the other arguments; None if
            there is none. It may ignore ``func``, so it also gets the sizes as a mask.
        bias: a mask to add to the logits, without the sizes; None for none.
        log_sizes: ``[batch, keys]``, to add to the logits; None for none.
        q: queries. They, keys and values are in the layouts of :func:`weighed`.
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
    """Call ``func`` with ``log_sizes`` added to its logits, in the way that is fastest for it.

    Queries, keys and values are in the host's layouts: ``[batch, tokens, heads * channels]``, or
    with ``skip_reshape`` ``[batch, heads, tokens, channels]``.

    Masks are added to the logits. ``bias`` is the mask without the sizes. If another node's
    override makes the call, ``given`` is the mask with the sizes that it got, and ``mask`` the one
    that it passes on. If ``mask`` is not ``given``, the override's own mask is used as it is.
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
    # Extra channels need as many heads in keys as in queries, and a copy of tensors by head.
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

    # An override of another node is not called several times to measure it.
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
    """Attention whose logits get ``log_sizes`` from extra channels in queries and keys.

    ``func`` divides the logits by the root of the channels of a head, which are now more. Queries
    are scaled to make up for that.
    """
    q, k, v = (flat(x, skip_reshape) for x in (q, k, v))
    channels = q.shape[2] // heads
    wider = channels + EXTRA_CHANNELS
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
    """A mask that adds the sizes to the logits, and the bias if there is one."""
    mask = log_sizes.view(log_sizes.shape[0], 1, 1, -1)
    return mask if bias is None else bias + mask.to(bias.dtype)


def flat(x: Tensor, by_head: bool) -> Tensor:
    """``x`` as ``[batch, tokens, heads * channels]``, from any layout of a host."""
    if by_head:
        x = x.transpose(1, 2)
    # Values may be [batch, tokens, heads, channels] although queries and keys are flat.
    return x if x.ndim == 3 else x.flatten(2)


def has_keys(k: Tensor, log_sizes: Tensor) -> bool:
    """Whether there is a size for each key; ``k`` is in a layout of :func:`weighed`."""
    return k.shape[0] == log_sizes.shape[0] and k.shape[-2] == log_sizes.shape[1]


def _same_heads(q: Tensor, k: Tensor, by_head: bool) -> bool:
    return q.shape[1] == k.shape[1] if by_head else q.shape[2] == k.shape[2]
