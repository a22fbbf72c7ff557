"""The blocks of UNets, which merge tokens on entry to the block or its modules (section 4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from .. import reasons
from ..strategies.plan import Grid, Plan
from .attention_trial import Attention
from .block import Block
from .evaluation import ModelState, Outcome
from .key_weights import KeyWeights
from .overrides import Forward, Override
from .stack import Stack, StackPass

Shape = Sequence[int]

WeighKeys = Callable[[dict[str, Any], KeyWeights, Attention | None], dict[str, Any]]

Called = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments after the first."""


@dataclass(frozen=True, kw_only=True)
class UNetCalls:
    """How a host calls the blocks of its UNets.

    A block has the modules ``attn1``, ``attn2`` (or None) and ``ff``. Their first argument is the
    tokens.

    Attributes:
        attends_to_text: whether ``attn1`` of a block is a cross-attention.
        needs_all_tokens: whether something in a block needs all tokens; called with the block, its
            index in the stack, and the block's arguments after the tokens.
        masks: the keyword arguments of an attention that are masks over its tokens.
        source: the name of the keyword argument with the source of keys and values; empty if
            attentions take ``context`` and ``value``.
        weigh_keys: makes a self-attention weigh its keys. Called with its keyword arguments, the
            weights and what ``stored`` returned; returns the keyword arguments to use instead. None
            if the host has no way to do that.
        weigh_stack: makes all self-attentions of a stack weigh their keys by
            :attr:`StackPass.keys`. Called with the pass, what ``stored`` returned for all its
            attentions, and the stack's arguments after its feature map; returns the arguments to
            use instead. None if the host has no way to do that.
        in_the_way: called with an attention; returns why it has to run on all tokens, or None if it
            may run on merged ones. None in place of a function if every attention of the host may.
        shapes: called with the block's arguments after the tokens; returns the shapes of the
            feature map and of the latent, each None where the host does not pass it on. None in
            place of a function if stacks are called with their feature maps instead.
        stored: called with an attention; returns the attention function that is stored with it, or
            None.
    """

    attends_to_text: Callable[[Any], bool]
    needs_all_tokens: Callable[..., bool]
    masks: tuple[str, ...]
    source: str = ""
    weigh_keys: WeighKeys | None = None
    weigh_stack: Callable[..., Called] | None = None
    in_the_way: Callable[[Any], reasons.Reason | None] | None = None
    shapes: Callable[..., tuple[Shape | None, Shape | None]] | None = None
    stored: Callable[[nn.Module], Attention | None] = lambda attention: None


