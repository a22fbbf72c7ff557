"""The ways in which an attention function can weigh keys, and a trial of which work for it.

A host may call any function for attention, even one of another node. So each function is tried; its
name only decides which ways are fast.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..ops import TORCH, Operation
from ..ops.reference import EXTRA_CHANNELS

Attention = Callable[..., Tensor]

Way = Literal["mask", "channels"]
"""How an attention function gets the sizes of :mod:`tome_nodes.merging.key_weights`."""

# A mask is the fastest nearly everywhere.
_ANY: tuple[Way, ...] = ("mask", "channels")

# For functions of ComfyUI that some way makes slow, the ways that are worth it. With a mask, flash
# and Sage attention leave the call to PyTorch's, and xformers copies the mask for every query; with
# more channels, Sage attention needs a larger kernel.
_WORTH_IT: Mapping[str, tuple[Way, ...]] = {
    "attention_flash": ("channels",),
    "attention_xformers": ("channels",),
    "attention_sage": (),
    "attention3_sage": (),
}


@dataclass(frozen=True)
class Tried:
    """What was found out about an attention function.

    Attributes:
        name: its name.
        ways: the ways that weigh keys correctly, the usually faster one first.
    """

    name: str
    ways: tuple[Way, ...]


_results: WeakKeyDictionary[Attention, dict[tuple[torch.device, torch.dtype], Tried]] = (
    WeakKeyDictionary()
)
"""The results of trials, by function, device and dtype."""


def try_out(function: Attention, device: torch.device, dtype: torch.dtype) -> Tried:
    """Try an attention function on tiny tensors of a device and dtype, if it was not tried before.

    Raises:
        torch.OutOfMemoryError: the device has no room for these tensors.
    """
    try:
        results = _results.setdefault(function, {})
    except TypeError:
        # Other code may use an object for attention that cannot be referenced weakly.
        results = {}
    place = device, dtype
    if place not in results:
        name = getattr(function, "__name__", "an unknown attention function")
        ways = _WORTH_IT.get(name, _ANY)
        right = tuple(way for way in ways if _is_right(function, way, device, dtype))
        results[place] = Tried(name, right)
    return results[place]


def in_channels(
    func: Attention,
    widen: Operation,
    sizes: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Attention whose logits get the sizes from extra channels in queries and keys.

    ``func`` divides the logits by the square root of the number of channels of a head, which is now
    larger. Queries are scaled to make up for that. ``widen`` adds the channels, and ``sizes`` is
    ``[batch, keys]``.
    """
    q, k, v = (flat(x, skip_reshape) for x in (q, k, v))
    channels = q.shape[2] // heads
    wider = channels + EXTRA_CHANNELS
    if kwargs.get("scale") is not None:
        scale, constant = 1.0, 1 / kwargs["scale"]
    else:
        kwargs.pop("scale", None)
        scale, constant = (wider / channels) ** 0.5, wider**0.5
    q, k, v = widen(q, k, v, sizes, heads, scale, constant)
    out = func(q, k, v, heads, **kwargs)
    out = out.reshape(*out.shape[:2], heads, wider).narrow(3, 0, channels)
    return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)


def flat(x: Tensor, by_head: bool) -> Tensor:
    """``x`` as ``[batch, tokens, heads * channels]``, from any layout of a host."""
    if by_head:
        x = x.transpose(1, 2)
    # Values may be [batch, tokens, heads, channels] although queries and keys are flat.
    return x if x.ndim == 3 else x.flatten(2)


_BATCH, _HEADS, _CHANNELS, _TOKENS, _COPIES = 2, 2, 64, 16, 32
"""The sizes of a trial. Many kernels know only heads of 64 or 128 channels."""

_SHARE = 0.1
"""A way works if its error is less than this share of the error without weights. In half precision
and in int8, some error remains."""


@torch.no_grad()
def _is_right(function: Attention, way: Way, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a weighed key counts as much as all the keys that it stands for."""

    def tensors() -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = 3, _BATCH, _TOKENS, _HEADS * _CHANNELS
        q, k, v = torch.randn(shape, generator=generator).to(device, dtype)
        return q, k, v

    # In each sample, a different key stands for many.
    samples, heavy = torch.arange(_BATCH), torch.arange(_BATCH) + 3
    sizes = torch.ones(_BATCH, _TOKENS)
    sizes[samples, heavy] = 1 + _COPIES
    sizes = sizes.log().to(device, dtype)
    try:
        # New tensors each time, since a function may write to its arguments.
        q, k, v = tensors()
        keys, values = (
            torch.cat([x, x[samples, heavy][:, None].expand(-1, _COPIES, -1)], 1) for x in (k, v)
        )
        expected, unweighed = function(q, keys, values, _HEADS), function(*tensors(), _HEADS)
        if way == "mask":
            weigh = partial(function, mask=sizes[:, None, None])
        else:
            weigh = partial(in_channels, function, TORCH.widen, sizes)
        errors = [(x - expected).float().norm() for x in (weigh(*tensors(), _HEADS), unweighed)]
        return bool(errors[0] < _SHARE * errors[1])
    except torch.OutOfMemoryError:
        raise
    except Exception:
        # Other code may raise any error if it does not take a mask, or so many channels.
        return False
