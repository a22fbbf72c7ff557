"""What the blocks of a model did in one evaluation, and who is told of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .layout import Layout
from .plan import Plan
from .strategy import PlansOf

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one block did in one model evaluation.

    Attributes:
        block: its path within the model.
        before: tokens that entered it, or its stack where that ran as one.
        after: tokens that it, or the last of its modules that merged, ran on.
        plan: the plan of those, None where all of the block ran on all its tokens.
        layout: the pictures that the plan was made for, None where it did not come to that.
        plans_made: how many plans it made; those of two ratios from one matching count once.
        plans_reused: how many it had of another block or step.
        reason: why it ran on all its tokens, None where it merged or the settings leave it out.
        unweighted: why merged keys weighed as one token each, None where they did not.
        fell_back: why only its modules merged though a wider scope was asked for, None where they
            did as asked.
    """

    block: str
    before: int
    after: int
    plan: Plan | None = None
    layout: Layout | None = None
    plans_made: int = 0
    plans_reused: int = 0
    reason: str | None = None
    unweighted: str | None = None
    fell_back: str | None = None


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What one model evaluation did.

    Attributes:
        step: the step of the run that it belongs to.
        blocks: of the model, whether they ran or not.
        outcomes: of the blocks that ran, in order.
        reason: why the evaluation as a whole was left alone, None if it was not.
        is_active: whether it was between ``start_percent`` and ``end_percent``.
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
    """Follows a run. Whatever an observer does not care for, it inherits from here."""

    def watched(self, plans_of: PlansOf) -> PlansOf:
        """What makes the same plans under the observer's eyes."""
        return plans_of

    def timed(self, block: str, forward: Function) -> Function:
        """The forward of a block, which may be watched at it too."""
        return forward

    def begins(self, step: int) -> None:
        """An evaluation of this step begins to merge."""

    def evaluated(self, result: Evaluated) -> None:
        """An evaluation is over."""
