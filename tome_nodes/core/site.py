"""The places of a model that may merge: its blocks, and the stacks in which they stand.

A family of models tells in subclasses of :class:`BlockSite`, :class:`StackSite` and
:class:`Family` what is its own about them. The overrides of a model are put on for one evaluation
at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..config import ToMeConfig
from ..ops import Operations
from .apply import attention_on_merged, block_on_merged, module_on_merged
from .engine import Engine
from .grid import Grid
from .layout import Layout, LayoutKey
from .notes import Notes
from .observer import Observer, Outcome
from .plan import Plan, plans_of_sequence

Forward = Callable[..., Any]
Override = tuple[nn.Module, Forward]
"""A module, and what it is to run instead of its ``forward``."""

SharedPlans = dict[tuple[str, LayoutKey], list[Plan | None]]
"""Plans that blocks share, by what they are for and the layout."""


@dataclass(frozen=True)
class Part:
    """A module of a block that may run on merged tokens.

    Attributes:
        module: called with the tokens of the block first.
        option: the option that has it merge.
        attends_to_itself: whether it is a self-attention, whose keys are the block's tokens too.
    """

    module: nn.Module
    option: str
    attends_to_itself: bool = False


@dataclass(frozen=True)
class Evaluation:
    """What the blocks need to know of the present evaluation.

    Attributes:
        engine: makes the plans.
        ratio: of the present step.
        latent: the grid of the latent, or of the part of it that is evaluated.
        plans: shared by the blocks, None where each makes its own.
    """

    engine: Engine
    ratio: float
    latent: Grid
    plans: SharedPlans | None


class BlockSite:
    """The overrides for one block; a subclass knows how the blocks of its family are called.

    Only attribute writes leave the overrides, so that torch.compile can trace them.

    Attributes:
        name: path of the block within the model.
        index: its place in the stack.
        module: the block.
        stack: where it stands.
        notes: what it did so far in the present evaluation.
    """

    tokens_changed: ClassVar[str]
    """The reason to tell where the tokens of a block are not those that its layout has."""

    attention_masked: ClassVar[str]
    """The reason to tell where the attention is masked, or called with other tokens."""

    attention_replaced: ClassVar[str]
    """The reason to tell where the modules of a block were not called."""

    merges_at_call: ClassVar[bool] = False
    """Whether keys and values alone merge where attention is called, after their projections."""

    def __init__(self, name: str, index: int, module: nn.Module, stack: "StackSite"):
        self.name = name
        self.index = index
        # The names of its modules are its family's business.
        self.module: Any = module
        self.stack = stack
        self.forget()

    def forget(self) -> None:
        """Let go of what was noted and planned in an evaluation."""
        self.notes = Notes()
        self._plan: Plan | None = None
        self._keys_plan: Plan | None = None
        self._outer_plan: Plan | None = None
        self._call_layout: LayoutKey | None = None

    def overrides(self) -> list[Override]:
        """The block and its modules, and what each of them is to run."""
        config = self.stack.sites.config
        run_block = self._run_block(self.module.forward)
        for observer in self.stack.sites.observers:
            run_block = observer.timed(self.name, run_block)
        overrides = [(self.module, run_block)]
        for part in self.parts():
            forward = part.module.forward
            if part.attends_to_itself:
                if config.merge_attn or config.scope != "module":
                    forward = self.self_attention(forward)
                    overrides.append((part.module, self._run_self_attention(forward)))
            elif getattr(config, part.option):
                overrides.append((part.module, self._run_module(forward)))
        return overrides

    def parts(self) -> Sequence[Part]:
        """The modules of the block that may merge each on its own."""
        raise NotImplementedError

    def self_attention(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The forward of a self-attention, to be called with ``x``, ``context`` and ``value``.

        A family whose attention has one source of keys and values takes the one for values.
        """
        return forward

    def layout(self, x: Tensor, *args: Any, **kwargs: Any) -> Layout | None:
        """The layout of the block's tokens, as the block was called.

        None where ``x``, ``[batch, tokens, channels]``, is not what the host says it is.
        """
        raise NotImplementedError

    def latent(self, *args: Any, **kwargs: Any) -> Grid:
        """The grid of the latent that the model works on, as the block was called."""
        return self.stack.sites.evaluation.latent

    def needs_all_tokens(self, *args: Any, **kwargs: Any) -> bool:
        """Whether something in the block, called with these arguments, expects all tokens."""
        raise NotImplementedError

    def is_masked(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether a module of the block is called with a mask over its tokens."""
        raise NotImplementedError

    def weigh_keys(self, kwargs: dict[str, Any], log_sizes: Tensor) -> dict[str, Any]:
        """The keyword arguments of a self-attention that add ``log_sizes`` to its logits.

        Where the host's attention cannot, they are those given, and :meth:`note_unweighted` is
        told why.

        Args:
            kwargs: the keyword arguments otherwise.
            log_sizes: ``[batch, keys]`` of the dtype of the tokens.
        """
        self.note_unweighted("this host has no way to weigh them")
        return kwargs

    def merge_at_call(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a self-attention that has its keys merged when it is called.

        Asked for where :attr:`merges_at_call`; what is called comes back to :meth:`merged_call`.
        """
        raise NotImplementedError

    def merged_call(
        self, k: Tensor, v: Tensor, heads: int
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """The keys and values with which attention is to be called, and their log sizes.

        Args:
            k: ``[batch, tokens, heads * channels]``.
            v: the same.
            heads: number of heads.

        Returns:
            Two ``[batch, slots, heads * channels]`` and ``[batch, slots]`` of their dtype, None in
            place of the last where keys weigh alike. None where all tokens stay as they are.
        """
        key, config = self._call_layout, self.stack.sites.config
        if key is None or k.ndim != 3 or not key[0] == k.shape[1] == v.shape[1]:
            self.note_masked()
            return None
        layout, ratio = Layout.of_key(key), self._ratios()[1]
        (plan,) = self._plans("keys", k, layout, [ratio])
        if plan is None:
            self.notes.reason = self._why_no_plan(layout, ratio)
            return None
        self.notes.ran(k.shape[1], plan)
        keys, values = plan.merge_keys_and_values(k, v, heads)
        if not config.proportional_attn or plan.is_even():
            return keys, values, None
        return keys, values, plan.log_sizes().to(k.dtype)

    @property
    def ops(self) -> Operations:
        """What merging runs on in the present evaluation."""
        return self.stack.sites.evaluation.engine.strategy.ops

    def note_unweighted(self, reason: str | None) -> None:
        """Note why merged keys weigh as one token each, None where they do not."""
        self.notes.unweighted = reason

    def note_masked(self) -> None:
        """Note that the attention is masked, or called with other tokens."""
        self.notes.reason = self.attention_masked

    def _weigh(self, plan: Plan, x: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs if plan.is_even() else self.weigh_keys(kwargs, plan.log_sizes().to(x.dtype))

    def _takes(self, plan: Plan, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether a module called with ``x`` can run under the plan; noted either way."""
        if self.is_masked(kwargs) or not plan.fits(x):
            self.note_masked()
            return False
        self.notes.ran(x.shape[1], plan)
        return True

    def _run_block(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        stack, config = self.stack, self.stack.sites.config

        def block_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self._plan = self._keys_plan = self._outer_plan = self._call_layout = None
            self.notes.tokens = x.shape[1]
            if stack.plan is not None:
                self.notes.plans_reused += 1
                return self._in_stack(forward, x, *args, **kwargs)
            layout = self._worthy_layout(x, *args, **kwargs)
            if layout is None:
                return forward(x, *args, **kwargs)
            fell_back = config.scope != "module" and self.needs_all_tokens(*args, **kwargs)
            self.notes.fell_back = fell_back
            if config.scope == "module" or fell_back:
                self._plan_for_modules(x, layout)
                return forward(x, *args, **kwargs)
            ratio = self.stack.sites.evaluation.ratio
            (plan,) = self._plans("tokens", x, layout, [ratio])
            if plan is None:
                self.notes.reason = self._why_no_plan(layout, ratio)
                return forward(x, *args, **kwargs)
            if config.scope == "stack" and stack.runs_as_one_from(self, *args, **kwargs):
                return self._in_stack(forward, stack.enter(plan, x), *args, **kwargs)
            self.notes.ran(x.shape[1], plan)
            self._outer_plan = plan
            return block_on_merged(forward, plan, x, *args, **kwargs)

        return block_forward

    def _in_stack(
        self, forward: Callable[..., Tensor], merged: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the block on the tokens that its stack has merged."""
        stack = self.stack
        assert stack.plan is not None and stack.tokens is not None
        self.notes.ran(stack.tokens.shape[1], stack.plan)
        self._outer_plan = stack.plan
        y = forward(merged, *args, **kwargs)
        return stack.leave(y) if self is stack.blocks[-1] else y

    def _run_module(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def module_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            plan = self._plan
            if plan is None or not self._takes(plan, x, kwargs):
                return forward(x, *args, **kwargs)
            return module_on_merged(forward, plan, x, *args, **kwargs)

        return module_forward

    def _run_self_attention(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        config = self.stack.sites.config
        weigh = self._weigh if config.proportional_attn else None

        def attention_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._outer_plan is not None:
                if weigh is not None:
                    kwargs = weigh(self._outer_plan, x, kwargs)
                return forward(x, *args, **kwargs)
            if self._call_layout is not None:
                if self.is_masked(kwargs):
                    self.note_masked()
                    return forward(x, *args, **kwargs)
                return forward(x, *args, **self.merge_at_call(kwargs))
            queries = self._plan if config.merge_attn and "q" in config.attn_tokens else None
            keys = self._keys_plan
            plan = keys if queries is None else queries
            if plan is None or not self._takes(plan, x, kwargs):
                return forward(x, *args, **kwargs)
            return attention_on_merged(forward, queries, keys, weigh, x, *args, **kwargs)

        return attention_forward

    def _worthy_layout(self, x: Tensor, *args: Any, **kwargs: Any) -> Layout | None:
        """The layout of the tokens with the pictures that are to merge, None where none is.

        The reason is noted, except for a block of another level: that is as the settings say.
        """
        sites = self.stack.sites
        layout, latent = self.layout(x, *args, **kwargs), self.latent(*args, **kwargs)
        if layout is None:
            self.notes.reason = self.tokens_changed
            return None
        spans = tuple(
            span for span in layout.spans if span.grid.is_within(latent, sites.max_downsample)
        )
        if not spans:
            return None
        least = sites.evaluation.engine.least_tokens
        worthy = tuple(span for span in spans if span.grid.tokens >= least)
        if not worthy:
            largest = max(span.grid.tokens for span in spans)
            automatic = (
                "" if sites.config.min_tokens else ", which is where it pays here (min_tokens=0)"
            )
            self.notes.reason = f"{largest} tokens are fewer than {least}{automatic}"
            return None
        return layout if worthy == layout.spans else Layout(layout.length, worthy)

    def _plan_for_modules(self, x: Tensor, layout: Layout) -> None:
        """Make the plans under which the modules of the block run, each on its own."""
        config = self.stack.sites.config
        if not (config.merge_attn or config.merge_crossattn or config.merge_mlp):
            self.notes.reason = "merge_attn, merge_crossattn and merge_mlp are all off"
            return
        self.notes.reason = self.attention_replaced
        attends_to_itself = any(part.attends_to_itself for part in self.parts())
        merges_keys = config.merge_attn and "k,v" in config.attn_tokens and attends_to_itself
        merges_tokens = (
            config.merge_crossattn
            or config.merge_mlp
            or (config.merge_attn and not (attends_to_itself and config.attn_tokens == "k,v"))
        )
        if merges_keys and self.merges_at_call and config.attn_tokens == "k,v":
            self._call_layout = layout.key
            merges_keys = False
        if not (merges_tokens or merges_keys):
            return
        ratio, keys_ratio = self._ratios()
        ratios = [ratio] if merges_tokens else []
        if merges_keys and keys_ratio not in ratios:
            ratios.append(keys_ratio)
        plans = self._plans("tokens" if ratios == [ratio] else "keys too", x, layout, ratios)
        if merges_tokens:
            self._plan = plans[0]
        if merges_keys:
            self._keys_plan = plans[-1]
        if self._plan is None and self._keys_plan is None and self._call_layout is None:
            self.notes.reason = self._why_no_plan(layout, ratios[0])

    def _ratios(self) -> tuple[float, float]:
        """The ratios of all tokens, and of the keys and values."""
        config, ratio = self.stack.sites.config, self.stack.sites.evaluation.ratio
        if config.kv_ratio < 0 or config.scope != "module":
            return ratio, ratio
        return ratio, config.kv_ratio

    def _plans(
        self, kind: str, features: Tensor, layout: Layout, ratios: Sequence[float]
    ) -> list[Plan | None]:
        """Plans at some ratios: those that blocks share, where they do, or new ones."""
        evaluation = self.stack.sites.evaluation
        self.notes.layout = layout.key
        place = kind, self.notes.layout
        shared = evaluation.plans
        if shared is not None and place in shared:
            kept = shared[place]
            if all(plan is None or plan.fits(features) for plan in kept):
                self.notes.plans_reused += any(plan is not None for plan in kept)
                return kept
        plans_of = evaluation.engine.plans_of
        plans = plans_of_sequence(layout, features, lambda own, grid: plans_of(own, grid, ratios))
        self.notes.plans_made += any(plan is not None for plan in plans)
        if shared is not None:
            shared[place] = plans
        return plans

    def _why_no_plan(self, layout: Layout, ratio: float) -> str:
        """What to tell where a strategy has made no plan."""
        sites = self.stack.sites
        config = sites.config
        if ratio == 0:
            return "the ratio is 0 at every step that could merge"
        grid = max((span.grid for span in layout.spans), key=lambda grid: grid.tokens)
        uses_cells = sites.evaluation.engine.strategy.uses_cells
        if uses_cells and grid.cells(config.sy, config.sx).tokens == 0:
            return (
                f"a feature map of {grid.height}x{grid.width} tokens holds no cell of "
                f"sy={config.sy} by sx={config.sx}"
            )
        return f"{grid.tokens} tokens are too few for ratio={ratio:g}"


class StackSite:
    """Blocks that follow each other, which may run as one on merged tokens.

    Attributes:
        module: that holds them.
        blocks: in the order in which they run.
        plan: the plan under which the stack runs, from its first block to its last.
        tokens: ``[batch, tokens, channels]`` that entered its first block.
    """

    block_class: ClassVar[type[BlockSite]]
    """What the family knows of its blocks."""

    def __init__(
        self, name: str, module: nn.Module, blocks: Iterable[nn.Module], sites: "ModelSites"
    ):
        self.module = module
        self.sites = sites
        self.plan: Plan | None = None
        self.tokens: Tensor | None = None
        self._merged: Tensor | None = None
        self.blocks = [
            self.block_class(f"{name}.{index}", index, block, self)
            for index, block in enumerate(blocks)
        ]

    @property
    def runs_as_one(self) -> bool:
        """Whether nothing else runs between the blocks."""
        return True

    def runs_as_one_from(self, block: BlockSite, *args: Any, **kwargs: Any) -> bool:
        """Whether all blocks, from this one on, run on merged tokens when called so."""
        return (
            block.index == 0
            and self.runs_as_one
            and not any(each.needs_all_tokens(*args, **kwargs) for each in self.blocks)
        )

    def overrides(self) -> list[Override]:
        """Modules, and what each of them is to run."""
        return [override for block in self.blocks for override in block.overrides()]

    def enter(self, plan: Plan, x: Tensor) -> Tensor:
        """Merge what enters the first block."""
        merged = plan.merge(x)
        self.plan, self.tokens, self._merged = plan, x, merged
        return merged

    def leave(self, y: Tensor) -> Tensor:
        """Add the change that all blocks made together to all tokens."""
        assert self.plan is not None and self.tokens is not None and self._merged is not None
        result = self.plan.add_change(self.tokens, self._merged, y)
        self.plan = self.tokens = self._merged = None
        return result

    def end(self) -> None:
        """Let go of the tensors of an evaluation."""
        self.plan = self.tokens = self._merged = None
        for block in self.blocks:
            block.forget()


class Family:
    """What is a family of models' own; one record of each."""

    stack_class: ClassVar[type[StackSite]]
    """What it knows of its stacks."""

    def stacks(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, Iterable[nn.Module]]]:
        """The stacks of a model: the name of each, what holds its blocks, and the blocks."""
        raise NotImplementedError

    def blocks_by_level(self, model: nn.Module) -> Mapping[int, int]:
        """Blocks of a model by how many times smaller than the latent they work."""
        raise NotImplementedError


def deepest_level(config: ToMeConfig, blocks_by_level: Mapping[int, int]) -> int:
    """How many times smaller than the latent a grid may be to be merged.

    Args:
        config: the settings.
        blocks_by_level: blocks of a model by how many times smaller they work, at least one.
    """
    if config.max_downsample != "auto":
        return config.max_downsample
    if config.scope == "module":
        return min(blocks_by_level)
    # Whole blocks are worth merging where most of them are: in SDXL, one level deeper.
    return min(blocks_by_level, key=lambda level: (-blocks_by_level[level], level))


class ModelSites:
    """All stacks of one model, and the evaluation that they are at.

    Attributes:
        config: the settings.
        model: the model itself.
        shallowest: how many times smaller than the latent the largest grid with blocks is.
        max_downsample: the same of the smallest grid that merges, ``auto`` resolved.
        stacks: those of the model.
        observers: may time the blocks.
        evaluation: the present one.
    """

    evaluation: Evaluation

    def __init__(
        self,
        config: ToMeConfig,
        family: Family,
        model: nn.Module,
        observers: Sequence[Observer] = (),
    ):
        levels = family.blocks_by_level(model)
        self.config = config
        self.model: Any = model
        self.shallowest = min(levels)
        self.max_downsample = deepest_level(config, levels)
        self.observers = observers
        self.stacks = [family.stack_class(*each, self) for each in family.stacks(model)]
        self.blocks = [block for stack in self.stacks for block in stack.blocks]

    @contextmanager
    def installed(self, evaluation: Evaluation) -> Iterator[None]:
        """Put the overrides on for one evaluation."""
        with ExitStack() as exits:
            # One evaluation may run within another.
            exits.callback(vars(self).update, evaluation=vars(self).get("evaluation"))
            self.evaluation = evaluation
            for stack in self.stacks:
                exits.callback(stack.end)
                for module, forward in stack.overrides():
                    # The setter of modules takes its time, and SDXL has hundreds of these.
                    attributes = vars(module)
                    exits.callback(_restore_forward, attributes, attributes.get("forward"))
                    attributes["forward"] = forward
            yield

    def outcomes(self) -> list[Outcome]:
        """What the blocks did, asked for while the overrides are on."""
        outcomes = [block.notes.outcome(block.name) for block in self.blocks]
        return [outcome for outcome in outcomes if outcome is not None]


def _restore_forward(attributes: dict[str, Any], before: Forward | None) -> None:
    """Take an override off a module; one that other code put there before comes back."""
    if before is None:
        del attributes["forward"]
    else:
        attributes["forward"] = before
