"""Run the transformer blocks of a UNet on merged tokens, whichever program the UNet belongs to.

A host finds the spatial transformers, tells in subclasses of :class:`MergedStack` and
:class:`MergedBlock` what is its own about them, and puts the overrides on for one model evaluation
at a time.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..config import ToMeConfig
from ..grid import Grid
from ..plan import Plan
from ..scopes import change_on_merged, on_merged, self_attention_on_merged
from ..statistics import RunStatistics
from ..strategies.pool import PoolPlan
from .engine import Engine

Plans = dict[Grid, Plan | PoolPlan | None]
"""Plans that the blocks of one level share."""


class MergedUNet:
    """The overrides for the transformer blocks of one UNet, in one sampling run.

    Attributes:
        config: the settings.
        engine: makes the plans of the present evaluation.
        max_downsample: the level down to which blocks merge, ``auto`` resolved.
        ratio: of the present step.
        stacks: the overrides, by spatial transformer.
        blocks: the same, one after another.
        plans: the plans that blocks of one level share in the present evaluation, None where
            each block has its own.
    """

    engine: Engine

    def __init__(
        self,
        config: ToMeConfig,
        max_downsample: int,
        stack_class: "type[MergedStack]",
        transformers: Iterable[tuple[str, nn.Module]],
    ):
        """Prepare the overrides.

        Args:
            config: see above.
            max_downsample: see above.
            stack_class: what the host knows of its spatial transformers.
            transformers: the spatial transformers by name.
        """
        self.config = config
        self.max_downsample = max_downsample
        self.ratio = config.ratio
        self.stacks = [stack_class(name, module, self) for name, module in transformers]
        self.blocks = [block for stack in self.stacks for block in stack.blocks]
        self.plans: Plans | None = None
        self._kept: dict[Hashable, tuple[int, Plans]] = {}

    def start_step(self, engine: Engine, key: Tensor, ratio: float) -> None:
        """Begin an evaluation at ``ratio``, its random picks keyed by a scalar int64 tensor."""
        self.engine = engine
        self.ratio = ratio
        engine.strategy.start_step(key, ratio)

    def plans_for(self, step: int, composition: Hashable) -> Plans | None:
        """The plans to share in this evaluation: those of an earlier step, or none so far.

        A plan holds for the samples of one batch, so it is kept by what the batch is made of.
        """
        every = self.config.reuse_steps
        if every == 0:
            return None
        made_in, plans = self._kept.get(composition, (-1, {}))
        if made_in != step // every:
            plans = {}
            self._kept[composition] = (step // every, plans)
        return plans

    def why_no_plan(self, grid: Grid) -> str:
        """What to tell where a strategy has made no plan."""
        config = self.config
        if self.ratio == 0:
            return "the ratio is 0 at every step that could merge"
        if config.strategy != "cluster" and grid.cells(config.sy, config.sx).tokens == 0:
            return (
                f"a feature map of {grid.height}x{grid.width} tokens holds no cell of "
                f"sy={config.sy} by sx={config.sx}"
            )
        return f"{grid.tokens} tokens are too few for ratio={self.ratio:g}"

    def forget_plans(self) -> None:
        """Keep no plan of an earlier step: another sampling run begins."""
        self._kept.clear()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the overrides on for one model evaluation."""
        with ExitStack() as exits:
            for stack in self.stacks:
                stack.begin()
                exits.callback(stack.end)
                for module, forward in stack.overrides():
                    exits.enter_context(forward_override(module, forward))
            yield

    def in_words(self) -> str:
        """What the last evaluation merged, such as ``5/16 blocks, 4096→2048 tokens``."""
        merged = [block.slots_used for block in self.blocks if block.slots_used is not None]
        if not merged:
            return "all tokens"
        sizes = ", ".join(f"{before}→{after}" for before, after in sorted({*merged})[::-1])
        return f"{len(merged)}/{len(self.blocks)} blocks, {sizes} tokens"

    def note(self, statistics: RunStatistics, step: int) -> None:
        """Add to the statistics of a run what the blocks did in the last evaluation."""
        statistics.blocks_present = len(self.blocks)
        for block in self.blocks:
            if block.made_plan is not None:
                statistics.planned(block.made_plan)
            if block.slots_used is not None:
                statistics.merged(step, block.name, *block.slots_used)
                if block.fell_back:
                    statistics.fell_back.add(block.name)
            elif block.reason is not None:
                statistics.skipped(block.reason)


