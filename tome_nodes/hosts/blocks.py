"""Run the transformer blocks of a UNet on merged tokens, whichever program the UNet belongs to.

A host finds the spatial transformers, tells in subclasses of :class:`MergedStack` and
:class:`MergedBlock` what is its own about them, and puts the overrides on for one model evaluation
at a time.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..config import ToMeConfig
from ..grid import Grid
from ..recording import Recorder
from ..scopes import change_on_merged, on_merged, self_attention_on_merged
from ..statistics import RunStatistics
from ..strategies import AnyPlan
from .engine import Engine

Plans = dict[Grid, tuple[AnyPlan | None, AnyPlan | None]]
"""Plans that the blocks of one level share: of all tokens, and of keys and values."""


def deepest_level(config: ToMeConfig, blocks_by_level: Mapping[int, int]) -> int:
    """How many times smaller than the latent a feature map may be to be merged.

    Args:
        config: the settings.
        blocks_by_level: transformer blocks of a UNet by how many times smaller they work.
    """
    if config.max_downsample != "auto":
        return config.max_downsample
    if config.scope == "module":
        return min(blocks_by_level)
    # Whole blocks are worth merging where most of them are: in SDXL, one level deeper.
    return min(blocks_by_level, key=lambda level: (-blocks_by_level[level], level))


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
        recorder: notes what the blocks do in detail, None where nobody wants to know.
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
        self.recorder: Recorder | None = None
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
                    # The setter of modules takes its time, and SDXL has hundreds of these.
                    attributes = vars(module)
                    exits.callback(_restore_forward, attributes, attributes.get("forward"))
                    attributes["forward"] = forward
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
            statistics.largest_map = max(statistics.largest_map, block.tokens or 0)
            if block.made_plan is not None:
                statistics.planned(block.made_plan)
            if block.slots_used is not None:
                statistics.merged(step, block.name, *block.slots_used)
                if block.unweighted is not None:
                    statistics.unweighted.add(block.unweighted)
                if block.fell_back:
                    statistics.fell_back.add(block.name)
            elif block.reason is not None:
                statistics.skipped(block.reason)


def _restore_forward(attributes: dict[str, Any], before: Callable[..., Any] | None) -> None:
    """Take an override off a module; one that other code put there before comes back."""
    if before is None:
        del attributes["forward"]
    else:
        attributes["forward"] = before


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
        self.plan: AnyPlan | None = None
        self.tokens: Tensor | None = None
        self.merged: Tensor | None = None
        self.blocks = [
            self.block_class(f"{name}.{index}", index, block, self)
            for index, block in enumerate(module.transformer_blocks)
        ]

    def begin(self) -> None:
        """Forget what was noted of the last evaluation."""
        for block in self.blocks:
            block.grid = block.tokens = block.slots_used = block.made_plan = None
            block.reason = block.unweighted = None
            block.fell_back = False

    def end(self) -> None:
        """Let go of the tensors of an evaluation."""
        self.plan = self.tokens = self.merged = None
        for block in self.blocks:
            block.plan = block.keys_plan = block.outer_plan = None

    def overrides(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """Modules, and what each of them is to run instead of its ``forward``."""
        return [override for block in self.blocks for override in block.overrides()]

    def enter(self, plan: AnyPlan, x: Tensor) -> Tensor:
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
        keys_plan: the same for the keys and values of its self-attention.
        outer_plan: the plan whose slots are the tokens that the block runs on as a whole.
        made_plan: whether it made the plan that it had, or had that of another block or step.
        grid: height and width of what it made or got a plan for, in tokens.
        tokens: how many entered the block, merged by an earlier one or not.
        slots_used: tokens before and after, once anything of the block ran on merged tokens.
        reason: why the block ran on all its tokens.
        fell_back: whether only its modules ran on merged tokens though a wider scope was asked for.
        unweighted: why merged keys weighed as one token each.
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
        self.plan: AnyPlan | None = None
        self.keys_plan: AnyPlan | None = None
        self.outer_plan: AnyPlan | None = None
        self.made_plan: bool | None = None
        self.grid: tuple[int, int] | None = None
        self.tokens: int | None = None
        self.unweighted: str | None = None
        self.slots_used: tuple[int, int] | None = None
        self.reason: str | None = None
        self.fell_back = False
        self.module = block

    def overrides(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """The block and its modules, and what each of them is to run instead of its ``forward``."""
        unet, block = self.stack.unet, self.module
        config, run_block = unet.config, self._run_block(block.forward)
        if unet.recorder is not None:
            run_block = unet.recorder.timed(self.name, run_block)
        overrides = [(block, run_block)]
        if self.attends_to_text(block):
            if config.merge_attn:
                overrides.append((block.attn1, self._run_module(block.attn1.forward, on_merged)))
        elif config.merge_attn or config.scope != "module":
            attention = self.self_attention(block.attn1.forward)
            overrides.append((block.attn1, self._run_self_attention(attention)))
        if config.merge_crossattn and block.attn2 is not None:
            overrides.append((block.attn2, self._run_module(block.attn2.forward, on_merged)))
        if config.merge_mlp:
            overrides.append((block.ff, self._run_module(block.ff.forward, on_merged)))
        return overrides

    def attends_to_text(self, block: nn.Module) -> bool:
        """Whether ``attn1`` of the block is a cross-attention."""
        raise NotImplementedError

    def self_attention(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The forward of a self-attention, to be called with ``x``, ``context`` and ``value``.

        A host whose attention has one source of keys and values takes the one for values.
        """
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

    def weigh_keys(self, kwargs: dict[str, Any], log_sizes: Tensor) -> dict[str, Any]:
        """The keyword arguments of a self-attention that add ``log_sizes`` to its logits.

        Where the host's attention cannot, they are those given, and ``unweighted`` says why.

        Args:
            kwargs: the keyword arguments otherwise.
            log_sizes: ``[batch, keys]`` of the dtype of the tokens.
        """
        self.unweighted = "this host has no way to weigh them"
        return kwargs

    def _weigh(self, plan: AnyPlan, x: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        log_sizes = plan.log_sizes
        return kwargs if log_sizes is None else self.weigh_keys(kwargs, log_sizes.to(x.dtype))

    def _takes(self, plan: AnyPlan, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether a module called with ``x`` can run under the plan; noted either way."""
        if self.is_masked(kwargs) or not plan.fits(x):
            self.reason = self.attention_masked
            return False
        self.slots_used = (x.shape[1], plan.slot_count)
        return True

    def _run_block(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        config, stack = self.stack.unet.config, self.stack

        def block_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.plan = self.keys_plan = self.outer_plan = None
            self.tokens = x.shape[1]
            if stack.plan is None:
                plan, keys_plan = self._plans_for(x, *args, **kwargs)
                self.fell_back = config.scope != "module" and self.needs_all_tokens(*args, **kwargs)
                if plan is None or config.scope == "module" or self.fell_back:
                    self.plan, self.keys_plan = plan, keys_plan
                    return forward(x, *args, **kwargs)
                first_of_stack = (
                    config.scope == "stack"
                    and self.index == 0
                    and stack.runs_as_one
                    and not any(block.needs_all_tokens(*args, **kwargs) for block in stack.blocks)
                )
                if not first_of_stack:
                    self.slots_used = (x.shape[1], plan.slot_count)
                    self.outer_plan = plan
                    return change_on_merged(forward, plan, x, *args, **kwargs)
                x = stack.enter(plan, x)
            else:
                self.made_plan = False
            self.slots_used = (stack.tokens.shape[1], stack.plan.slot_count)
            self.outer_plan = stack.plan
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
            if not self._takes(plan, x, kwargs):
                return forward(x, *args, **kwargs)
            return run_on_merged(forward, plan, x, *args, **kwargs)

        return module_forward

    def _run_self_attention(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        config = self.stack.unet.config
        proportional = config.proportional_attn
        weigh = self._weigh if proportional else None
        merges_queries, merges_keys = "q" in config.attn_tokens, "k,v" in config.attn_tokens

        def attention_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.outer_plan is not None:
                if proportional:
                    kwargs = self._weigh(self.outer_plan, x, kwargs)
                return forward(x, *args, **kwargs)
            queries = self.plan if config.merge_attn and merges_queries else None
            keys = self.keys_plan if config.merge_attn and merges_keys else None
            plan = keys if queries is None else queries
            if plan is None:
                return forward(x, *args, **kwargs)
            if not self._takes(plan, x, kwargs):
                return forward(x, *args, **kwargs)
            return self_attention_on_merged(forward, queries, keys, x, *args, weigh=weigh, **kwargs)

        return attention_forward

    def _plans_for(
        self, x: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[AnyPlan | None, AnyPlan | None]:
        """The plans of this block, of all tokens and of keys, None where it is not to merge.

        The reason is noted, but for a block of another level: that is as the settings say.
        """
        grids = self.grids(x, *args, **kwargs)
        if grids is None:
            self.reason = self.tokens_changed
            return None, None
        grid, latent = grids
        unet = self.stack.unet
        config = unet.config
        if not grid.is_within(latent, unet.max_downsample):
            return None, None
        least = unet.engine.least_tokens
        if grid.tokens < least:
            automatic = "" if config.min_tokens else ", which is where it pays here (min_tokens=0)"
            self.reason = f"{grid.tokens} tokens are fewer than {least}{automatic}"
            return None, None
        plans = self._shared_plans(x, grid)
        if plans == (None, None):
            self.made_plan = None
            self.reason = unet.why_no_plan(grid)
        elif config.scope == "module" and not (
            config.merge_attn or config.merge_crossattn or config.merge_mlp
        ):
            self.reason = "merge_attn, merge_crossattn and merge_mlp are all off"
        else:
            self.reason = self.attention_replaced
        return plans

    def _shared_plans(self, x: Tensor, grid: Grid) -> tuple[AnyPlan | None, AnyPlan | None]:
        unet = self.stack.unet
        # torch.compile does not let a frozen dataclass out of what it traces.
        self.grid = grid.height, grid.width
        if unet.plans is None:
            return self._make_plans(x, grid)
        kept = unet.plans.get(grid, ())
        if grid in unet.plans and all(plan is None or plan.fits(x) for plan in kept):
            self.made_plan = False
        else:
            unet.plans[grid] = self._make_plans(x, grid)
        return unet.plans[grid]

    def _make_plans(self, x: Tensor, grid: Grid) -> tuple[AnyPlan | None, AnyPlan | None]:
        strategy, config = self.stack.unet.engine.strategy, self.stack.unet.config
        self.made_plan = True
        if config.kv_ratio >= 0 and config.scope == "module":
            return strategy.plans(x, grid)
        plan = strategy.plan(x, grid)
        return plan, plan
