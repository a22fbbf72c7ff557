"""A patched model, its blocks, and what these share in one evaluation.

A block of a UNet is a :class:`tome_nodes.patching.merge_modules.ModuleBlock`, which merges what
enters the block or its modules.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import reasons
from ..merging.plan import Grid, Plan
from ..settings.config import ToMeConfig
from ..strategies.cells import LARGE, LEAST, share_of
from .attention_trial import Attention
from .compiling import is_left_uncompiled
from .engine import Engine
from .key_weights import KeyWeights
from .overrides import Forward, Override, Overrides
from .work import Work


@dataclass(eq=False)
class Outcome:
    """What one block did in one model evaluation.

    The block writes it while it runs, one attribute at a time, which torch.compile can trace. The
    observer gets it once the evaluation is over.

    Attributes:
        block: the path of the block within the model.
        before: number of tokens that entered the block, or its stack if the stack ran as one; 0
            if none of its attentions was reached.
        plan: the plan of what merged last; None if nothing merged.
        grid: the grid for which a plan was to be made; None if none was.
        reason: why it ran on all tokens; None if it merged or the settings leave it out.
        left_out: why an attention ran on all tokens although it was to merge, as other code is in
            the way; None if none did.
        unweighted_reason: why a merged key weighed only as much as one token; None if it weighed
            more.
        is_patched: whether only its modules merged although the scope is stacks, as other code
            patches the block.
        has_run: whether the model called it.
    """

    block: str
    before: int = 0
    plan: Plan | None = None
    grid: Grid | None = None
    reason: str | None = None
    left_out: str | None = None
    unweighted_reason: str | None = None
    is_patched: bool = False
    has_run: bool = False

    def entered(self, tokens: int) -> None:
        """Note that the block runs, and how many tokens entered it unless something has merged."""
        self.has_run = True
        if self.plan is None:
            self.before = tokens

    def merged(self, tokens: int, plan: Plan) -> None:
        """Note that something ran on the slots of ``plan`` instead of on ``tokens`` tokens."""
        self.before, self.plan = tokens, plan

    def copied_to(self, block: str) -> "Outcome":
        """The same outcome of another block."""
        # Not dataclasses.replace, which is slow, and SDXL has dozens of blocks.
        return Outcome(
            block=block,
            before=self.before,
            plan=self.plan,
            grid=self.grid,
            reason=self.reason,
            left_out=self.left_out,
            unweighted_reason=self.unweighted_reason,
            is_patched=self.is_patched,
            has_run=self.has_run,
        )

    @property
    def after(self) -> int:
        """The number of tokens on which the block, or the last of its merging modules, ran."""
        return self.before if self.plan is None else self.plan.slot_count


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What one model evaluation did.

    Attributes:
        step: the step of the run that it belongs to.
        blocks: number of blocks of the model, whether they ran or not.
        outcomes: the outcomes of the blocks that ran, in the order of the model.
        reason: why nothing was to merge in the whole evaluation; None if something was.
        is_active: whether it was to merge: between ``start_percent`` and ``end_percent``.
    """

    step: int
    blocks: int
    outcomes: Sequence[Outcome] = ()
    reason: str | None = None
    is_active: bool = True

    @property
    def merged(self) -> list[Outcome]:
        """The outcomes of the blocks that merged."""
        return [outcome for outcome in self.outcomes if outcome.plan is not None]


class Observer:
    """Follows a run; by default, its methods do nothing.

    Attributes:
        follows_blocks: whether it also follows blocks that cannot merge.
    """

    follows_blocks = False

    def timed(self, block: str, forward: Forward) -> Forward:
        """The forward of a block, perhaps wrapped to time it."""
        return forward

    def evaluated(self, result: Evaluated) -> None:
        """An evaluation is over; one that raised is not reported."""


class StackWeights(Protocol):
    """Weighs the keys of all self-attentions of a stack."""

    def put_on(self, called: dict[str, Any], weights: KeyWeights) -> None:
        """Weigh keys from now on; ``called`` are the keyword arguments of the first block."""

    def take_off(self, called: dict[str, Any]) -> None:
        """Weigh no keys any more; ``called`` are the keyword arguments of the last block."""


