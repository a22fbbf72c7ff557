"""Blocks that merge queries, keys and values where attention is called.

There they are already projected, normalised and rotated by position. So all that must be known
about a block is where the pictures are in its sequence. Other tokens, such as text, never merge.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..merging.layout import Layout
from ..merging.plan import Plan
from .blocks import Block, PatchedModel, Reasons, Stack, uncompiled
from .overrides import Forward, Override

Arguments = dict[str, Any]

_NO_STACKS = "as this kind of model does not merge stacks of blocks"
"""The reason to report if a block merges only in its attention although the scope is wider."""


@dataclass(frozen=True)
class AttentionHost:
    """How a host's transformers call attention.

    Attributes:
        reasons: why a block cannot merge.
        merging: from the block and the keyword arguments of an attention module, the arguments with
            which the host calls :func:`tome_nodes.patching.attention_call.merged_attention`.
        picture_start: where the pictures begin in the sequence, if the keyword arguments say it.
        stored_attention: the attention function that is stored with the weights of an attention
            module; None if there is none.
        overrides: from the block, further overrides that it needs.
    """

    reasons: Reasons
    merging: Callable[["AttentionBlock", Arguments], Arguments] = lambda block, kwargs: kwargs
    picture_start: Callable[[Arguments], int | None] = lambda kwargs: None
    stored_attention: Callable[[nn.Module], Callable[..., Tensor] | None] = lambda module: None
    overrides: Callable[["AttentionBlock"], Iterable[Override]] = lambda block: ()


@dataclass(frozen=True, kw_only=True)
class TransformerRecord:
    """What is known about the transformers of one kind.

    Attributes:
        blocks: the attributes of a model that hold its blocks.
        host: how attention is called.
        attention: the attribute of a block whose module calls self-attention; empty if the block
            calls it itself.
        method: the method by which a model runs a block, and a block runs its attention module.
        calls_in_parts: whether a block splits its queries among several calls of attention. Only
            calls with the keys of its whole sequence merge, all by one plan.
        passes_options: whether blocks get the keyword arguments that :attr:`AttentionHost.merging`
            changes. Otherwise attention looks up the running block in the evaluation.
        at_end: whether the pictures are at the end of the sequence, as after text, or at its start.
            Not used where a model is asked for its pictures.
    """

    blocks: tuple[str, ...]
    host: AttentionHost
    attention: str = ""
    method: str = "forward"
    calls_in_parts: bool = False
    passes_options: bool = True
    at_end: bool = False

    merges_at_calls = True

    @property
    def reasons(self) -> Reasons:
        """Why a block cannot merge."""
        return self.host.reasons

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The blocks of a model, a stack for each attribute in ``blocks`` that the model has."""
        for name in self.blocks:
            holder, _, attribute = name.rpartition(".")
            module = getattr(model.get_submodule(holder), attribute, None)
            if module is not None:
                blocks = module.values() if isinstance(module, nn.ModuleDict) else module
                yield Stack(name, module, tuple(map(uncompiled, blocks)))

    def block(self, model: PatchedModel, stack: Stack, index: int) -> "AttentionBlock":
        """The block at an index of a stack."""
        return AttentionBlock(model, stack, index, self)

    def attention_of(self, block: Any) -> nn.Module:
        """The module of a block that calls its self-attention."""
        return getattr(block, self.attention) if self.attention else block


