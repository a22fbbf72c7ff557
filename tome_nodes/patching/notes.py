"""What a block notes about itself while it runs."""

from ..merging.layout import Layout, LayoutKey
from ..merging.plan import Plan
from .outcome import Outcome


class Notes:
    """What one block has done so far in one evaluation.

    Attributes are set one by one, which torch.compile can trace. When the evaluation is over, they
    become a frozen :class:`tome_nodes.patching.outcome.Outcome`.

    Attributes:
        tokens: how many entered the block, None before it ran.
        before: how many tokens were merged: those of the block, or of its stack.
        plan: the plan of what merged last, None before anything did.
        layout: the key of the layout that plans were made for, None before.
        plans_made: see :class:`tome_nodes.patching.outcome.Outcome`.
        plans_reused: see :class:`tome_nodes.patching.outcome.Outcome`.
        reason: why it runs on all its tokens; does not count once something has merged.
        unweighted: see :class:`tome_nodes.patching.outcome.Outcome`.
        fell_back: see :class:`tome_nodes.patching.outcome.Outcome`.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None
        self.before = 0
        self.plan: Plan | None = None
        self.layout: LayoutKey | None = None
        self.plans_made = 0
        self.plans_reused = 0
        self.reason: str | None = None
        self.unweighted: str | None = None
        self.fell_back: str | None = None

    def ran(self, tokens: int, plan: Plan) -> None:
        """Note that something ran on the slots of ``plan`` instead of on ``tokens``."""
        self.before = tokens
        self.plan = plan

    def outcome(self, block: str) -> Outcome | None:
        """What the block did, under its name; None if it did not run."""
        if self.tokens is None:
            return None
        layout = None if self.layout is None else Layout.of_key(self.layout)
        if self.plan is None:
            return Outcome(
                block,
                self.tokens,
                self.tokens,
                layout=layout,
                plans_made=self.plans_made,
                plans_reused=self.plans_reused,
                reason=self.reason,
            )
        return Outcome(
            block,
            self.before,
            self.plan.slot_count,
            self.plan,
            layout,
            self.plans_made,
            self.plans_reused,
            unweighted=self.unweighted,
            fell_back=self.fell_back,
        )
