"""What one sampling run merged, counted."""

from collections import Counter

from ..patching.blocks import Evaluated, Observer


class Counts(Observer):
    """Counts of the evaluations of a model.

    Attributes:
        total_steps: number of steps of the run, 0 if the host does not know it.
        blocks_present: number of transformer blocks of the model.
        largest_grid: number of tokens of the largest feature map that entered a block.
        frames: number of frames in the latent; 1 for a picture.
        fell_back: by reason, the blocks that ran in module scope although a wider one was set.
        unweighted: reasons why merged keys weighed as one token each.
        forecast_steps: the steps in which the answer of the model was forecast.
    """

    def __init__(self, total_steps: int = 0):
        self.total_steps = total_steps
        self.blocks_present = 0
        self.largest_grid = 0
        self.frames = 1
        self.fell_back: dict[str, set[str]] = {}
        self.unweighted: set[str] = set()
        self.forecast_steps: set[int] = set()
        self._blocks: dict[tuple[int, int], set[str]] = {}
        self._steps: set[int] = set()
        self._reasons: Counter[str] = Counter()
        self._reasons_of_idle: Counter[str] = Counter()

    def evaluated(self, result: Evaluated) -> None:
        """Add an evaluation to the counts."""
        self.blocks_present = result.blocks
        if result.reason is not None:
            reasons = self._reasons if result.is_active else self._reasons_of_idle
            reasons[result.reason] += 1
        for outcome in result.outcomes:
            self.largest_grid = max(self.largest_grid, outcome.before)
            if outcome.grid is not None:
                self.frames = max(self.frames, outcome.grid.frames)
            if outcome.plan is not None:
                size = outcome.before, outcome.after
                self._blocks.setdefault(size, set()).add(outcome.block)
                self._steps.add(result.step)
            elif outcome.reason is not None:
                self._reasons[outcome.reason] += 1
            if outcome.unweighted is not None:
                self.unweighted.add(outcome.unweighted)
            if outcome.fell_back is not None:
                self.fell_back.setdefault(outcome.fell_back, set()).add(outcome.block)

    @property
    def merged_steps(self) -> int:
        """The number of steps in which anything merged."""
        return len(self._steps)

    @property
    def merged_blocks(self) -> int:
        """The number of blocks that merged in any step."""
        return len(set().union(*self._blocks.values()))

    @property
    def merged_anything(self) -> bool:
        return bool(self._blocks)

    @property
    def saved_anything(self) -> bool:
        """Whether anything merged or was forecast."""
        return self.merged_anything or bool(self.forecast_steps)

    @property
    def lengths(self) -> list[int]:
        """The sizes in tokens of the feature maps that merged, largest first."""
        return sorted({before for before, _ in self._blocks}, reverse=True)

    def blocks_of(self, before: int) -> int:
        """The number of blocks that merged a feature map of ``before`` tokens."""
        return len(
            set().union(*(names for size, names in self._blocks.items() if size[0] == before))
        )

    def lengths_after(self, before: int) -> list[int]:
        """The numbers of tokens to which ``before`` tokens were merged, smallest first."""
        return sorted(after for size, after in self._blocks if size == before)

    @property
    def most_common_reason(self) -> str | None:
        """The most common reason why blocks or whole evaluations merged nothing, None if unknown.

        Reasons of evaluations that were not meant to merge count only if there are no others.
        """
        reasons = self._reasons or self._reasons_of_idle
        return reasons.most_common(1)[0][0] if reasons else None
