"""One evaluation of a model: its state while it goes on, and what it did."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import reasons
from ..settings.config import ToMeConfig
from ..strategies.plan import Grid, Plan
from .engine import Engine
from .overrides import Forward


@dataclass(eq=False)
class Evaluation:
    """One evaluation of a model: what the host knows of it, its state, and what it did.

    Attributes:
        step: the number of its step in the run, from 0.
        progress: how far the ratio is on its way from ``ratio`` to ``ratio_end``, from 0 to 1.
        picks: decides the random picks, together with the seed; not negative.
        latent: the grid at level 1, which is that of the latent or of its evaluated part.
        device: the device on which the blocks will run.
        dtype: the dtype of their tokens.
        off: why nothing is to merge in it, as it is not between ``start_percent`` and
            ``end_percent``; else None.
        obstacle: why nothing can merge in it, according to the host; else None.
        may_be_patched: whether other code may patch the inside of blocks; False if the host knows
            that none does.
        left_out: the modules of a UNet that do not run in it, as it is shallow.
        merges: whether something may merge in it; False before it has begun.
        reason: why nothing merges in it; None if something may, or if it has not begun.
        engine: makes the plans.
        ratio: the ratio of its step.
        deepest: how many times smaller than the latent the smallest grid that merges is.
        by_stack: whether a stack whose blocks share a plan is overridden as one: only its first
            block, its last block, and the attentions whose keys merge get overrides.
        is_uncompiled: whether the compiler of the model had no graph for it, and made none.
        outer: the evaluation of the same model that this one runs within; else None.
        blocks: number of blocks of the model, whether they ran or not.
        outcomes: the outcomes of the blocks that ran, in the order of the model.
    """

    step: int
    progress: float
    picks: int
    latent: Grid
    device: torch.device
    dtype: torch.dtype
    off: reasons.Reason | None = None
    obstacle: reasons.Reason | None = None
    may_be_patched: bool = True
    left_out: Set[nn.Module] = frozenset()
    merges: bool = field(init=False, default=False)
    reason: reasons.Reason | None = field(init=False, default=None)
    engine: Engine = field(init=False)
    ratio: float = field(init=False, default=0.0)
    deepest: int = field(init=False, default=0)
    by_stack: bool = field(init=False, default=False)
    is_uncompiled: bool = field(init=False, default=False)
    outer: "Evaluation | None" = field(init=False, default=None)
    blocks: int = field(init=False, default=0)
    outcomes: Sequence["Outcome"] = field(init=False, default=())

    @property
    def is_active(self) -> bool:
        """Whether something is to merge in it, as far as the settings say."""
        return self.off is None

    @property
    def is_shallow(self) -> bool:
        """Whether only the outermost blocks of a UNet run."""
        return bool(self.left_out)

    @property
    def merged(self) -> list["Outcome"]:
        """The outcomes of the blocks that merged."""
        return [outcome for outcome in self.outcomes if outcome.plan is not None]


@dataclass(eq=False)
class Outcome:
    """What one block, or all blocks of a stack that ran as one, did in one model evaluation.

    The block writes it while it runs, one attribute at a time, which torch.compile can trace. The
    observer gets it once the evaluation is over.

    Attributes:
        blocks: the paths of the blocks within the model.
        before: number of tokens that entered the block, or its stack if the stack ran as one; 0
            if none of its attentions was reached.
        plan: the plan of what merged last; None if nothing merged.
        grid: the grid for which a plan was to be made; None if none was.
        reason: why the block ran on all tokens. None if it merged, or if the settings leave it out;
            until the evaluation is over, also if there is no plan of its grid.
        only_keys: whether only keys and values merged, as presets decide for the levels with most
            tokens.
        left_out: which other code made an attention run on all tokens that was to merge; None if
            none did.
        unweighted_reason: why a merged key weighed only as much as one token; None if it weighed
            more.
        is_patched: whether only its modules merged, although the scope is stacks, because other
            code patches the block.
        has_run: whether the model called it.
    """

    blocks: tuple[str, ...]
    before: int = 0
    plan: Plan | None = None
    grid: Grid | None = None
    reason: reasons.Reason | None = None
    only_keys: bool = False
    left_out: reasons.Reason | None = None
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

    def complete(self) -> None:
        """Drop what does not count once the evaluation is over."""
        if self.plan is None:
            self.unweighted_reason, self.is_patched = None, False
        else:
            self.reason = None

    @property
    def after(self) -> int:
        """The number of tokens on which the block, or the last of its merging modules, ran."""
        return self.before if self.plan is None else self.plan.slot_count


class Observer:
    """Follows a run; by default, its methods do nothing.

    Attributes:
        follows_blocks: whether it also follows blocks that cannot merge.
    """

    follows_blocks = False

    def timed(self, block: str, forward: Forward) -> Forward:
        """The forward of a block, perhaps wrapped to time it."""
        return forward

    def note(self, evaluation: Evaluation) -> None:
        """An evaluation is over; one that raised is not noted."""


class ModelState:
    """What the blocks of a model share: the settings, and the current evaluation.

    Attributes:
        model: the model itself.
        config: the settings.
        observer: follows the evaluations.
        shallowest: the level of the largest grid with blocks.
        least_tokens: the smallest grid that merges, in tokens.
        evaluation: the current evaluation; None between evaluations.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ToMeConfig,
        observer: Observer,
        shallowest: int,
        least_tokens: int,
    ):
        self.model: Any = model
        self.config = config
        self.observer = observer
        self.shallowest = shallowest
        self.least_tokens = least_tokens
        self.evaluation: Evaluation | None = None

    def too_few(self, tokens: int) -> reasons.Reason:
        """The reason to report if a feature map has too few tokens."""
        return reasons.too_few(tokens, self.least_tokens, self.config.min_tokens)

    def why_no_plan(self, grid: Grid, ratio: float) -> reasons.Reason:
        """The reason to report if there is no plan of a grid.

        Not to be called within a compiled model, where numbers cannot be put into words.
        """
        config = self.config
        if grid.tokens < self.least_tokens:
            return self.too_few(grid.tokens)
        if ratio == 0:
            return reasons.NO_RATIO
        if grid.frames == 1 and grid.cells(config.sy, config.sx).tokens == 0:
            return reasons.no_cell(grid.height, grid.width, config.sy, config.sx)
        return reasons.low_ratio(grid.tokens, ratio)
