"""Blocks that merge tokens on entry to the block or its modules, as in the paper (section 4)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from .. import reasons
from ..merging.plan import Grid, Plan
from ..settings.config import ToMeConfig
from ..strategies.cells import growth_of
from .attention_trial import Attention
from .blocks import Block, Evaluation, Outcome, PatchedModel, Stack, StackWeights
from .key_weights import KeyWeights
from .overrides import Forward, Override
from .work import Layer, Work, block_work, has_projections

Shape = Sequence[int]

WeighKeys = Callable[[dict[str, Any], KeyWeights, Attention | None], dict[str, Any]]


@dataclass(frozen=True)
class UNetRecord:
    """What is known about the UNets of a host: how they are built, and how blocks are called.

    A block has the modules ``attn1``, ``attn2`` (or None) and ``ff``. Their first argument is the
    tokens.

    Attributes:
        layers: the modules of a model, in the order in which they run.
        is_stack: whether a module is a stack, which holds its blocks as ``transformer_blocks``.
        attends_to_text: whether ``attn1`` of a block is a cross-attention.
        needs_all_tokens: whether something in a block needs all tokens; called with the block, its
            index in the stack, and the block's arguments after the tokens.
        masks: the keyword arguments of an attention that are masks over its tokens.
        source: the keyword argument of an attention for the source of keys and values; empty if
            the attention takes ``context`` and ``value``.
        weigh_keys: returns the keyword arguments with which a self-attention weighs its keys;
            called with its keyword arguments, the weights and what ``stored`` returned. None if
            the host has no way to do that.
        weigh_stack: makes what weighs the keys of all self-attentions of a stack, whose first
            block and last are then the only ones that are overridden; it returns None for a stack
            for which it cannot. None if the host has no way to do that.
        in_the_way: returns why an attention runs on all tokens, called with the attention; None if
            it may run on merged ones. None if every attention of the host may.
        shapes: returns the shapes of the feature map and of the latent, where the host passes them
            on; called with the block's arguments after the tokens. None if a stack is called with
            its feature map instead.
        stored: returns the attention function that is stored with an attention, None if none is.
        attentions: see :meth:`tome_nodes.patching.blocks.ModelRecord.attentions`.
    """

    layers: Callable[[Any], Iterable[Layer]]
    is_stack: Callable[[nn.Module], bool]
    attends_to_text: Callable[[Any], bool]
    needs_all_tokens: Callable[..., bool]
    masks: tuple[str, ...]
    source: str = ""
    weigh_keys: WeighKeys | None = None
    in_the_way: Callable[[Any], str | None] | None = None
    shapes: Callable[..., tuple[Shape | None, Shape | None]] | None = None
    weigh_stack: Callable[[Stack], StackWeights | None] | None = None
    stored: Callable[[nn.Module], Attention | None] = lambda attention: None
    attentions: Callable[[], Iterable[Attention]] = tuple

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The stacks of a model, in the order in which they run."""
        for name, module, level in self.layers(model):
            if self.is_stack(module):
                blocks: Any = module.transformer_blocks
                yield Stack(name, module, tuple(blocks), level)

    def block(self, model: PatchedModel, stack: Stack, index: int) -> "ModuleBlock":
        """The block at an index of a stack."""
        return ModuleBlock(model, stack, index, self)

    def work(self, model: PatchedModel) -> Work | None:
        """What an evaluation of a model costs; None if another library has changed attention."""
        if not all(has_projections(block.module) for block in model.blocks):
            return None
        blocks = (
            block_work(
                block.module,
                block.stack.level,
                block.merges_only_keys,
                not self.attends_to_text(block.module),
            )
            for block in model.blocks
        )
        return Work(self.layers(model.model), tuple(blocks))


