"""Make a host's attention function weigh a merged key as much as its tokens together.

If a merged key stands for n equal keys, adding log n to its logits gives the same softmax as the n
keys would. These logarithms, called *sizes* here, are added by a mask, or by extra channels in
queries and keys. Which of the two it is depends on the function (which is tried first), the
channels of a head, and the device. All of these are known before the model runs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import reasons
from ..ops import Operations
from ..ops.reference import EXTRA_CHANNELS
from .attention_trial import Attention, Tried, Way, in_channels, try_out

# PyTorch's attention, as ComfyUI calls it.
_PYTORCH = "attention_pytorch"

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
        # PyTorch 2.4 cannot be asked.
        flash=getattr(cuda, "is_flash_attention_available", lambda: True)(),
        cudnn=torch.version.hip is None
        and torch.backends.cudnn.is_available()
        and cuda.cudnn_sdp_enabled(),
    )


@dataclass(eq=False)
class Ways:
    """How attention functions weigh keys on one device, in one dtype.

    Attributes:
        device: the device.
        dtype: the dtype.
        capable: what the device runs.
        known: the results of the functions that were tried.
    """

    device: torch.device
    dtype: torch.dtype
    capable: Capabilities
    known: dict[Attention, Tried] = field(default_factory=dict)

    def prepare(self, functions: Iterable[Attention]) -> None:
        """Try functions before a model runs; within a compiled model, none can be tried.

        Raises:
            torch.OutOfMemoryError: the device has no room for tiny tensors.
        """
        for function in functions:
            self.known[function] = try_out(function, self.device, self.dtype)


@dataclass(eq=False)
class KeyWeights:
    """What merged keys weigh in one attention, or in all self-attentions of a stack.

    Attributes:
        sizes: ``[batch, keys]`` in the dtype of the keys, to add to their logits.
        ops: the operations that add extra channels.
        ways: how attention functions weigh keys on the device.
        note: called with the reason why each key weighs as one token, or with None if keys are
            weighed.
        mask: the sizes as a mask; None until it is needed.
        masked: the attention functions that take this mask.
    """

    sizes: Tensor
    ops: Operations
    ways: Ways
    note: Callable[[str | None], None]
    mask: Tensor | None = None
    masked: set[Attention] = field(default_factory=set)


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
    other: Callable[..., Tensor] | None,
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
        other: an override by other code, called with ``func`` before the other arguments; None if
            there is none. It may ignore ``func``, so it also gets the sizes as a mask.
        bias: a mask to add to the logits, without the sizes; None for none.
        q: queries.
        k: keys.
        v: values.
        heads: the number of heads of the queries.
        kwargs: the other arguments of the function.
    """
    if weights is None:
        call = func if other is None else partial(other, func)
        return call(q, k, v, heads, mask=bias, **kwargs)
    if bias is None and other is None and func in weights.masked:
        return func(q, k, v, heads, mask=weights.mask, **kwargs)
    weights.note(None)
    if other is not None:
        given = _mask(weights, bias)

        def ours(
            q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, **kwargs: Any
        ) -> Tensor:
            # If the other code passes a mask of its own, it is used as it is.
            if mask is not None and mask is not given:
                return func(q, k, v, heads, mask=mask, **kwargs)
            if not fits(weights, k):
                weights.note(reasons.CALLED_DIFFERENTLY)
                return func(q, k, v, heads, mask=bias, **kwargs)
            return attend(weights, func, None, bias, q, k, v, heads, kwargs)

        return other(ours, q, k, v, heads, mask=given, **kwargs)
    way = _way_of(weights, func, bias, q, k, heads, bool(kwargs.get("skip_reshape")))
    if way == "channels":
        return in_channels(func, weights.ops.widen, weights.sizes, q, k, v, heads, **kwargs)
    if way is None:
        return func(q, k, v, heads, mask=bias, **kwargs)
    mask = _mask(weights, bias)
    if bias is None:
        weights.masked.add(func)
    return func(q, k, v, heads, mask=mask, **kwargs)


def _way_of(
    weights: KeyWeights,
    func: Attention,
    bias: Tensor | None,
    q: Tensor,
    k: Tensor,
    heads: int,
    by_head: bool,
) -> Way | None:
    """The fastest way for an attention function in a call; None, with a reason, if there is none.

    In PyTorch's attention, a mask rules out flash attention. The call then goes to cuDNN, which was
    faster with a mask than flash with extra channels wherever both were timed, or to a kernel that
    takes twice as long. Extra channels cost time where the head then needs a larger kernel of
    flash: from 64 to 96 channels, half as much again.

    The arguments are those of :func:`attend`; ``by_head`` is whether queries and keys come by head,
    so that extra channels need a copy.
    """
    known, capable = weights.ways.known, weights.ways.capable
    if func not in known and not torch.compiler.is_compiling():
        weights.ways.prepare([func])
    if func not in known:
        weights.note(reasons.UNTRIED)
        return None
    tried = known[func]
    head_channels = q.shape[-1] if by_head else q.shape[-1] // heads
    uses_cudnn = capable.cudnn and head_channels <= _MOST_WITH_CUDNN
    is_slow = tried.name == _PYTORCH and capable.flash and not (uses_cudnn or by_head)
    ways = tried.ways
    if is_slow and head_channels in _HEADS_WITH_ROOM:
        ways = ways[::-1]
    # Extra channels need as many heads in keys as in queries.
    same_heads = q.shape[1] == k.shape[1] if by_head else q.shape[2] == k.shape[2]
    may_widen = bias is None and same_heads
    for way in ways:
        if way == "mask" or may_widen:
            return way
    weights.note(reasons.takes_no_weights(tried.name))
    return None


def _mask(weights: KeyWeights, bias: Tensor | None) -> Tensor:
    """A mask that adds sizes to the logits, and the bias if there is one."""
    if weights.mask is None:
        weights.mask = weights.sizes[:, None, None]
    return weights.mask if bias is None else bias + weights.mask.to(bias.dtype)