@contextmanager
def forward_override(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Let ``module`` run ``forward``; an override that other code put there comes back after."""
    missing = object()
    before = module.__dict__.get("forward", missing)
    module.forward = forward
    try:
        yield
    finally:
        if before is missing:
            del module.forward
        else:
            module.forward = before


class MergedStack:
    """The transformer blocks of one spatial transformer, which may run as one on merged tokens.

    Attributes:
        module: the spatial transformer.
        plan: the plan under which the stack runs, from its first block to its last.
        tokens: ``[batch, tokens, channels]`` that entered its first block.
        merged: ``[batch, slots, channels]``, their merge.
    """

    block_class: "type[MergedBlock]"
    """What the host knows of its blocks."""

    runs_as_one = True
    """Whether nothing else runs between the blocks."""

    def __init__(self, name: str, module: nn.Module, unet: MergedUNet):
        self.module = module
        self.unet = unet
        self.plan: Plan | PoolPlan | None = None
        self.tokens: Tensor | None = None
        self.merged: Tensor | None = None
        self.blocks = [
            self.block_class(f"{name}.{index}", index, block, self)
            for index, block in enumerate(module.transformer_blocks)
        ]

    def begin(self) -> None:
        """Forget what was noted of the last evaluation."""
        for block in self.blocks:
            block.tokens = block.slots_used = block.made_plan = block.reason = None
            block.fell_back = False

    def end(self) -> None:
        """Let go of the tensors of an evaluation."""
        self.plan = self.tokens = self.merged = None
        for block in self.blocks:
            block.plan = None

    def overrides(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """Modules, and what each of them is to run instead of its ``forward``."""
        return [override for block in self.blocks for override in block.overrides()]

    def enter(self, plan: Plan | PoolPlan, x: Tensor) -> Tensor:
        """Merge what enters the first block."""
        self.plan, self.tokens, self.merged = plan, x, plan.merge(x)
        return self.merged

    def leave(self, y: Tensor) -> Tensor:
        """Add the change that all blocks made together to all tokens."""
        result = self.plan.add_change(self.tokens, self.merged, y)
        self.plan = self.tokens = self.merged = None
        return result


class MergedBlock:
    """The overrides for one transformer block; a host's subclass knows how the block is called.

    Only attribute writes leave these methods, so that torch.compile can trace them.

    Attributes:
        name: path of the block within the UNet.
        index: its place in the stack.
        module: the block.
        plan: the plan under which its modules run.
        tokens: how many entered the block, merged by an earlier one or not.
        made_plan: whether it made the plan that it had, or had that of another block or step.
        slots_used: tokens before and after, once anything of the block ran on merged tokens.
        reason: why the block ran on all its tokens.
        fell_back: whether only its modules ran on merged tokens though a wider scope was asked for.
    """

    tokens_changed: str
    """The reason to tell where the tokens of a block are not the grid's."""

    attention_masked: str
    """The reason to tell where the attention is masked, or called with other tokens."""

    attention_replaced: str
    """The reason to tell where the modules of a block were not called."""

    def __init__(self, name: str, index: int, block: nn.Module, stack: MergedStack):
        self.name = name
        self.index = index
        self.stack = stack
        self.plan: Plan | PoolPlan | None = None
        self.tokens: int | None = None
        self.made_plan: bool | None = None
        self.slots_used: tuple[int, int] | None = None
        self.reason: str | None = None
        self.fell_back = False
        self.module = block

    def overrides(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """The block and its modules, and what each of them is to run instead of its ``forward``."""
        config, block = self.stack.unet.config, self.module
        overrides = [(block, self._run_block(block.forward))]
        if config.merge_attn:
            attention = block.attn1.forward
            if self.attends_to_text(block):
                attend = on_merged
            else:
                attention = self.self_attention(attention)
                attend = partial(self_attention_on_merged, attn_tokens=config.attn_tokens)
            overrides.append((block.attn1, self._run_module(attention, attend)))
        if config.merge_crossattn and block.attn2 is not None:
            overrides.append((block.attn2, self._run_module(block.attn2.forward, on_merged)))
        if config.merge_mlp:
            overrides.append((block.ff, self._run_module(block.ff.forward, on_merged)))
        return overrides

    def attends_to_text(self, block: nn.Module) -> bool:
        """Whether ``attn1`` of the block is a cross-attention."""
        raise NotImplementedError

    def self_attention(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The forward of a self-attention, to be called with ``x``, ``context`` and ``value``."""
        return forward

    def grids(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Grid, Grid] | None:
        """The grids of ``x`` and of the latent, from what the block was called with.

        None where ``x``, ``[batch, tokens, channels]``, is not a feature map of the batch.
        """
        raise NotImplementedError

    def needs_all_tokens(self, *args: Any, **kwargs: Any) -> bool:
        """Whether something in the block, called with these arguments, expects all tokens."""
        raise NotImplementedError

    def is_masked(self, kwargs: dict[str, Any]) -> bool:
        """Whether a module of the block is called with a mask over its tokens."""
        raise NotImplementedError

    def _run_block(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        config, stack = self.stack.unet.config, self.stack

        def block_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.plan = None
            self.tokens = x.shape[1]
            if stack.plan is None:
                plan = self._plan_for(x, *args, **kwargs)
                self.fell_back = config.scope != "module" and self.needs_all_tokens(*args, **kwargs)
                if plan is None or config.scope == "module" or self.fell_back:
                    self.plan = plan
                    return forward(x, *args, **kwargs)
                first_of_stack = (
                    config.scope == "stack"
                    and self.index == 0
                    and stack.runs_as_one
                    and not any(block.needs_all_tokens(*args, **kwargs) for block in stack.blocks)
                )
                if not first_of_stack:
                    self.slots_used = (x.shape[1], plan.slot_count)
                    return change_on_merged(forward, plan, x, *args, **kwargs)
                x = stack.enter(plan, x)
            self.slots_used = (stack.tokens.shape[1], stack.plan.slot_count)
            y = forward(x, *args, **kwargs)
            return stack.leave(y) if self is stack.blocks[-1] else y

        return block_forward

    def _run_module(
        self, forward: Callable[..., Tensor], run_on_merged: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        def module_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            plan = self.plan
            if plan is None:
                return forward(x, *args, **kwargs)
            if self.is_masked(kwargs) or not plan.fits(x):
                self.reason = self.attention_masked
                return forward(x, *args, **kwargs)
            self.slots_used = (x.shape[1], plan.slot_count)
            return run_on_merged(forward, plan, x, *args, **kwargs)

        return module_forward

    def _plan_for(self, x: Tensor, *args: Any, **kwargs: Any) -> Plan | PoolPlan | None:
        """The plan of this block, None where it is not to merge.

        The reason is noted, but for a block of another level: that is as the settings say.
        """
        grids = self.grids(x, *args, **kwargs)
        if grids is None:
            self.reason = self.tokens_changed
            return None
        grid, latent = grids
        unet = self.stack.unet
        config = unet.config
        if not grid.is_within(latent, unet.max_downsample):
            return None
        least = unet.engine.least_tokens
        if grid.tokens < least:
            automatic = "" if config.min_tokens else ", which is where it pays here (min_tokens=0)"
            self.reason = f"{grid.tokens} tokens are fewer than {least}{automatic}"
            return None
        plan = self._shared_plan(x, grid)
        if plan is None:
            self.reason = unet.why_no_plan(grid)
        elif config.scope == "module" and not (
            config.merge_attn or config.merge_crossattn or config.merge_mlp
        ):
            self.reason = "merge_attn, merge_crossattn and merge_mlp are all off"
        else:
            self.reason = self.attention_replaced
        return plan

    def _shared_plan(self, x: Tensor, grid: Grid) -> Plan | PoolPlan | None:
        unet = self.stack.unet
        strategy = unet.engine.strategy
        if unet.plans is None:
            plan = strategy.plan(x, grid)
            self.made_plan = None if plan is None else True
            return plan
        kept = unet.plans.get(grid)
        makes = grid not in unet.plans or (kept is not None and not kept.fits(x))
        if makes:
            unet.plans[grid] = strategy.plan(x, grid)
        self.made_plan = None if unet.plans[grid] is None else makes
        return unet.plans[grid]