@dataclass(eq=False)
class Evaluation:
    """The state of one model evaluation.

    Attributes:
        engine: makes the plans.
        ratio: the ratio of the current step.
        latent: the grid at level 1, of the latent or of the part of it that is evaluated.
        deepest: how many times smaller than the latent the smallest grid that merges is.
        is_unpatched: whether no other code patches the inside of blocks, as the host knows before.
        weighs_stacks: whether the keys of a stack with one plan are weighed once for all blocks. Of
            a whole stack that merges, only the first block and the last are then overridden.
        feature_map: the shape ``[batch, channels, height, width]`` of the feature map of the
            running stack, where the host does not pass it on to blocks.
        stack_plan: the plan of the running stack if it has one for all blocks; else None.
        stack_tokens: the tokens that entered the running stack, ``[batch, tokens, channels]``, if
            it runs as one; else None.
        stack_merged: ``stack_tokens`` merged, if the stack runs as one; else None.
        stack_keys: what the merged keys of the running stack weigh, once that was needed.
        stack_weights: what weighs the keys of the running stack at once; None if each block does.
        is_uncompiled: whether the compiler of the model had no graph for it, and made none.
    """

    engine: Engine
    ratio: float
    latent: Grid
    deepest: int
    is_unpatched: bool = False
    weighs_stacks: bool = False
    feature_map: Sequence[int] | None = None
    stack_plan: Plan | None = None
    stack_tokens: Tensor | None = None
    stack_merged: Tensor | None = None
    stack_keys: KeyWeights | None = None
    stack_weights: StackWeights | None = None
    is_uncompiled: bool = False


@dataclass(frozen=True, eq=False)
class Stack:
    """Consecutive blocks.

    Attributes:
        name: its path within the model.
        module: the module that holds the blocks.
        blocks: the blocks, in the order in which they run.
        level: how many times smaller than the latent its feature map is; 1 in a transformer.
    """

    name: str
    module: nn.Module
    blocks: Sequence[nn.Module]
    level: int = 1

    @property
    def is_of_video(self) -> bool:
        """Whether a temporal block, which needs all tokens, runs after every block of it."""
        return hasattr(self.module, "time_stack")


class ModelRecord(Protocol):
    """What is known about the models of one kind."""

    def stacks(self, model: Any) -> Iterable[Stack]:
        """The stacks of a model, in the order in which they run."""

    def block(self, model: "PatchedModel", stack: Stack, index: int) -> "Block":
        """The block at an index of a stack."""

    def work(self, model: "PatchedModel") -> Work | None:
        """What an evaluation of a model costs; None if that is not known."""

    def attentions(self) -> Iterable[Attention]:
        """The attention functions that the host now calls for models; empty if it has its own way
        to weigh keys."""