class ModuleBlock(Block):
    """A block that takes its tokens as the first argument, as its modules do."""

    def __init__(self, model: PatchedModel, stack: Stack, index: int, record: UNetRecord):
        self.record = record
        super().__init__(model, stack, index)
        self._attends_to_itself = not record.attends_to_text(self.module)
        self._is_last = index == len(stack.blocks) - 1
        self.merges_only_keys = self._attends_to_itself and merges_only_keys(
            model.config, stack.level, model.shallowest
        )
        self.has_plan_of_stack = not stack.is_of_video and (
            model.config.scope == "stack" or self.merges_only_keys
        )
        self._growth = growth_of(model.config, in_stacks=False)
        self._growth_in_stacks = growth_of(model.config, in_stacks=True)

    @cached_property
    def stored(self) -> Attention | None:
        return self.record.stored(self.module.attn1)

    @cached_property
    def _weighs(self) -> StackWeights | None:
        """What weighs the keys of its stack at once; None if each block has to."""
        return None if self.record.weigh_stack is None else self.record.weigh_stack(self.stack)

    def forget(self) -> None:
        self.outcome = Outcome(self.name)
        self._plan: Plan | None = None
        self._outer_plan: Plan | None = None

    def overrides(self) -> list[Override]:
        config, block = self.model.config, self.module
        overrides: list[Override] = []
        if self.record.shapes is None and self.index == 0:
            stack = self.stack.module
            overrides.append((stack, "forward", self._run_stack(stack.forward)))
        overrides.append((block, "forward", self.timed(self._run_block(block.forward))))
        if not self._attends_to_itself:
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

    def overrides_of_stack(self) -> list[Override]:
        if not self.has_plan_of_stack or not (self.merges_only_keys or self._weighs):
            return self.overrides()
        block = self.module
        overrides: list[Override] = []
        if self.index == 0 or (self._is_last and not self.merges_only_keys):
            overrides.append((block, "forward", self._run_block(block.forward)))
        if self.merges_only_keys:
            overrides.append((block.attn1, "forward", self._run_keys_of_stack(block.attn1)))
        return overrides

    def _run_stack(self, forward: Forward) -> Forward:
        def stack_forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.evaluation.feature_map = x.shape
            return forward(x, *args, **kwargs)

        return stack_forward

    def _run_block(self, forward: Forward) -> Forward:
        def block_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            evaluation = self.evaluation
            if self.index == 0:
                _forget_stack(evaluation)
            y = self._run_merged(forward, x, *args, **kwargs)
            if self._is_last:
                if evaluation.stack_weights is not None:
                    evaluation.stack_weights.take_off(kwargs)
                    evaluation.stack_weights = None
                _forget_stack(evaluation)
            return y

        return block_forward

    def _run_merged(self, forward: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block so that it merges what it is to merge."""
        evaluation, outcome, config = self.evaluation, self.outcome, self.model.config
        self._plan = self._outer_plan = None
        outcome.has_run = True
        if outcome.plan is None:
            outcome.before = x.shape[1]
        if evaluation.stack_tokens is not None:
            return self._run_in_stack(forward, x, *args, **kwargs)
        grid = self._grid_to_merge(evaluation, x, args, kwargs)
        if grid is None:
            return forward(x, *args, **kwargs)
        in_modules = config.scope == "module" or self.merges_only_keys
        if not in_modules and self._is_patched(*args, **kwargs):
            outcome.is_patched = in_modules = True
        if in_modules:
            if config.merge_attn or config.merge_crossattn or config.merge_mlp:
                outcome.reason = reasons.ATTENTION_REPLACED
                self._plan = self._plan_of_modules(x, grid)
            else:
                outcome.reason = reasons.ALL_OFF
            return forward(x, *args, **kwargs)
        plan = self.plan_of(x, grid, self._growth_in_stacks)
        if plan is None:
            return forward(x, *args, **kwargs)
        merged = plan.merge(x)
        if self._begins_stack(*args, **kwargs):
            evaluation.stack_plan, evaluation.stack_tokens = plan, x
            evaluation.stack_merged = merged
            self._weigh_stack(plan, x, kwargs)
            return self._run_in_stack(forward, merged, *args, **kwargs)
        outcome.merged(x.shape[1], plan)
        self._outer_plan = plan
        # Only the change is unmerged, so that every token keeps its difference from the mean.
        return plan.add_change(x, merged, forward(merged, *args, **kwargs))

    def _plan_of_modules(self, x: Tensor, grid: Grid) -> Plan | None:
        """The plan of what merges in the modules; where only keys do, that of the stack."""
        evaluation = self.evaluation
        plan = evaluation.stack_plan
        if plan is not None and plan.fits(x):
            self.outcome.grid = grid
            return plan
        plan = self.plan_of(x, grid, self._growth)
        if self.merges_only_keys and self.has_plan_of_stack:
            evaluation.stack_plan = plan
        return plan

    def _run_in_stack(self, forward: Forward, merged: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block on tokens that its stack has merged."""
        evaluation = self.evaluation
        plan, x, before = evaluation.stack_plan, evaluation.stack_tokens, evaluation.stack_merged
        assert plan is not None and x is not None and before is not None
        self.outcome.merged(x.shape[1], plan)
        self._outer_plan = plan
        y: Tensor = forward(merged, *args, **kwargs)
        return plan.add_change(x, before, y) if self._is_last else y

    def _begins_stack(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the block is the first of a stack that can run as one on merged tokens."""
        return (
            self.index == 0
            and self.has_plan_of_stack
            and (
                self.evaluation.is_unpatched
                or not any(
                    self.record.needs_all_tokens(block, index, *args, **kwargs)
                    for index, block in enumerate(self.stack.blocks)
                )
            )
        )

    def _is_patched(self, *args: Any, **kwargs: Any) -> bool:
        """Whether something in the block needs all tokens."""
        return not self.evaluation.is_unpatched and self.record.needs_all_tokens(
            self.module, self.index, *args, **kwargs
        )

    def _grid_to_merge(
        self, evaluation: Evaluation, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Grid | None:
        """The grid of the block's tokens; None if they may not merge.

        The reason is noted, except at a level that the settings leave out.

        Args:
            evaluation: the current evaluation.
            x: the tokens, ``[batch, tokens, channels]``.
            args: the block's other positional arguments.
            kwargs: the block's keyword arguments.
        """
        shapes, count = self.record.shapes, x.shape[1]
        shape, latent = (
            (evaluation.feature_map, None) if shapes is None else shapes(*args, **kwargs)
        )
        if shape is None or shape[0] != x.shape[0] or shape[-2] * shape[-1] != count:
            self.outcome.reason = reasons.TOKENS_CHANGED
            return None
        height, width = shape[-2:]
        times = evaluation.deepest
        if shapes is None:
            # The sizes of the evaluation are numbers, for each of which a compiler makes a graph.
            is_deeper = self.stack.level > times
        else:
            tall, wide = evaluation.latent[:2] if latent is None else latent[-2:]
            # Each halving rounds up.
            is_deeper = height < -(-tall // times) or width < -(-wide // times)
        if is_deeper:
            return None
        if count < self.model.least_tokens:
            self.outcome.reason = self.model.too_few(count)
            return None
        return Grid(height, width)

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

    def _run_self_attention(self, attention: Any) -> Forward:
        config, forward = self.model.config, attention.forward
        merged = self._with_source(forward)

        def attention_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            outer, plan = self._outer_plan, self._plan
            if outer is not None:
                return forward(x, *args, **self._weigh(outer, x, args, kwargs))
            if plan is None or not config.merge_attn:
                return forward(x, *args, **kwargs)
            if not self._takes(plan, x, kwargs, attention, args):
                return forward(x, *args, **kwargs)
            return self._attend_on_merged(merged, plan, x, *args, **kwargs)

        return attention_forward

    def _run_keys_of_stack(self, attention: Any) -> Forward:
        """The forward of a self-attention whose keys and values merge by the plan of its stack."""
        forward = attention.forward
        merged = self._with_source(forward)

        def attention_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            evaluation = self.evaluation
            plan = evaluation.stack_plan
            if plan is None:
                return forward(x, *args, **kwargs)
            self.outcome.entered(x.shape[1])
            if self._takes(plan, x, kwargs, attention, args):
                y = self._attend_on_merged(merged, plan, x, *args, **kwargs)
            else:
                y = forward(x, *args, **kwargs)
            if self._is_last:
                _forget_stack(evaluation)
            return y

        return attention_forward

    def _attend_on_merged(
        self,
        attention: Forward,
        plan: Plan,
        x: Tensor,
        context: Tensor | None = None,
        value: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run self-attention on tokens that are merged before its projections (section 4).

        Args:
            attention: called with ``x``, ``context`` and ``value``, like the host's attention.
            plan: the plan of ``x``. Keys and values merge if it fits their sources.
            x: ``[batch, tokens, channels]``, the source of the queries.
            context: the source of the keys; ``x`` if None.
            value: the source of the values; the source of the keys if None.
            kwargs: passed on, with what weighs the keys.

        Returns:
            ``[batch, tokens, channels]``.
        """
        config = self.model.config
        queries = plan if config.attn_tokens == "q,k,v" else None
        fits = (context is None or plan.fits(context)) and (value is None or plan.fits(value))
        own_keys = context is None or context is x
        own_value = None if value is context else value
        tokens = x if context is None else context
        merged: Tensor | None = None
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
            if own_keys:
                merged = means
        if queries is None:
            merged = x
        elif merged is None:
            merged = queries.merge(x)
        result: Tensor = attention(merged, context=context, value=value, **kwargs)
        return result if queries is None else queries.unmerge(result)

    def _with_source(self, forward: Forward) -> Forward:
        """The forward of a self-attention, to be called with ``x``, ``context`` and ``value``.

        If it takes a single source for keys and values, it gets the source of the values.
        """
        name = self.record.source
        if not name:
            return forward

        def attention(
            x: Tensor, context: Tensor | None = None, value: Tensor | None = None, **kwargs: Any
        ) -> Tensor:
            source = context if value is None else value
            if source is not None and source is not x:
                kwargs[name] = source
            return forward(x, **kwargs)

        return attention

    def _weigh_stack(self, plan: Plan, x: Tensor, kwargs: dict[str, Any]) -> None:
        """Weigh keys in all self-attentions of the stack, which begins, if the host can."""
        evaluation = self.evaluation
        if not (evaluation.weighs_stacks and self._attends_to_itself and self._weighs):
            return
        weights = self.weights(plan.log_sizes, x)
        if weights is not None:
            evaluation.stack_weights = self._weighs
            self._weighs.put_on(kwargs, weights)

    def _weigh(
        self, plan: Plan, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The keyword arguments with which a self-attention weighs keys by their tokens.

        ``args`` are its positional arguments after the tokens.
        """
        evaluation = self.evaluation
        is_of_stack = evaluation.weighs_stacks and plan is evaluation.stack_plan
        weights = evaluation.stack_keys if is_of_stack else None
        if weights is None:
            weights = self.weights(plan.log_sizes, x)
            if weights is None:
                return kwargs
            if is_of_stack:
                evaluation.stack_keys = weights
        if self.record.weigh_keys is None:
            weights.note(reasons.NO_WEIGHTS)
            return kwargs
        if self.record.source and self._has_other_keys(args, kwargs):
            weights.note(reasons.CALLED_DIFFERENTLY)
            return kwargs
        return self.record.weigh_keys(kwargs, weights, self.stored)

    def _has_other_keys(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether other code gives the keys of a self-attention, where the host does not."""
        return bool(args) or kwargs.get(self.record.source) is not None

    def _takes(
        self,
        plan: Plan,
        x: Tensor,
        kwargs: dict[str, Any],
        attention: Any = None,
        args: tuple[Any, ...] = (),
    ) -> bool:
        """Whether a module can run on ``x`` merged by the plan; noted in the outcome.

        ``attention`` is the module if it is one, and ``args`` are the positional arguments of a
        self-attention after the tokens.
        """
        outcome, record = self.outcome, self.record
        reason = None
        if attention is not None and record.in_the_way is not None:
            reason = record.in_the_way(attention)
        # Only a self-attention has the block's own tokens as keys.
        is_own = bool(record.source) and self._attends_to_itself and attention is self.module.attn1
        if reason is None and is_own and self._has_other_keys(args, kwargs):
            reason = reasons.OTHER_KEYS
        if reason is not None:
            outcome.left_out = outcome.reason = reason
            return False
        for name in record.masks:
            if kwargs.get(name) is not None:
                outcome.reason = reasons.ATTENTION_MASKED
                return False
        if not plan.fits(x):
            outcome.reason = reasons.ATTENTION_MASKED
            return False
        outcome.before, outcome.plan = x.shape[1], plan
        return True


def _forget_stack(evaluation: Evaluation) -> None:
    """Drop what the blocks of the running stack share."""
    evaluation.stack_plan = evaluation.stack_keys = None
    evaluation.stack_tokens = evaluation.stack_merged = None


def merges_only_keys(config: ToMeConfig, level: int, shallowest: int) -> bool:
    """Whether a preset merges only keys and values at a level.

    Under *fast* it is so in the largest maps that have attention, at the level ``shallowest``:
    there, whole stacks change pictures most (benchmarks/FIDELITY.md).
    """
    return config.grows and (config.scope == "module" or level == shallowest)


def is_masked(kwargs: Mapping[str, Any], masks: Iterable[str]) -> bool:
    """Whether any argument named in ``masks`` is given."""
    return any(kwargs.get(name) is not None for name in masks)


def layers_by_level(model: nn.Module) -> Iterator[Layer]:
    """The modules of a UNet whose code descends from latent-diffusion's.

    Its modules are in the order in which they run, and the classes of layers between its levels are
    named ``Downsample`` and ``Upsample``.
    """
    level = 1
    for name, module in model.named_modules():
        kind = type(module).__name__
        # A residual block resizes its skip connection, too; this counts only once.
        if kind == "Downsample" and not name.endswith(".x_upd"):
            level *= 2
        elif kind == "Upsample" and not name.endswith(".x_upd"):
            level //= 2
        yield name, module, level
