"""Let ComfyUI's self-attention count a merged key as often as the tokens it stands for.

Softmax over keys of which key j stands for n_j equal ones is softmax over the logits plus log n_j.
The host lets one function of the transformer options stand before its attention; ours adds the
logarithms to whatever attention function is then called, so that another node's function comes
first and may do what it likes.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor

from ..ops.reference import FURTHER

_OVERRIDE = "optimized_attention_override"

# Attention functions of the host that add a bias at little cost.
_TAKE_BIAS = frozenset(
    {"attention_basic", "attention_split", "attention_sub_quad", "attention_pytorch"}
)
# Those that have no bias, or leave their fast path for one.
_TAKE_CHANNELS = frozenset({"attention_flash", "attention_xformers"})

Note = Callable[[str | None], None]


def weigh_attention(
    options: dict[str, Any], log_sizes: Tensor, ops: ModuleType, note: Note
) -> dict[str, Any]:
    """Transformer options under which an attention adds ``log_sizes`` to its logits.

    Args:
        options: the transformer options otherwise; another node's override in them stays in effect.
        log_sizes: ``[batch, keys]`` of the dtype of queries and keys.
        ops: the operations of the backend.
        note: told None once the logits were weighed, or why they could not be.
    """
    theirs = options.get(_OVERRIDE)

    def override(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        weighed = partial(_weighed, func, log_sizes, ops, note)
        if theirs is None:
            return weighed(*args, **kwargs)
        return theirs(weighed, *args, **kwargs)

    return options | {_OVERRIDE: override}


def _weighed(
    func: Callable[..., Tensor],
    log_sizes: Tensor,
    ops: ModuleType,
    note: Note,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """``func`` with ``log_sizes`` added to its logits, or ``func`` where it cannot be told to.

    The host's layout: ``[batch, tokens, heads * channels]``.
    """
    name = getattr(func, "__name__", "an unknown attention function")
    fused = name in _TAKE_CHANNELS or (name == "attention_pytorch" and q.device.type == "cuda")
    if mask is not None or kwargs.get("skip_reshape") or k.shape[:2] != log_sizes.shape:
        note("another node changes how the attention is called")
    elif fused:
        note(None)
        return _in_channels(func, log_sizes, ops, q, k, v, heads, **kwargs)
    elif name in _TAKE_BIAS:
        note(None)
        return func(q, k, v, heads, mask=log_sizes[:, None, None], **kwargs)
    else:
        note(f"{name} takes no weights")
    return func(q, k, v, heads, mask=mask, **kwargs)


def _in_channels(
    func: Callable[..., Tensor],
    log_sizes: Tensor,
    ops: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Attention whose logits gain ``log_sizes`` through further channels of queries and keys.

    Queries are scaled such that ``func``, which divides the logits by the root of the head
    dimension, divides them by that of the head dimension as it was.
    """
    channels = q.shape[2] // heads
    wider = channels + FURTHER
    if "scale" in kwargs:
        scale, constant = 1.0, 1 / kwargs["scale"]
    else:
        scale, constant = (wider / channels) ** 0.5, wider**0.5
    q, k, v = ops.widen(q, k, v, log_sizes, heads, scale, constant)
    out = func(q, k, v, heads, **kwargs).unflatten(2, (heads, wider))[..., :channels]
    return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)