class UNetBlock(Block):
    """A block that takes its tokens as the first argument, as its modules do."""

    def __init__(self, model: ModelState, stack: Stack, index: int, calls: UNetCalls):
        """``calls`` is how the host calls the block."""
        self.calls = calls
        super().__init__(model, stack, index)
        self.attends_to_itself = not calls.attends_to_text(self.module)
        deepest = model.config.policy.keys_down_to
        self.merges_only_keys = self.attends_to_itself and stack.level <= deepest
        self._merges_whole = model.config.scope != "module" and not self.merges_only_keys
        self._is_first, self._is_last = index == 0, index == len(stack.blocks) - 1
        self._shares_plan = not stack.is_of_video and (
            model.config.scope == "stack" or self.merges_only_keys
        )

    @cached_property
    def stored(self) -> Attention | None:
        return self.calls.stored(self.module.attn1)

    @cached_property
    def _stored_in_stack(self) -> set[Attention | None]:
        """The attention functions that are stored with the attentions of its stack."""
        blocks: Any = self.stack.blocks
        attentions = (module for block in blocks for module in (block.attn1, block.attn2))
        return {self.calls.stored(module) for module in attentions if module is not None}

    @property
    def _runs_between_ends(self) -> bool:
        """Whether its stack can run on merged tokens with no overrides between its ends."""
        can_weigh = self.calls.weigh_stack is not None and len(self._stored_in_stack) == 1
        return self._shares_plan and not self.merges_only_keys and can_weigh

    def forget(self) -> None:
        self.outcome = Outcome((self.name,))
        self._plan: Plan | None = None
        self._outer_plan: Plan | None = None

    @cached_property
    def names_in_stack(self) -> tuple[str, ...]:
        if not (self._is_first and self._runs_between_ends):
            return (self.name,)
        # The last block has an outcome of its own.
        return (self.name, *map(self.stack.path, range(1, len(self.stack.blocks) - 1)))

    def overrides(self, by_stack: bool) -> list[Override]:
        config, block = self.model.config, self.module
        overrides: list[Override] = []
        if self._is_first and (self._shares_plan or self.calls.shapes is None):
            stack = self.stack.module
            weighs = by_stack and self._runs_between_ends and self.attends_to_itself
            overrides.append((stack, "forward", self._run_stack(stack.forward, weighs)))
        if by_stack and self._runs_between_ends:
            if self._is_first or self._is_last:
                overrides.append((block, "forward", self._run_block(block.forward)))
            return overrides
        if by_stack and self._shares_plan and self.merges_only_keys:
            if self._is_first:
                overrides.append((block, "forward", self._run_block(block.forward)))
            attends = self._run_self_attention(block.attn1, by_stack=True)
            overrides.append((block.attn1, "forward", attends))
            return overrides
        overrides.append((block, "forward", self.timed(self._run_block(block.forward))))
        if not self.attends_to_itself:
            # Its keys are text, as in the x4 upscaler, so only its queries merge.
            if config.merge_attn:
                overrides.append((block.attn1, "forward", self._run_module(block.attn1)))
        elif config.merge_attn or config.scope != "module":
            overrides.append((block.attn1, "forward", self._run_self_attention(block.attn1)))
        if block.attn2 is not None and config.merge_crossattn:
            overrides.append((block.attn2, "forward", self._run_module(block.attn2)))
        if config.merge_mlp:
            overrides.append((block.ff, "forward", self._run_module(block.ff)))
        return overrides

    def _run_stack(self, forward: Forward, weighs: bool) -> Forward:
        """The forward of the stack; ``weighs`` says whether all its keys are weighed at once."""
        stack = self.stack
        weigh = self.calls.weigh_stack if weighs else None
        stored = next(iter(self._stored_in_stack)) if weighs else None

        def stack_forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            outer, stack.current = stack.current, StackPass(x.shape)
            try:
                if weigh is not None:
                    args, kwargs = weigh(stack.current, stored, *args, **kwargs)
                return forward(x, *args, **kwargs)
            finally:
                stack.current = outer

        return stack_forward

    def _run_block(self, forward: Forward) -> Forward:
        """The forward of the block, with merging where the settings ask for it."""

        def block_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            shared = self.stack.current
            self._plan = self._outer_plan = None
            self.outcome.entered(x.shape[1])
            if shared is not None and shared.tokens is not None:
                return self._run_in_stack(shared, forward, x, *args, **kwargs)
            grid = self._grid_to_merge(x, args, kwargs)
            if grid is None:
                return forward(x, *args, **kwargs)
            if self._merges_whole:
                if not self._is_patched(*args, **kwargs):
                    return self._run_whole(shared, forward, x, grid, *args, **kwargs)
                self.outcome.is_patched = True
            self._plan_modules(shared, x, grid)
            return forward(x, *args, **kwargs)

        return block_forward

    def _run_whole(
        self,
        shared: StackPass | None,
        forward: Forward,
        x: Tensor,
        grid: Grid,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Run the block on merged tokens, and the rest of its stack if that can run as one."""
        plan = self.plan_of(x, grid, self.model.config.policy.stacks)
        if plan is None:
            return forward(x, *args, **kwargs)
        merged = plan.merge(x)
        if shared is not None and self._begins_stack(*args, **kwargs):
            shared.plan, shared.tokens, shared.merged = plan, x, merged
            if self.evaluation.by_stack and self.attends_to_itself:
                shared.keys = self.weights(plan.log_sizes, x)
                if shared.keys is not None:
                    # Assume that attention is replaced; our override clears this.
                    shared.keys.note(reasons.OTHER_ATTENTION)
            return self._run_in_stack(shared, forward, merged, *args, **kwargs)
        self.outcome.merged(x.shape[1], plan)
        self._outer_plan = plan
        # Only the change is unmerged, so that every token keeps its difference from the mean.
        return plan.add_change(x, merged, forward(merged, *args, **kwargs))

    def _run_in_stack(
        self, shared: StackPass, forward: Forward, merged: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the block on tokens that its stack has merged."""
        plan, x, before = shared.plan, shared.tokens, shared.merged
        assert plan is not None and x is not None and before is not None
        self.outcome.merged(x.shape[1], plan)
        self._outer_plan = plan
        y: Tensor = forward(merged, *args, **kwargs)
        return plan.add_change(x, before, y) if self._is_last else y

    def _plan_modules(self, shared: StackPass | None, x: Tensor, grid: Grid) -> None:
        """Plan what merges in its modules, as far as any of them is to merge tokens.

        Where only keys merge, all blocks of the stack have one plan.
        """
        config, outcome = self.model.config, self.outcome
        if not (config.merge_attn or config.merge_crossattn or config.merge_mlp):
            outcome.reason = reasons.ALL_OFF
            return
        if shared is not None and shared.plan is not None and shared.plan.fits(x):
            outcome.grid, self._plan = grid, shared.plan
        else:
            self._plan = self.plan_of(x, grid, config.policy.keys)
            if shared is not None and self.merges_only_keys and self._shares_plan:
                shared.plan = self._plan
        if self._plan is not None:
            # Assume that attention is replaced; our overrides clear this.
            outcome.reason = reasons.ATTENTION_REPLACED

    def _begins_stack(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the block is the first of a stack that can run as one on merged tokens."""
        if not (self._is_first and self._shares_plan):
            return False
        needs_all = self.calls.needs_all_tokens
        return not self.evaluation.may_be_patched or not any(
            needs_all(block, index, *args, **kwargs)
            for index, block in enumerate(self.stack.blocks)
        )

    def _is_patched(self, *args: Any, **kwargs: Any) -> bool:
        """Whether something in the block needs all tokens."""
        return self.evaluation.may_be_patched and self.calls.needs_all_tokens(
            self.module, self.index, *args, **kwargs
        )

    def _grid_to_merge(
        self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Grid | None:
        """The grid of the block's tokens; None if they may not merge.

        The reason is noted, except at a level that the settings leave out. ``args`` and ``kwargs``
        are the block's arguments after the tokens.
        """
        evaluation, shapes, count = self.evaluation, self.calls.shapes, x.shape[1]
        if shapes is not None:
            shape, latent = shapes(*args, **kwargs)
        else:
            current = self.stack.current
            shape, latent = None if current is None else current.shape, None
        if shape is None or shape[0] != x.shape[0] or shape[-2] * shape[-1] != count:
            self.outcome.reason = reasons.TOKENS_CHANGED
            return None
        height, width = shape[-2:]
        times = evaluation.deepest
        if shapes is None:
            # Not by the evaluation's sizes: the compiler would make a graph for each.
            is_deeper = self.stack.level > times
        else:
            tall, wide = evaluation.latent[:2] if latent is None else latent[-2:]
            # Each halving rounds up.
            is_deeper = height < -(-tall // times) or width < -(-wide // times)
        if is_deeper:
            return None
        grid = Grid(height, width)
        return grid if self.is_large_enough(grid) else None

    def _run_module(self, module: Any) -> Forward:
        """The forward of a feed-forward network, or of an attention whose queries merge."""
        forward = module.forward
        attention = None if module is self.module.ff else module

        def module_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            plan = self._plan
            if plan is None or not self._takes(plan, x, kwargs, attention):
                return forward(x, *args, **kwargs)
            return plan.unmerge(forward(plan.merge(x), *args, **kwargs))

        return module_forward

    def _run_self_attention(self, attention: Any, by_stack: bool = False) -> Forward:
        """The forward of a self-attention whose queries, keys or values merge.

        ``by_stack`` says whether it merges by the plan of its stack, as the block may have no
        override that plans.
        """
        config, forward = self.model.config, attention.forward

        def attention_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            outer, plan = self._outer_plan, self._plan
            if outer is not None:
                return forward(x, *args, **self._weigh(outer, x, args, kwargs))
            shared = self.stack.current
            if by_stack and shared is not None and shared.plan is not None:
                plan = shared.plan
                self.outcome.entered(x.shape[1])
            if plan is None or not config.merge_attn:
                return forward(x, *args, **kwargs)
            if not self._takes(plan, x, kwargs, attention, args):
                return forward(x, *args, **kwargs)
            queries, merged = self._merged_arguments(plan, x, *args, **kwargs)
            result: Tensor = forward(queries, **merged)
            return plan.unmerge(result) if config.merges_queries else result

        return attention_forward

    def _merged_arguments(
        self,
        plan: Plan,
        x: Tensor,
        context: Tensor | None = None,
        value: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The arguments of self-attention, merged before its projections (section 4).

        Args:
            plan: the plan of ``x``. Keys and values merge if it fits their sources.
            x: ``[batch, tokens, channels]``, the source of the queries.
            context: the source of the keys; ``x`` if None.
            value: the source of the values; the source of the keys if None.
            kwargs: passed on, with what weighs the keys.

        Returns:
            The source of the queries, and the keyword arguments. If the host takes a single source
            for keys and values, it is the one of the values.
        """
        config, name = self.model.config, self.calls.source
        fits = (context is None or plan.fits(context)) and (value is None or plan.fits(value))
        own_keys = context is None or context is x
        own_value = None if value is context else value
        tokens = x if context is None else context
        queries: Tensor | None = None if config.merges_queries else x
        if not fits:
            context = tokens
        else:
            if config.proportional_attn:
                means, context = plan.merge_keys(tokens)
                kwargs = self._weigh(plan, tokens, (), kwargs)
            else:
                # As in the paper, keys are plain means that count once.
                means = context = plan.merge(tokens)
            value = means if own_value is None else plan.merge(own_value)
            if own_keys and queries is None:
                queries = means
        if queries is None:
            queries = plan.merge(x)
        if not name:
            return queries, {"context": context, "value": value, **kwargs}
        source = context if value is None else value
        if source is not queries:
            kwargs[name] = source
        return queries, kwargs

    def _weigh(
        self, plan: Plan, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The keyword arguments with which a self-attention weighs keys by their tokens.

        ``args`` are its positional arguments after the tokens.
        """
        shared = self.stack.current if self.evaluation.by_stack else None
        if shared is not None and plan is not shared.plan:
            shared = None
        weights = None if shared is None else shared.keys
        if weights is None:
            weights = self.weights(plan.log_sizes, x)
            if weights is None:
                return kwargs
            if shared is not None:
                shared.keys = weights
        if self.calls.weigh_keys is None:
            weights.note(reasons.NO_WEIGHTS)
            return kwargs
        if self.calls.source and self._has_other_keys(args, kwargs):
            weights.note(reasons.CALLED_DIFFERENTLY)
            return kwargs
        return self.calls.weigh_keys(kwargs, weights, self.stored)

    def _has_other_keys(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether other code passes keys to a self-attention; the host passes none."""
        return bool(args) or kwargs.get(self.calls.source) is not None

    def _takes(
        self,
        plan: Plan,
        x: Tensor,
        kwargs: dict[str, Any],
        attention: Any,
        args: tuple[Any, ...] = (),
    ) -> bool:
        """Whether a module can run on ``x`` merged by the plan; the outcome notes the answer.

        ``attention`` is the module, or None for a feed-forward network. ``args`` are the positional
        arguments of a self-attention after the tokens.
        """
        outcome, calls = self.outcome, self.calls
        reason = None
        if attention is not None and calls.in_the_way is not None:
            reason = calls.in_the_way(attention)
        # Only a self-attention has the block's own tokens as keys.
        is_own = bool(calls.source) and self.attends_to_itself and attention is self.module.attn1
        if reason is None and is_own and self._has_other_keys(args, kwargs):
            reason = reasons.OTHER_KEYS
        if reason is not None:
            outcome.left_out = outcome.reason = reason
            return False
        for name in calls.masks:
            if kwargs.get(name) is not None:
                outcome.reason = reasons.ATTENTION_MASKED
                return False
        if not plan.fits(x):
            outcome.reason = reasons.ATTENTION_MASKED
            return False
        outcome.before, outcome.plan = x.shape[1], plan
        outcome.only_keys = self.merges_only_keys
        return True
