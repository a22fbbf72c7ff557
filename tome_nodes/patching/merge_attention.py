"""Blocks that merge queries, keys and values where attention is called.

By then they are projected, normalised and rotated by position, so all that is needed of a block is
where the pictures are in its sequence. Everything else, such as text, stays as it is. If it is
known how a block is called, all of it can run on merged tokens.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..merging.layout import Layout
from ..merging.plan import Plan, of_all_samples
from .blocks import Block, PatchedModel, Reasons, Stack, uncompiled
from .overrides import Forward, Override

Arguments = dict[str, Any]

_FALLS_BACK = {
    "module": None,
    "block": "as this kind of model does not merge whole blocks",
    "stack": "as this kind of model does not merge stacks of blocks",
}
"""The reason to report if a block merges only in its attention, by scope."""

_CALLED_DIFFERENTLY = "that are called differently than expected"
TREATED_DIFFERENTLY = "whose tokens are treated differently"


@dataclass(frozen=True)
class WholeBlock:
    """How a block is called, so that all of it can run on merged tokens.

    Of an argument that is a tuple, the first is meant.

    Attributes:
        tokens: the argument with the tokens that merge, ``[batch, tokens, channels]``. It may have
            no batch, or several dimensions that together run over the tokens.
        positions: the arguments that tell something of each token of the attention, such as its
            position, and which of their dimensions runs over these tokens; none if the tokens
            themselves hold their positions. Of a tuple, all tensors of the shape of the first are
            meant, as cosines and sines; others are of what stands beside.
        absent: arguments that treat tokens differently, so that the block needs all of them unless
            they are None.
        by_frame: arguments that treat frames differently if they have this many dimensions, and
            several frames in the second.
        segments: the argument with (start, stop, how) for all tokens that are treated alike, in
            order. All pictures have to be in the last, and ``how`` is a tensor if it tells tokens
            apart.
        returned: the index of the tokens in what the block returns, None if that is the tokens.
        names: those of the block's positional arguments, if its signature does not tell them.
        seen_by: the modules of a block in which others attend to these tokens.
    """

    tokens: str
    positions: Mapping[str, int] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    by_frame: Mapping[str, int] = field(default_factory=dict)
    segments: str = ""
    returned: int | None = None
    names: tuple[str, ...] = ()
    seen_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionHost:
    """How a host's transformers call attention.

    Attributes:
        reasons: why a block cannot merge.
        merging: the keyword arguments of an attention module that make the host call
            :meth:`AttentionBlock.call_plans` and the rest, given the block and the arguments.
        picture_start: where the pictures begin in the sequence, if the keyword arguments say so.
        needs_all_tokens: why something in a block needs all tokens, given its arguments by name;
            None if nothing does.
        stored_attention: the attention function that is stored with the weights of an attention
            module, None if there is none.
        overrides: what else modules of a block have to run, given the block.
    """

    reasons: Reasons
    merging: Callable[["AttentionBlock", Arguments], Arguments] = lambda block, kwargs: kwargs
    picture_start: Callable[[Arguments], int | None] = lambda kwargs: None
    needs_all_tokens: Callable[[Mapping[str, Any]], str | None] = lambda arguments: None
    stored_attention: Callable[[nn.Module], Callable[..., Tensor] | None] = lambda module: None
    overrides: Callable[["AttentionBlock"], Iterable[Override]] = lambda block: ()


@dataclass(frozen=True, kw_only=True)
class TransformerRecord:
    """What is known about the transformers of one kind.

    Attributes:
        blocks: the attributes of a model that hold its blocks.
        at_end: whether the pictures are at the end of the sequence, as after text, or at its start.
        host: how attention is called.
        attention: the attribute of a block that calls its self-attention; empty if the block calls
            it itself.
        whole: how blocks are called that can run on merged tokens, by the attribute of ``blocks``.
        method: the method by which a model runs a block, and a block the module of its attention.
        calls_in_parts: whether the queries of a block attend in several calls. Only those that
            attend to its whole sequence merge, all by one plan.
        passes_options: whether blocks get the keyword arguments that :attr:`AttentionHost.merging`
            changes. Otherwise attention has to find the running block in the evaluation.
    """

    blocks: tuple[str, ...]
    at_end: bool
    host: AttentionHost
    attention: str = ""
    whole: Mapping[str, WholeBlock] = field(default_factory=dict)
    method: str = "forward"
    calls_in_parts: bool = False
    passes_options: bool = True

    merges_at_calls = True

    @property
    def reasons(self) -> Reasons:
        """Why a block cannot merge."""
        return self.host.reasons

    @property
    def merges_blocks(self) -> bool:
        """Whether whole blocks may run on merged tokens."""
        return bool(self.whole)

    @property
    def samples_merge_alike(self) -> bool:
        """Whether all samples need the same plan in whole blocks, as they share their positions."""
        return any(0 in whole.positions.values() for whole in self.whole.values())

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The blocks of a model by the attribute that holds them; one that it lacks is left out."""
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
        stored_attention: see :class:`AttentionHost`; that of the module that calls self-attention.
    """

    def __init__(self, model: PatchedModel, stack: Stack, index: int, record: TransformerRecord):
        self.record = record
        self._whole = record.whole.get(stack.name)
        self.stored_attention: Callable[..., Tensor] | None = None
        super().__init__(model, stack, index)

    def forget(self) -> None:
        super().forget()
        self._outer_plan: Plan | None = None
        self._beside: int | None = 0
        self._entered = 0
        self._plans_of_parts: dict[Any, list[Plan | None]] = {}

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
        whole = self._whole_in_scope
        seen_by = [] if whole is None else [getattr(block, each) for each in whole.seen_by]
        return [
            (block, name, self.timed(self._run_block(method))),
            (attention, name, self._merge_calls(getattr(attention, name))),
            *((module, "forward", self._weigh_calls(module.forward)) for module in seen_by),
        ]

    def call_plans(
        self, k: Tensor, queries: int, kwargs: Arguments
    ) -> tuple[Plan | None, Plan | None]:
        """The plans of the queries and of the keys of one call of attention.

        What merges is noted, or why nothing does.

        Args:
            k: ``[batch, keys, channels]``, by which tokens are matched.
            queries: the number of queries; those of a part of the sequence do not merge.
            kwargs: the keyword arguments of the attention module.

        Returns:
            Both come from one matching. None for what stays as it is.
        """
        config, tokens = self.model.config, k.shape[1]
        evaluation = self.evaluation
        if evaluation.layouts is None:
            layout = self._layout(tokens, kwargs)
        else:
            found = evaluation.layouts.get(self.name, {})
            layout = found.get((queries, tokens))
            if layout is None and (queries, tokens) in found:
                return None, None
        if tokens < self._entered:
            return None, None
        worthy = self._worthy(layout, tokens, evaluation.engine.least_in_attention)
        if worthy is None:
            return None, None
        ratio, keys_ratio = self.ratios()
        merges_queries = "q" in config.attn_tokens and queries == tokens
        merges_keys = "k,v" in config.attn_tokens
        ratios = [ratio] if merges_queries else []
        if merges_keys and keys_ratio not in ratios:
            ratios.append(keys_ratio)
        if not ratios:
            self.outcome.reason = "the queries of a part of the tokens do not merge"
            return None, None
        kind = "call" if merges_queries else "call with some of the queries"
        plans = self._plans_of_parts.get((kind, worthy.key)) or self.plans(kind, k, worthy, ratios)
        if self.record.calls_in_parts:
            self._plans_of_parts[kind, worthy.key] = plans
        of_queries = plans[0] if merges_queries else None
        of_keys = plans[-1] if merges_keys else None
        noted = of_queries if of_keys is None else of_keys
        if noted is None:
            self.outcome.reason = self.why_no_plan(worthy, ratios[0])
        else:
            self.outcome.merged(tokens, noted)
        return of_queries, of_keys

    @property
    def is_merged(self) -> bool:
        """Whether the block is running on merged tokens."""
        return self._outer_plan is not None

    def outer_log_sizes(self, keys: int, like: Tensor) -> Tensor | None:
        """What to add to the logits of an attention with ``keys`` in a block on merged tokens.

        ``[batch, keys]`` of the dtype of ``like``; None for nothing.
        """
        plan = self._outer_plan
        if plan is None:
            return None
        beside = keys - plan.slot_count
        # Not ``in``, which torch.compile gets wrong where sizes are symbolic.
        if beside < 0 or (self._beside is not None and beside != self._beside):
            return None
        if not beside:
            return self.log_sizes(plan, like)
        if not self.model.config.proportional_attn:
            return None
        sizes = plan.log_sizes_in(like.dtype)
        return self._with_beside(sizes, sizes.new_zeros(sizes.shape[0], beside))

    def note_masked(self) -> None:
        """Note that the attention is masked, or called with other tokens."""
        self.outcome.reason = self.record.reasons.attention_masked

    def _with_beside(self, merged: Tensor, beside: Tensor) -> Tensor:
        """What belongs to merged tokens and to those beside them, in the order of the sequence."""
        return torch.cat([beside, merged] if self.record.at_end else [merged, beside], 1)

    @property
    def _whole_in_scope(self) -> WholeBlock | None:
        """How all of the block runs on merged tokens, None if the settings do not say so."""
        config = self.model.config
        return self._whole if config.merge_attn and config.scope == "block" else None

    def _run_block(self, forward: Forward) -> Forward:
        config, whole = self.model.config, self._whole_in_scope
        on_merged = None if whole is None else self._run_whole(whole, forward)

        def block_forward(*args: Any, **kwargs: Any) -> Any:
            evaluation, outcome = self.evaluation, self.outcome
            failed = evaluation.merges_in_modules
            if on_merged is not None and failed is None:
                return on_merged(*args, **kwargs)
            # The number of tokens is not known until attention is called.
            outcome.entered(0)
            outcome.fell_back = failed or _FALLS_BACK[config.scope]
            outcome.reason = (
                self.record.reasons.attention_replaced
                if config.merge_attn
                else "merge_attn is off, and nothing else merges in models of this kind"
            )
            return forward(*args, **kwargs)

        return block_forward

    def _run_whole(self, whole: WholeBlock, forward: Forward) -> Forward:
        names = whole.names or tuple(inspect.signature(self.module.forward).parameters)

        def block_forward(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            evaluation, outcome = self.evaluation, self.outcome
            outcome.entered(0)
            outcome.reason = self.record.reasons.attention_replaced
            refused = self.record.host.needs_all_tokens(arguments) or _why_not(
                whole, arguments, sum(picture.tokens for picture in evaluation.pictures)
            )
            outcome.fell_back = refused
            if refused is not None:
                return forward(*args, **kwargs)
            given = _first(arguments[whole.tokens])
            x = _in_rows(given)
            plan = self._plan_of_block(x)
            if plan is None:
                return forward(*args, **kwargs)
            merged = plan.merge(x)
            # Some blocks change their tokens in place.
            tokens = _shaped(merged.clone(), given)
            arguments[whole.tokens] = _with_first(arguments[whole.tokens], tokens)
            self._outer_plan, self._beside = plan, None
            for name, along in whole.positions.items():
                beside = _places(arguments[name], along) - x.shape[1]
                self._beside = beside if self._beside is None else max(self._beside, beside)
                arguments[name] = self._all_positions(plan, arguments[name], along, x.shape[1])
            if whole.segments:
                *others, (start, _, how) = arguments[whole.segments]
                arguments[whole.segments] = [*others, (start, merged.shape[1], how)]
            result = forward(**arguments)
            self._outer_plan, self._beside = None, 0
            if whole.returned is None:
                return plan.add_change(x, merged, _in_rows(result)).reshape(given.shape)
            result = list(result)
            changed = plan.add_change(x, merged, _in_rows(result[whole.returned]))
            result[whole.returned] = changed.reshape(given.shape)
            return tuple(result)

        return block_forward

    def _layout(self, tokens: int, kwargs: Arguments) -> Layout | None:
        """The layout of a sequence of ``tokens``, None if the pictures do not fit into it."""
        at_end = self.record.at_end
        layout = Layout.of_pictures(tokens, self.evaluation.pictures, at_end)
        start = self.record.host.picture_start(kwargs)
        if layout is not None and start is not None and at_end and self.record.passes_options:
            return layout if start == layout.spans[0].start else None
        return layout

    def _worthy(self, layout: Layout | None, tokens: int, least: int) -> Layout | None:
        """The layout with only the pictures worth merging, None if none is; the reason is noted.

        Args:
            layout: that of a sequence, None if it is not known.
            tokens: the length of the sequence.
            least: the number of tokens from which a picture is worth merging.
        """
        self.outcome.entered(tokens)
        if layout is None:
            self.outcome.reason = self.record.reasons.tokens_changed
            return None
        return self.worthy(layout, least)

    def _plan_of_block(self, x: Tensor) -> Plan | None:
        """The plan for a whole block with these tokens, None if nothing merges; it is noted."""
        evaluation = self.evaluation
        layout = self._layout(x.shape[1], {})
        worthy = self._worthy(layout, x.shape[1], evaluation.engine.least_tokens)
        if worthy is None:
            return None
        ratio = evaluation.ratio
        features = of_all_samples(x) if self.record.samples_merge_alike else x
        (plan,) = self.plans("tokens", features, worthy, [ratio])
        if plan is None:
            self.outcome.reason = self.why_no_plan(worthy, ratio)
        else:
            self.outcome.merged(x.shape[1], plan)
        return plan

    def _all_positions(self, plan: Plan, value: Any, along: int, tokens: int) -> Any:
        """An argument that tells positions, for merged tokens in place of so many tokens."""
        beside = _first(value).shape[along] - tokens
        if not isinstance(value, tuple):
            return self._positions(plan, value, along, beside)
        return tuple(
            self._positions(plan, each, along, beside) if _is_alike(each, value[0]) else each
            for each in value
        )

    def _positions(self, plan: Plan, positions: Tensor, along: int, beside: int) -> Tensor:
        """The positions of merged tokens, each that of one of its tokens, and of what is beside."""
        tokens = plan.tokens()
        kept = torch.arange(beside, device=tokens.device).expand(len(tokens), -1)
        if self.record.at_end:
            tokens = tokens + beside
        else:
            kept = kept + (positions.shape[along] - beside)
        chosen = self._with_beside(tokens, kept)
        if along == 0:
            # Without a batch: all samples have the same plan.
            return positions[chosen[0]]
        by_token = positions.movedim(along, 1).expand(len(tokens), *[-1] * (positions.ndim - 1))
        samples = torch.arange(len(tokens), device=tokens.device)[:, None]
        return by_token[samples, chosen].movedim(1, along)

    def _weigh_calls(self, forward: Forward) -> Forward:
        def attention_forward(*args: Any, **kwargs: Any) -> Any:
            given = self.record.host.merging(self, kwargs) if self.is_merged else kwargs
            return forward(*args, **given)

        return attention_forward

    def _merge_calls(self, forward: Forward) -> Forward:
        def attention_forward(*args: Any, **kwargs: Any) -> Any:
            evaluation = self.evaluation
            if self.record.passes_options:
                return forward(*args, **self.record.host.merging(self, kwargs))
            evaluation.running = self
            if self.record.calls_in_parts:
                given = (*args, *kwargs.values())
                self._entered = next(x.shape[1] for x in given if isinstance(x, Tensor))
                self._plans_of_parts = {}
            try:
                return forward(*args, **kwargs)
            finally:
                evaluation.running = None

        return attention_forward


def _why_not(whole: WholeBlock, arguments: Mapping[str, Any], pictures: int) -> str | None:
    """Why a block called like this cannot run on merged tokens, None if it can.

    ``pictures`` is the number of tokens that are pictures.
    """
    x = _first(arguments.get(whole.tokens))
    if not isinstance(x, Tensor) or x.ndim < 2:
        return _CALLED_DIFFERENTLY
    tokens = _in_rows(x).shape[1]
    if not all(
        _are_positions(arguments.get(name), tokens, along)
        for name, along in whole.positions.items()
    ) or not all(isinstance(arguments.get(name), Tensor) for name in whole.by_frame):
        return _CALLED_DIFFERENTLY
    segments = arguments.get(whole.segments)
    if whole.segments and not isinstance(segments, list):
        return _CALLED_DIFFERENTLY
    if (
        any(arguments.get(name) is not None for name in whole.absent)
        or any(
            arguments[name].ndim == number and arguments[name].shape[1] > 1
            for name, number in whole.by_frame.items()
        )
        or (segments and _are_apart(segments, tokens - pictures))
        or any(
            isinstance(value, Tensor) and tokens in value.shape[1:-1]
            for name, value in arguments.items()
            if name not in (whole.tokens, *whole.positions)
        )
    ):
        return TREATED_DIFFERENTLY
    return None


def _are_positions(value: Any, tokens: int, along: int) -> bool:
    """Whether an argument tells the positions of at least this many tokens."""
    first = _first(value)
    return isinstance(first, Tensor) and first.shape[along] >= tokens


def _is_alike(each: Any, first: Tensor) -> bool:
    """Whether one of a tuple tells positions like its first."""
    return isinstance(each, Tensor) and each.shape == first.shape


def _places(value: Any, along: int) -> int:
    """How many positions an argument tells, with those of what is beside the tokens."""
    first, *others = value if isinstance(value, tuple) else (value,)
    apart = [each for each in others if isinstance(each, Tensor) and not _is_alike(each, first)]
    return sum(each.shape[along] for each in (first, *apart))


def _are_apart(segments: Sequence[tuple[int, int, Any]], start: int) -> bool:
    """Whether segments of a sequence treat tokens differently that are pictures, from start on."""
    last, _, how = segments[-1]
    return last > start or isinstance(how, Tensor)


def _first(value: Any) -> Any:
    """A value, or the first of a tuple."""
    return value[0] if isinstance(value, tuple) else value


def _with_first(value: Any, first: Tensor) -> Any:
    """A value with another in place of :func:`_first`."""
    return (first, *value[1:]) if isinstance(value, tuple) else first


def _in_rows(x: Tensor) -> Tensor:
    """Tokens as ``[batch, tokens, channels]``."""
    return x[None] if x.ndim == 2 else x.flatten(1, -2)


def _shaped(x: Tensor, like: Tensor) -> Tensor:
    """Tokens ``[batch, tokens, channels]`` with as many dimensions as ``like``."""
    return x[0] if like.ndim == 2 else x.unflatten(1, (*[1] * (like.ndim - 3), -1))
