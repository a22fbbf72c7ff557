"""Blocks of transformers, which merge keys and values where self-attention is called.

By then, they are projected, normalised and rotated by position. So all that must be known about a
block is where the picture is in its sequence. Other tokens, such as text, stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import reasons
from ...merging.attention_trial import Attention, flat
from ...merging.block import Block
from ...merging.evaluation import ModelState
from ...merging.key_weights import attend
from ...merging.overrides import Forward, Override
from ...merging.stack import Stack
from ...strategies.plan import Plan
from .base import OVERRIDE, stored_attention

StartOf = Callable[[int, dict[str, Any]], int | None]
"""Where the picture begins in a sequence, given its number of tokens and the transformer options;
None if the picture is not found."""


class AttentionBlock(Block):
    """A block that calls self-attention, or has a module that does."""

    def __init__(
        self, model: ModelState, stack: Stack, index: int, attention: str, start_of: StartOf
    ):
        """``attention`` is the attribute of the module that attends; empty for the block itself."""
        self._attention = attention
        self._start_of = start_of
        super().__init__(model, stack, index)

    @property
    def _attends(self) -> Any:
        return getattr(self.module, self._attention) if self._attention else self.module

    @cached_property
    def stored(self) -> Attention | None:
        # A block may call attention in one of its parts.
        all_stored = map(stored_attention, self._attends.modules())
        return next((stored for stored in all_stored if stored is not None), None)

    def overrides(self, by_stack: bool) -> list[Override]:
        block = self.module
        if not self.model.config.merge_attn:
            return [(block, "forward", self._run_block(block.forward))]
        attention = self._attends
        attends = self._run_attention(attention.forward, self.stored)
        if attention is block:
            return [(block, "forward", self.timed(self._run_block(attends)))]
        return [
            (block, "forward", self.timed(self._run_block(block.forward))),
            (attention, "forward", attends),
        ]

    def _run_block(self, forward: Forward) -> Forward:
        attends = self.model.config.merge_attn

        def block_forward(*args: Any, **kwargs: Any) -> Any:
            # The number of tokens is not known until attention is called.
            self.outcome.entered(0)
            self.outcome.reason = reasons.ATTENTION_REPLACED if attends else reasons.ATTENTION_OFF
            return forward(*args, **kwargs)

        return block_forward

    def _run_attention(self, forward: Forward, stored: Attention | None) -> Forward:
        def attention_forward(*args: Any, **kwargs: Any) -> Any:
            options = kwargs.get("transformer_options") or {}
            own = options | {OVERRIDE: self._override(options, stored)}
            return forward(*args, **kwargs | {"transformer_options": own})

        return attention_forward

    def _override(self, options: dict[str, Any], stored: Attention | None) -> Callable[..., Tensor]:
        """An override of attention that merges keys and values.

        Another node's override in the transformer options stays in effect, and gets the merged
        tokens. ``stored`` is what the host would call without an override; None for its own
        attention.
        """
        other = options.get(OVERRIDE)

        def override(
            func: Attention,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            heads: int,
            mask: Tensor | None = None,
            **kwargs: Any,
        ) -> Tensor:
            if other is None:
                func = stored or func
            plain = func if other is None else partial(other, func)
            by_head = bool(kwargs.get("skip_reshape"))
            start = self._start(q, k, mask, options)
            if start is None:
                return plain(q, k, v, heads, mask=mask, **kwargs)
            flat_k = flat(k, by_head)
            part = self._part(flat_k, start)
            if part is None:
                return plain(q, k, v, heads, mask=mask, **kwargs)
            merge = part.plan.merge
            # Keys may have fewer heads than queries.
            own_heads = k.shape[1] if by_head else heads
            # Without proportional_attn, keys are plain means that count once, as in the paper.
            is_plain = not self.model.config.proportional_attn

            def merge_keys(x: Tensor) -> Tensor:
                return merge(x) if is_plain else part.plan.merge_keys(x, own_heads)[1]

            k = _like(part.merged(flat_k, merge_keys), k, by_head)
            # Keep only one flat copy in memory at a time.
            del flat_k
            v = _like(part.merged(flat(v, by_head), merge), v, by_head)
            bias = None if mask is None else part.merged_bias(_bias(mask, k.dtype), len(k))
            weights = self.weights(part.log_sizes(), k)
            return attend(weights, func, other, bias, q, k, v, heads, kwargs)

        return override

    def _start(
        self, q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> int | None:
        """Where the picture begins among the keys of a call; None, with a reason, if none merge."""
        tokens, outcome, evaluation = k.shape[-2], self.outcome, self.evaluation
        start = self._start_of(tokens, options) if q.shape[-2] == tokens else None
        if start is None:
            outcome.reason = reasons.PICTURE_NOT_FOUND
            return None
        outcome.entered(evaluation.latent.tokens)
        if mask is not None and not _is_over(mask, tokens):
            outcome.reason = reasons.ATTENTION_MASKED
            return None
        return start if self.is_large_enough(evaluation.latent) else None

    def _part(self, flat_k: Tensor, start: int) -> "Part | None":
        """How the picture's keys merge, given all keys; None if none do."""
        grid = self.evaluation.latent
        behind = flat_k.shape[1] - start - grid.tokens
        plan = self.plan_of(flat_k.narrow(1, start, grid.tokens), grid)
        if plan is None:
            return None
        self.outcome.merged(grid.tokens, plan)
        return Part(start, behind, plan)


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a sequence that merges.

    Attributes:
        before: number of tokens before it.
        behind: number of tokens behind it.
        plan: how it merges.
    """

    before: int
    behind: int
    plan: Plan

    def merged(self, x: Tensor, merge: Callable[[Tensor], Tensor]) -> Tensor:
        """A sequence ``[batch, tokens, channels]`` whose part went through ``merge``."""
        stop = x.shape[1] - self.behind
        return torch.cat([x[:, : self.before], merge(x[:, self.before : stop]), x[:, stop:]], 1)

    def log_sizes(self) -> Tensor:
        """The logarithm of how many tokens a key stands for, ``[batch, keys]``."""
        return F.pad(self.plan.log_sizes, (self.before, self.behind))

    def merged_bias(self, bias: Tensor, batch: int) -> Tensor:
        """A bias of :func:`_bias` for merged keys: its mean over the keys of a slot."""
        # Merging whole windows would spread infinity.
        least = torch.finfo(bias.dtype).min
        rows = bias.clamp_min(least).expand(batch, -1, -1, -1).flatten(1, 2)
        merged = self.merged(rows.mT, self.plan.merge).mT.clamp_min(least)
        return merged.unflatten(1, bias.shape[1:3])


def _like(merged: Tensor, x: Tensor, by_head: bool) -> Tensor:
    """``merged`` in the layout of ``x``: undoes :func:`...merging.attention_trial.flat`."""
    return merged.unflatten(2, (x.shape[1], -1)).transpose(1, 2) if by_head else merged


def _is_over(mask: Tensor, tokens: int) -> bool:
    """Whether a mask has this many keys, and as many queries or one row for all of them."""
    return mask.ndim in (2, 3, 4) and mask.shape[-1] == tokens and mask.shape[-2] in (1, tokens)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as ``[batch or 1, heads or 1, queries or 1, keys]`` to add to the logits."""
    if mask.ndim < 4:
        mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    if mask.dtype != torch.bool:
        return mask
    bias = torch.zeros_like(mask, dtype=dtype)
    return bias.masked_fill(~mask, torch.finfo(dtype).min)
