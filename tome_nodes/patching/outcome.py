"""What the blocks of a model did in one evaluation, and who follows it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..merging.layout import Grid
from ..merging.plan import Plan
from ..strategies.strategy import PlanOf
from .overrides import Forward


@dataclass(eq=False)
class Outcome:
    """What one block did in one model evaluation.

    The block writes it while it runs, one attribute at a time, which torch.compile can trace. The
    observer gets it once the evaluation is over.

    Attributes:
        block: the path of the block within the model.
        before: number of tokens that entered the block, or its stack if that ran as one; 0 if none
            of its attentions was reached.
        plan: the plan of what merged last; None if nothing merged.
        grid: the grid for which plans were made; None if it did not come to that.
        reason: why it ran on all tokens; None if it merged or the settings leave it out.
        unweighted: why a merged key weighed only as much as one token; None if it weighed more.
        fell_back: why only its modules merged although the scope is wider; None if the scope was
            followed.
        has_run: whether the model called it.
    """

    block: str
    before: int = 0
    plan: Plan | None = None
    grid: Grid | None = None
    reason: str | None = None
    unweighted: str | None = None
    fell_back: str | None = None
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
        """Drop the notes that do not apply, now that the block has run."""
        if self.plan is None:
            self.unweighted = self.fell_back = None
        else:
            self.reason = None

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
        is_active: whether it was to merge: between ``start_percent`` and ``end_percent``, and not
            on all tokens as ``refresh_steps`` says.
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

    def watched(self, plan_of: PlanOf) -> PlanOf:
        """A function that makes the same plans as ``plan_of``, perhaps watched by the observer."""
        return plan_of

    def timed(self, block: str, forward: Forward) -> Forward:
        """The forward of a block, perhaps wrapped to time it."""
        return forward

    def evaluated(self, result: Evaluated) -> None:
        """An evaluation is over; one that raised is not reported."""
