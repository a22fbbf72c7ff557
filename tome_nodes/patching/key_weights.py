"""Make a host's attention function weigh a merged key as much as its tokens together.

If a merged key stands for n equal keys, adding log n to its logits gives the same softmax as the n
keys would. These logarithms, called *sizes* here, are added by a mask, or by extra channels in
queries and keys. Which of the two is used depends on the function, the channels of a head and
the device, all known before the model runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from .. import reasons
from ..ops import Operations
from ..ops.reference import EXTRA_CHANNELS

Attention = Callable[..., Tensor]

Way = Literal["mask", "channels"]
"""How an attention function gets the sizes."""

# PyTorch's attention, as ComfyUI calls it.
_PYTORCH = "attention_pytorch"

# Attention functions of ComfyUI that add a mask at little cost.
_TAKE_MASK = frozenset(
    {
        *(_PYTORCH, "attention_basic", "attention_comfy_kitchen_int8"),
        *("attention_split", "attention_sub_quad"),
    }
)
# Those that take no mask, or are slow with one; they get extra channels.
_TAKE_CHANNELS = frozenset({"attention_flash", "attention_xformers"})

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


@dataclass(frozen=True)
class Capabilities:
    """Which of PyTorch's attentions run on a device in some dtype.

    Attributes:
        flash: flash attention, which takes no mask.
        cudnn: cuDNN's attention, which is fast with a mask, too.
    """

    flash: bool = False
    cudnn: bool = False


def capabilities(device: torch.device, dtype: torch.dtype) -> Capabilities:
    """What runs on a device. It asks the device, so it must not be called in a compiled model."""
    is_gpu = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    if not is_gpu or torch.cuda.get_device_properties(device).major < _FIRST_WITH_FLASH:
        return Capabilities()
    cuda = torch.backends.cuda
    return Capabilities(
        flash=cuda.is_flash_attention_available(),
        cudnn=torch.version.hip is None
        and torch.backends.cudnn.is_available()
        and cuda.cudnn_sdp_enabled(),
    )


def way_of(
    function: str, head_channels: int, capable: Capabilities, may_widen: bool = True
) -> Way | None:
    """How an attention function gets the sizes; None if it cannot.

    In PyTorch's attention, a mask rules out flash attention. The call then goes to cuDNN, which was
    faster with a mask than flash with extra channels wherever both were timed, or to a kernel that
    takes twice as long. Extra channels cost time where the head then needs a larger kernel of
    flash: from 64 to 96 channels, half as much again.

    Args:
        function: name of the attention function.
        head_channels: the number of channels of a head.
        capable: what the device runs.
        may_widen: whether queries and keys can get extra channels.
    """
    if function in _TAKE_CHANNELS:
        return "channels" if may_widen else None
    if function not in _TAKE_MASK:
        return None
    uses_cudnn = capable.cudnn and head_channels <= _MOST_WITH_CUDNN
    is_slow = function == _PYTORCH and capable.flash and not uses_cudnn
    return "channels" if is_slow and may_widen and head_channels in _HEADS_WITH_ROOM else "mask"


@dataclass(eq=False)
class KeyWeights:
    """What the merged keys of one attention weigh, or of all self-attentions of a stack.

    Attributes:
        sizes: ``[batch, keys]`` in the dtype of the keys, to add to their logits.
        ops: the operations that add extra channels.
        capable: what the device runs.
        note: called with the reason why the keys weigh as one token each, or with None if they do
            not.
        mask: the sizes as a mask, once it was needed.
        masked: the attention function that got this mask.
    """

    sizes: Tensor
    ops: Operations
    capable: Capabilities
    note: Callable[[str | None], None]
    mask: Tensor | None = None
    masked: Attention | None = None


def fits(weights: KeyWeights, k: Any) -> bool:
    """Whether there is a size for every key; keys are in a layout of :func:`attend`."""
    # Later versions of ComfyUI may pass keys in a container.
    return (
        isinstance(k, Tensor)
        and k.shape[0] == weights.sizes.shape[0]
        and k.shape[-2] == weights.sizes.shape[1]
    )


def attend(
    weights: KeyWeights | None,
    func: Attention,
    theirs: Callable[..., Tensor] | None,
    bias: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    kwargs: dict[str, Any],
) -> Tensor:
    """Call an attention function, through an override by other code if there is one.

    Queries, keys and values are in the host's layouts: ``[batch, tokens, heads * channels]``, or
    with ``skip_reshape`` ``[batch, heads, tokens, channels]``.

    Args:
        weights: what the keys weigh; None for one token each.
        func: the attention function.
        theirs: an override by other code, called with ``func`` before the other arguments; None if
            there is none. It may ignore ``func``, so it also gets the sizes as a mask.
        bias: a mask to add to the logits, without the sizes; None for none.
        q: queries.
        k: keys.
        v: values.
        heads: the number of heads of the queries.
        kwargs: the other arguments of the function.
    """
    if weights is None:
        call = func if theirs is None else partial(theirs, func)
        return call(q, k, v, heads, mask=bias, **kwargs)
    if bias is None and theirs is None and func is weights.masked:
        return func(q, k, v, heads, mask=weights.mask, **kwargs)
    weights.note(None)
    if theirs is None:
        return weighed(weights, func, bias, None, q, k, v, heads, kwargs)
    given = _mask(weights, bias)

    def ours(
        q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        # A mask of their own is used as it is.
        if mask is not None and mask is not given:
            return func(q, k, v, heads, mask=mask, **kwargs)
        if not fits(weights, k):
            weights.note(reasons.CALLED_DIFFERENTLY)
            return func(q, k, v, heads, mask=bias, **kwargs)
        return weighed(weights, func, bias, mask, q, k, v, heads, kwargs)

    return theirs(ours, q, k, v, heads, mask=given, **kwargs)


def weighed(
    weights: KeyWeights,
    func: Attention,
    bias: Tensor | None,
    mask: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    kwargs: dict[str, Any],
) -> Tensor:
    """Call ``func`` with the sizes added to its logits, in the way that is fastest for it.

    ``bias`` is the mask without the sizes, and ``mask`` the one with them if it is there already.
    """
    name = getattr(func, "__name__", "an unknown attention function")
    by_head = bool(kwargs.get("skip_reshape"))
    head_channels = q.shape[-1] if by_head else q.shape[-1] // heads
    # Extra channels need as many heads in keys as in queries, and a copy of tensors by head.
    same_heads = q.shape[1] == k.shape[1] if by_head else q.shape[2] == k.shape[2]
    may_widen = bias is None and same_heads and not (by_head and name in _TAKE_MASK)
    way = way_of(name, head_channels, weights.capable, may_widen)
    if way == "channels":
        return _in_channels(weights, func, q, k, v, heads, **kwargs)
    if way is None:
        weights.note(f"{name} takes no weights")
        return func(q, k, v, heads, mask=bias, **kwargs)
    if mask is None:
        mask = _mask(weights, bias)
        if bias is None:
            weights.masked = func
    return func(q, k, v, heads, mask=mask, **kwargs)


def _in_channels(
    weights: KeyWeights,
    func: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Attention whose logits get the sizes from extra channels in queries and keys.

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
    q, k, v = weights.ops.widen(q, k, v, weights.sizes, heads, scale, constant)
    out = func(q, k, v, heads, **kwargs)
    out = out.reshape(*out.shape[:2], heads, wider).narrow(3, 0, channels)
    return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)


def _mask(weights: KeyWeights, bias: Tensor | None) -> Tensor:
    """A mask that adds sizes to the logits, and the bias if there is one."""
    if weights.mask is None:
        weights.mask = weights.sizes[:, None, None]
    return weights.mask if bias is None else bias + weights.mask.to(bias.dtype)


def flat(x: Tensor, by_head: bool) -> Tensor:
    """``x`` as ``[batch, tokens, heads * channels]``, from any layout of a host."""
    if by_head:
        x = x.transpose(1, 2)
    # Values may be [batch, tokens, heads, channels] although queries and keys are flat.
    return x if x.ndim == 3 else x.flatten(2)