class PatchedModel:
    """The blocks of one model, and its current evaluation.

    Attributes:
        config: the settings.
        record: what is known about models of its kind.
        model: the model itself.
        observer: follows its evaluations.
        blocks: all its blocks.
        shallowest: how many times smaller than the latent the largest grid with blocks is.
        max_downsample: how many times smaller than the latent the smallest grid that merges is;
            ``auto`` is resolved. Where the share grows with the map, see :meth:`deepest`.
        least_tokens: the smallest grid that merges, in tokens.
        evaluation: the current evaluation; None between evaluations.
    """

    def __init__(
        self,
        config: ToMeConfig,
        record: ModelRecord,
        model: nn.Module,
        observer: Observer,
    ):
        self.config = config
        self.record = record
        self.model: Any = model
        self.observer = observer
        stacks = [*record.stacks(model)]
        levels = Counter(stack.level for stack in stacks for _ in stack.blocks)
        self.shallowest = min(levels)
        self.max_downsample = deepest_level(config, levels)
        self.least_tokens = config.min_tokens or LEAST
        self._levels = sorted(levels)
        self._overrides: dict[tuple[int, bool], Overrides] = {}
        self._deepest: dict[Grid, int] = {}
        self._saved_by_preset: dict[Grid, float | None] = {}
        self._overridden: dict[int, list[Block]] = {}
        self.blocks = [
            record.block(self, stack, index)
            for stack in stacks
            for index in range(len(stack.blocks))
        ]
        self.evaluation: Evaluation | None = None

    def deepest(self, latent: Grid) -> int:
        """How many times smaller than a latent the smallest grid that merges is."""
        if not self.config.grows:
            return self.max_downsample
        if latent not in self._deepest:
            least = LARGE if self.config.scope == "module" else self.least_tokens
            large = [level for level in self._levels if latent.downsampled(level).tokens >= least]
            self._deepest[latent] = max([self.max_downsample, *large])
        return self._deepest[latent]

    def saved(self, latent: Grid) -> float | None:
        """The share of an evaluation's work that merging saves; None if that is not known."""
        if self._work is None:
            return None
        return self._work.saved(self.config, latent, self.least_tokens, self.deepest(latent))

    def saved_by_preset(self, latent: Grid) -> float | None:
        """The same under presets that merge the more, the larger a map is; None under other
        settings, which merge however little they save."""
        if latent not in self._saved_by_preset:
            self._saved_by_preset[latent] = self.saved(latent) if self.config.grows else None
        return self._saved_by_preset[latent]

    def attentions(self) -> set[Attention]:
        """The attention functions that its blocks will call, as far as the host tells."""
        stored = (block.stored for block in self.blocks)
        return {*self.record.attentions(), *(each for each in stored if each is not None)}

    @cached_property
    def _work(self) -> Work | None:
        return self.record.work(self)

    def overrides(self, evaluation: Evaluation) -> Overrides:
        """What modules run instead of their own methods in an evaluation."""
        kind = evaluation.deepest, evaluation.weighs_stacks
        if kind not in self._overrides:
            self._overrides[kind] = Overrides(partial(self._make_overrides, *kind))
        return self._overrides[kind]

    def _make_overrides(self, deepest: int, weighs_stacks: bool) -> Iterator[Override]:
        for block in self._overridden_blocks(deepest):
            yield from block.overrides_of_stack() if weighs_stacks else block.overrides()

    def _overridden_blocks(self, deepest: int) -> list["Block"]:
        """The blocks that are overridden if grids may be ``deepest`` times smaller to be merged."""
        if self.observer.follows_blocks:
            return self.blocks
        if deepest not in self._overridden:
            blocks = [block for block in self.blocks if block.stack.level <= deepest]
            self._overridden[deepest] = blocks
        return self._overridden[deepest]

    def too_few(self, tokens: int) -> str:
        """The reason to report if a feature map has too few tokens."""
        return reasons.too_few(tokens, self.least_tokens, self.config.min_tokens)

    def outcomes(self, evaluation: Evaluation) -> list[Outcome]:
        """The outcomes of the blocks that ran, completed."""
        outcomes: list[Outcome] = []
        of_first = Outcome("")
        for block in self._overridden_blocks(evaluation.deepest):
            outcome = block.outcome
            if block.index == 0:
                of_first = outcome
            elif evaluation.weighs_stacks and block.has_plan_of_stack and of_first.has_run:
                if not outcome.has_run:
                    # It is not overridden, or its attention, which is, was not called.
                    outcome = of_first.copied_to(block.name)
                    if block.merges_only_keys and outcome.plan is not None:
                        outcome.plan, outcome.reason = None, reasons.ATTENTION_REPLACED
                outcome.unweighted_reason = outcome.unweighted_reason or of_first.unweighted_reason
            if outcome.has_run:
                outcomes.append(outcome)
        for outcome in outcomes:
            if outcome.plan is None:
                outcome.unweighted_reason, outcome.is_patched = None, False
            else:
                outcome.reason = None
        return outcomes

    def forget(self, evaluation: Evaluation) -> None:
        """Drop what an evaluation has left in blocks."""
        for block in self._overridden_blocks(evaluation.deepest):
            if block.outcome.has_run:
                block.forget()


def deepest_level(config: ToMeConfig, blocks_by_level: Mapping[int, int]) -> int:
    """How many times smaller than the latent a grid may be to be merged.

    Args:
        config: the settings.
        blocks_by_level: by :attr:`Stack.level`, the number of blocks; not empty.
    """
    if config.max_downsample != "auto":
        return config.max_downsample
    if config.scope == "module":
        return min(blocks_by_level)
    # Merging whole blocks pays off at the level with most blocks: in SDXL, one level deeper.
    return min(blocks_by_level, key=lambda level: (-blocks_by_level[level], level))


