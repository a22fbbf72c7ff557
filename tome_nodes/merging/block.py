"""What all kinds of blocks share."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..settings.policy import EVEN, Growth
from ..strategies.plan import Grid, Plan
from .attention_trial import Attention
from .compiling import is_left_uncompiled
from .evaluation import Evaluation, ModelState, Outcome
from .key_weights import KeyWeights
from .overrides import Forward, Override
from .stack import Stack


class Block:
    """A block of a patched model.

    The only side effects of overrides are attribute writes, so that torch.compile can trace them.

    Attributes:
        model: the state of its model.
        stack: the stack that holds it.
        index: its index in the stack.
        module: the module of the block.
        name: its path within the model.
        outcome: what it has done so far in the current evaluation.
        merges_only_keys: whether a preset merges only its keys and values.
    """

    merges_only_keys = False

    def __init__(self, model: ModelState, stack: Stack, index: int):
        self.model = model
        self.stack = stack
        self.index = index
        # Any, since only its family knows the names of its modules.
        self.module: Any = stack.blocks[index]
        self.name = stack.path(index)
        self.forget()

    def forget(self) -> None:
        """Drop the outcome and the plans of an evaluation."""
        self.outcome = Outcome((self.name,))

    def overrides(self, by_stack: bool) -> list[Override]:
        """What the block and its modules run instead of their own methods.

        Overrides are made once for many evaluations. They look up the current one when they run.
        ``by_stack`` is as in :class:`tome_nodes.merging.evaluation.Evaluation`.
        """
        raise NotImplementedError

    @cached_property
    def names_in_stack(self) -> tuple[str, ...]:
        """The paths of the blocks that its outcome describes if stacks are overridden as one."""
        return (self.name,)

    @property
    def evaluation(self) -> Evaluation:
        """The current evaluation; overrides run only during one."""
        evaluation = self.model.evaluation
        assert evaluation is not None
        return evaluation

    @cached_property
    def stored(self) -> Attention | None:
        """The attention function that is stored with its self-attention; None if none is.

        The host calls this function unless something replaces it.
        """
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
        engine, sizes = self.evaluation.engine, log_sizes.to(like.dtype)
        return KeyWeights(sizes, engine.strategy.ops, engine.ways, self.note_unweighted)

    def is_large_enough(self, grid: Grid) -> bool:
        """Whether a grid has enough tokens to merge; if not, this is noted."""
        if grid.tokens >= self.model.least_tokens:
            return True
        self.outcome.grid, self.outcome.reason = grid, None
        return False

    def plan_of(self, features: Tensor, grid: Grid, growth: Growth = EVEN) -> Plan | None:
        """A plan at the ratio of the current step; ``growth`` adapts it to the size of the grid.

        None if nothing is to merge; :meth:`ModelState.why_no_plan` says why.
        """
        evaluation, outcome = self.evaluation, self.outcome
        outcome.grid = grid
        if not torch.compiler.is_compiling() and is_left_uncompiled():
            evaluation.is_uncompiled = True
        share = growth.share(evaluation.ratio, grid.tokens)
        plan = evaluation.engine.strategy.plan(features, grid, share)
        if plan is None:
            outcome.reason = None
        return plan