class AttentionBlock(Block):
    """A block that calls attention through its host.

    Attributes:
        record: what is known about its model.
        stored_attention: the attention function stored with the weights of its attention module.
    """

    def __init__(self, model: PatchedModel, stack: Stack, index: int, record: TransformerRecord):
        self.record = record
        self.stored_attention: Callable[..., Tensor] | None = None
        super().__init__(model, stack, index)

    def forget(self) -> None:
        super().forget()
        self._entered = 0
        self._plan_of_parts: Plan | None = None

    def overrides(self) -> list[Override]:
        block, name = self.module, self.record.method
        method = getattr(block, name)
        if not self.model.config.merge_attn:
            return [(block, name, self._run_block(method))]
        attention = self.record.attention_of(block)
        self.stored_attention = self.record.host.stored_attention(attention)
        if attention is block:
            own = self.timed(self._run_block(self._merge_calls(method)))
            return [(block, name, own), *self.record.host.overrides(self)]
        return [
            (block, name, self.timed(self._run_block(method))),
            (attention, name, self._merge_calls(getattr(attention, name))),
        ]

    def call_plans(
        self, k: Tensor, queries: int, kwargs: Arguments
    ) -> tuple[Plan | None, Plan | None]:
        """The plans of the queries and of the keys of one call of attention.

        The outcome notes what merges, or why nothing does.

        Args:
            k: ``[batch, keys, channels]``, by which tokens are matched.
            queries: the number of queries; they merge only if they are as many as the keys.
            kwargs: the keyword arguments of the attention module.

        Returns:
            The plan of the queries and that of the keys, None for those that do not merge: the same
            plan, or none of the queries, or none at all.
        """
        config, tokens = self.model.config, k.shape[1]
        evaluation = self.evaluation
        if evaluation.layouts is None:
            layout = self._layout(tokens, kwargs)
        else:
            found = evaluation.layouts.get(self.name, {})
            layout = found.get((queries, tokens))
            # The answer says that this attention has no picture.
            if layout is None and (queries, tokens) in found:
                return None, None
        # The keys of this call are only a part of the sequence.
        if tokens < self._entered:
            return None, None
        self.outcome.entered(tokens)
        if layout is None:
            self.outcome.reason = self.record.reasons.tokens_changed
            return None, None
        worthy = self.worthy(layout, evaluation.engine.least_in_attention)
        if worthy is None:
            return None, None
        plan = self._plan_of_parts
        if plan is None or not plan.fits(k):
            plan = self.plan_of(k, worthy)
        if plan is None:
            return None, None
        if self.record.calls_in_parts:
            self._plan_of_parts = plan
        self.outcome.merged(tokens, plan)
        return plan if config.attn_tokens == "q,k,v" and queries == tokens else None, plan

    def note_masked(self) -> None:
        """Note that the attention is masked, or not called with the tokens of its block."""
        self.outcome.reason = self.record.reasons.attention_masked

    def _run_block(self, forward: Forward) -> Forward:
        config = self.model.config

        def block_forward(*args: Any, **kwargs: Any) -> Any:
            # The number of tokens is not known until attention is called.
            self.outcome.entered(0)
            self.outcome.fell_back = None if config.scope == "module" else _NO_STACKS
            self.outcome.reason = (
                self.record.reasons.attention_replaced
                if config.merge_attn
                else "merge_attn is off, and nothing else merges in models of this kind"
            )
            return forward(*args, **kwargs)

        return block_forward

    def _layout(self, tokens: int, kwargs: Arguments) -> Layout | None:
        """The layout of a sequence of ``tokens`` tokens; None if the pictures do not fit."""
        at_end = self.record.at_end
        layout = Layout.of_pictures(tokens, self.evaluation.pictures, at_end)
        start = self.record.host.picture_start(kwargs)
        if layout is not None and start is not None and at_end and self.record.passes_options:
            return layout if start == layout.spans[0].start else None
        return layout

    def _merge_calls(self, forward: Forward) -> Forward:
        def attention_forward(*args: Any, **kwargs: Any) -> Any:
            evaluation = self.evaluation
            if self.record.passes_options:
                return forward(*args, **self.record.host.merging(self, kwargs))
            evaluation.running = self
            if self.record.calls_in_parts:
                given = (*args, *kwargs.values())
                self._entered = next(x.shape[1] for x in given if isinstance(x, Tensor))
                self._plan_of_parts = None
            try:
                return forward(*args, **kwargs)
            finally:
                evaluation.running = None

        return attention_forward