class Block:
    """What all kinds of blocks share.

    The only side effects of overrides are attribute writes, so that torch.compile can trace them.

    Attributes:
        model: the model of the block.
        stack: the stack that holds it.
        index: its index in the stack.
        module: the module of the block.
        name: its path within the model.
        outcome: what it has done so far in the current evaluation.
        merges_only_keys: whether a preset merges only its keys and values.
        has_plan_of_stack: whether one plan may serve all blocks of its stack.
    """

    merges_only_keys = has_plan_of_stack = False

    def __init__(self, model: PatchedModel, stack: Stack, index: int):
        self.model = model
        self.stack = stack
        self.index = index
        # Any, since only its record knows the names of its modules.
        self.module: Any = stack.blocks[index]
        self.name = f"{stack.name}.{index}"
        self.forget()

    def forget(self) -> None:
        """Drop the outcome and the plans of an evaluation."""
        self.outcome = Outcome(self.name)

    def overrides(self) -> list[Override]:
        """What the block and its modules run instead of their own methods.

        Overrides are made once for many evaluations. They look up the current one when they run.
        """
        raise NotImplementedError

    def overrides_of_stack(self) -> list[Override]:
        """The same while keys are weighed for whole stacks."""
        return self.overrides()

    @property
    def evaluation(self) -> Evaluation:
        """The current evaluation; overrides run only during one."""
        evaluation = self.model.evaluation
        assert evaluation is not None
        return evaluation

    @cached_property
    def stored(self) -> Attention | None:
        """The attention function that is stored with its self-attention, which the host calls
        unless something replaces it; None if none is."""
        return None

    def note_unweighted(self, reason: str | None) -> None:
        """Note why a merged key weighs only as much as one token; None if it weighs more."""
        self.outcome.unweighted_reason = reason

    def timed(self, forward: Forward) -> Forward:
        """The forward of the block, timed if the observer wants it."""
        return self.model.observer.timed(self.name, forward)

    def weights(self, log_sizes: Tensor, like: Tensor) -> KeyWeights | None:
        """What merged keys weigh, in the dtype of ``like``; None if they weigh as one token each.

        ``log_sizes`` is the logarithm of how many tokens a key stands for, ``[batch, keys]``.
        """
        if not self.model.config.proportional_attn:
            return None
        evaluation = self.model.evaluation
        assert evaluation is not None
        engine, sizes = evaluation.engine, log_sizes.to(like.dtype)
        return KeyWeights(sizes, engine.strategy.ops, engine.ways, self.note_unweighted)

    def is_large_enough(self, grid: Grid) -> bool:
        """Whether a grid has enough tokens to merge; if not, the reason is noted."""
        if grid.tokens >= self.model.least_tokens:
            return True
        self.outcome.reason = self.model.too_few(grid.tokens)
        return False

    def plan_of(self, features: Tensor, grid: Grid, growth: float = 0.0) -> Plan | None:
        """A plan at the ratio of the current step. If it is None, the reason is noted.

        For ``growth``, see :func:`tome_nodes.strategies.cells.share_of`.
        """
        evaluation = self.model.evaluation
        assert evaluation is not None
        self.outcome.grid = grid
        if not torch.compiler.is_compiling() and is_left_uncompiled():
            evaluation.is_uncompiled = True
        share = share_of(evaluation.ratio, grid.tokens, growth)
        plan = evaluation.engine.strategy.plan(features, grid, share)
        if plan is None:
            self.outcome.reason = self._why_no_plan(grid, evaluation.ratio)
        return plan

    def _why_no_plan(self, grid: Grid, ratio: float) -> str:
        """The reason to report if the strategy made no plan."""
        config = self.model.config
        if ratio == 0:
            return reasons.NO_RATIO
        if grid.frames == 1 and grid.cells(config.sy, config.sx).tokens == 0:
            return reasons.no_cell(grid.height, grid.width, config.sy, config.sx)
        return reasons.low_ratio(grid.tokens, ratio)


def uncompiled(module: Any) -> Any:
    """The module that a compiled module runs, or the module itself if it is not compiled."""
    return getattr(module, "_orig_mod", module)
