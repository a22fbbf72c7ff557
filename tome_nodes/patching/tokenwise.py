"""Evaluate a model at next to no cost, while no token sees another, and watch its attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..merging.picture_search import fingerprints
from .blocks import blocks_of
from .key_weights import flat
from .model_memory import Memory
from .overrides import Forward, Override, Overrides

_NUMBERING = ("idx", "index", "layer", "block")
"""Parts of the names of attributes that number equal blocks."""

_FEWEST_CHANNELS = 16
"""The fewest channels that tokens have."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention.

    Attributes:
        queries: the number of queries.
        keys: the number of keys.
        is_masked: whether its mask differs from query to query.
        prints: the fingerprints of the keys, ``[batch, keys, features]``.
    """

    queries: int
    keys: int
    is_masked: bool
    prints: Tensor


@dataclass(eq=False)
class Seen:
    """What one block did.

    Attributes:
        entered: the fingerprints of the tokens that entered it.
        calls: its calls of attention.
        reads_own_options: whether all these calls have the keyword arguments that the block got.
    """

    entered: list[Tensor]
    calls: list[Call] = field(default_factory=list)
    reads_own_options: bool = True


class TokenwiseEvaluation:
    """Follows one evaluation of a model.

    Meanwhile attention only passes on the value of each token, and linear layers only copy
    channels. Of blocks that are alike only the first runs; its result stands for theirs.

    Attributes:
        blocks: what each block that ran did, by name.
        left_out: for each block that did not run, the block that stood for it, and the fingerprints
            of the tokens that entered.
        order: the names of all blocks that the model called, in the order of their first calls.
        has_kept: whether the model kept something of its blocks for later evaluations. It has been
            removed again.
        network: the network that is followed.
        unreached: what to say that the model does if none of its attentions was followed.
    """

    unreached = "attends outside of its blocks"

    def __init__(self, model: nn.Module, network: nn.Module):
        """Prepare to follow ``network``, a part of ``model``; either may keep something."""
        self.blocks: dict[str, Seen] = {}
        self.left_out: dict[str, tuple[str, list[Tensor]]] = {}
        self.order: dict[str, None] = {}
        self.has_kept = False
        self._memory: Memory | None = None
        self._model, self.network = model, network
        self._running: str | None = None
        self._results: dict[Any, tuple[str, Any]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Follow what is evaluated within this block."""
        overrides = Overrides(self.overrides)
        before = Memory(self._model)
        try:
            with overrides.installed():
                yield
        finally:
            self.has_kept = self._memory is not None and self._memory.restore()
            if self.has_kept:
                before.restore()
            # What it remembers includes the host's patcher, which would outlive the run.
            self._memory = None

    def given(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a block, perhaps changed so that its attention is followed."""
        return kwargs

    def overrides(self) -> Iterator[Override]:
        """What modules run while they are followed."""
        for name, block in blocks_of(self.network):
            yield block, "forward", self._watched(name, block, block.forward)
        for module in self.not_computed():
            if isinstance(module, nn.Linear):
                yield module, "forward", _cheap(module.out_features)

    def not_computed(self) -> Iterator[nn.Module]:
        """The modules whose linear layers need no weights."""
        for _, block in blocks_of(self.network):
            yield from block.modules()

    def _watched(self, name: str, block: nn.Module, forward: Forward) -> Forward:
        kind = _kind(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._memory is None:
                # Whatever is kept before the first block, such as positions, is not of attention.
                self._memory = Memory(self._model)
            self.order.setdefault(name)
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            entered = [fingerprints(each) for each in tensors if _has_tokens(each)]
            place = kind, tuple(each.shape for each in tensors)
            if place in self._results:
                representative, result = self._results[place]
                self.left_out[name] = representative, entered
                return result
            self.blocks[name] = Seen(entered)
            given = self.given(kwargs)
            outer, self._running = self._running, name
            try:
                result = forward(*args, **given)
            finally:
                self._running = outer
            self._results[place] = name, result
            return result

        return run

    def attention(
        self,
        are_own: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Instead of attention, the value of each token; 0 if queries and keys differ in number.

        Args:
            are_own: whether the attention has the keyword arguments that its block got.
            q: queries. They, keys and values are in the layouts of
                :func:`tome_nodes.patching.attention_call.merged_attention`.
            k: keys.
            v: values.
            heads: the number of heads of the queries.
            mask: None for none.
            kwargs: the other arguments of the attention function.
        """
        by_head = bool(kwargs.get("skip_reshape"))
        if self._running is not None:
            seen = self.blocks[self._running]
            is_masked = mask is not None and mask.ndim > 1 and mask.shape[-2] > 1
            call = Call(q.shape[-2], k.shape[-2], is_masked, fingerprints(flat(k, by_head)))
            seen.calls.append(call)
            seen.reads_own_options &= are_own
        own = _by_head(v, q, heads, by_head)
        if q.shape[-2] != own.shape[1]:
            own = own.new_zeros(len(q), q.shape[-2], *own.shape[2:])
        return own.transpose(1, 2) if kwargs.get("skip_output_reshape") else own.flatten(2)


def _cheap(out_features: int) -> Forward:
    """What a linear layer runs: it copies channels, so tokens still differ, without any weights."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x[..., torch.arange(out_features, device=x.device) % x.shape[-1]]

    return run


def _by_head(v: Tensor, q: Tensor, heads: int, by_head: bool) -> Tensor:
    """Values as ``[batch, tokens, heads, channels]``, with as many heads as queries."""
    if by_head:
        v = v.transpose(1, 2)
    elif v.ndim == 3:
        v = v.unflatten(2, (-1, q.shape[2] // heads))
    return v if v.shape[2] == heads else v.repeat_interleave(heads // v.shape[2], 2)


def _kind(block: nn.Module) -> Any:
    """A key that is equal for two blocks that, as far as can be seen, do the same to tokens."""
    shapes = tuple((name, tuple(each.shape)) for name, each in block.named_parameters())
    settings = tuple(
        (path, name, value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and not any(part in name for part in _NUMBERING)
    )
    return type(block), shapes, settings


def _has_tokens(x: Tensor) -> bool:
    """Whether an argument may be tokens with channels, and not something like rotations."""
    return x.is_floating_point() and x.ndim > 2 and x.shape[-1] >= _FEWEST_CHANNELS
