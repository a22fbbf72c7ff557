"""Reach into ComfyUI's attention: give it merged keys, and let it count them as it should.

The host lets one function of the transformer options stand before its attention. Ours merges keys
and values first, and calls another node's function after that, whose choice of an attention thus
gets the merged ones too.

Softmax over keys of which key j stands for n_j equal ones is softmax over the logits plus log n_j.
The logarithms are added to whatever attention function is called in the end.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ...ops import Operations
from ...ops.reference import FURTHER

_OVERRIDE = "optimized_attention_override"

# Attention functions of the host that add a bias at little cost.
_TAKE_BIAS = frozenset(
    {"attention_basic", "attention_split", "attention_sub_quad", "attention_pytorch"}
)
# Those that have no bias, or leave their fast path for one.
_TAKE_CHANNELS = frozenset({"attention_flash", "attention_xformers"})

REPLACED = "another node replaces the attention function"
"""Why keys are not weighed where nothing more is heard of it."""

Note = Callable[[str | None], None]


class MergesCalls(Protocol):
    """What merges the keys of a call; see :class:`tome_nodes.core.site.BlockSite`."""

    @property
    def ops(self) -> Operations: ...

    def merged_call(
        self, k: Tensor, v: Tensor, heads: int
    ) -> tuple[Tensor, Tensor, Tensor | None] | None: ...

    def note_masked(self) -> None: ...

    def note_unweighted(self, reason: str | None) -> None: ...


def merge_attention(options: dict[str, Any], merges: MergesCalls) -> dict[str, Any]:
    """Transformer options under which an attention gets merged keys and values.

    Args:
        options: the transformer options otherwise; another node's override in them stays in effect
            and is given the merged keys.
        merges: merges them; told where it cannot, or their sizes do not count.
    """
    theirs = options.get(_OVERRIDE)

    def override(
        func: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        merged = None
        by_head = bool(kwargs.get("skip_reshape"))
        if mask is None:
            # Queries may have more heads than keys.
            key_heads = k.shape[1] if by_head else heads
            merged = merges.merged_call(_flat(k, by_head), _flat(v, by_head), key_heads)
        else:
            merges.note_masked()
        if merged is not None:
            keys, values, log_sizes = merged
            k, v = _like(keys, k, by_head), _like(values, v, by_head)
            if log_sizes is not None:
                merges.note_unweighted(REPLACED)
                func = partial(_weighed, func, log_sizes, merges.ops, merges.note_unweighted)
        if theirs is None:
            return func(q, k, v, heads, mask=mask, **kwargs)
        return theirs(func, q, k, v, heads, mask=mask, **kwargs)

    return options | {_OVERRIDE: override}


def weigh_attention(
    options: dict[str, Any], log_sizes: Tensor, ops: Operations, note: Note
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


def _flat(x: Tensor, by_head: bool) -> Tensor:
    """``[batch, tokens, heads * channels]``, also of ``[batch, heads, tokens, channels]``."""
    return x.transpose(1, 2).flatten(2) if by_head else x


def _like(merged: Tensor, x: Tensor, by_head: bool) -> Tensor:
    """What :func:`_flat` of ``x`` was merged to, in the layout of ``x``."""
    return merged.unflatten(2, (x.shape[1], -1)).transpose(1, 2) if by_head else merged


def _weighed(
    func: Callable[..., Tensor],
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
    """``func`` with ``log_sizes`` added to its logits, or ``func`` where it cannot be told to.

    The host's layouts: ``[batch, tokens, heads * channels]``, or by ``skip_reshape``
    ``[batch, heads, tokens, channels]``.
    """
    name = getattr(func, "__name__", "an unknown attention function")
    by_head = bool(kwargs.get("skip_reshape"))
    on_gpu = name == "attention_pytorch" and q.device.type == "cuda"
    if mask is not None or (len(k), k.shape[-2]) != tuple(log_sizes.shape):
        note("another node changes how the attention is called")
    elif (name in _TAKE_CHANNELS or on_gpu) and not by_head:
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
    ops: Operations,
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
