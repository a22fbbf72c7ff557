"""What one sampling run merged, counted."""

from collections import Counter
from collections.abc import Set

from ..merging.evaluation import Evaluation
from ..reasons import Reason


class Counts:
    """Counts of the evaluations of a model.

    Attributes:
        total_steps: number of steps of the run, 0 if the host does not know it.
        blocks_present: number of transformer blocks of the model.
        frames: number of frames in the latent; 1 for a picture.
        merged: to how many tokens each block merged, by the number of tokens before, then by block.
        merged_only_keys: whether any block merged only keys and values, as a preset decides.
        patched_blocks: the blocks that merged only in their modules although the scope is stacks.
        left_out: by reason, the blocks with an attention that ran on all tokens because other code
            is in the way.
        unweighted_reasons: why merged keys weighed as one token each.
        merged_steps: the steps that merged anything.
        forecast_steps: the steps whose answer was forecast.
    """

    def __init__(self, total_steps: int = 0):
        self.total_steps = total_steps
        self.blocks_present = 0
        self.frames = 1
        self.merged: dict[int, dict[str, set[int]]] = {}
        self.merged_only_keys = False
        self.patched_blocks: set[str] = set()
        self.left_out: dict[Reason, set[str]] = {}
        self.unweighted_reasons: set[str] = set()
        self.merged_steps: set[int] = set()
        self.forecast_steps: Set[int] = set()
        self._shallow: set[int] = set()
        self._whole: set[int] = set()
        self._seen: set[tuple[int, tuple[str, ...], int]] = set()
        self._reasons: Counter[Reason] = Counter()
        self._reasons_of_idle: Counter[Reason] = Counter()

    def note(self, evaluation: Evaluation) -> None:
        """Add an evaluation to the counts."""
        self.blocks_present = evaluation.blocks
        (self._shallow if evaluation.is_shallow else self._whole).add(evaluation.step)
        if evaluation.reason is not None:
            found = self._reasons if evaluation.is_active else self._reasons_of_idle
            found[evaluation.reason] += 1
        has_merged = False
        for outcome in evaluation.outcomes:
            if outcome.grid is not None and outcome.grid.frames > self.frames:
                self.frames = outcome.grid.frames
            if outcome.plan is not None:
                after = outcome.plan.slot_count
                merged = outcome.before, outcome.blocks, after
                has_merged = True
                self.merged_only_keys |= outcome.only_keys
                if merged not in self._seen:
                    self._seen.add(merged)
                    by_block = self.merged.setdefault(outcome.before, {})
                    for block in outcome.blocks:
                        by_block.setdefault(block, set()).add(after)
            elif outcome.reason is not None:
                self._reasons[outcome.reason] += len(outcome.blocks)
            if outcome.left_out is not None:
                self.left_out.setdefault(outcome.left_out, set()).update(outcome.blocks)
            if outcome.unweighted_reason is not None:
                self.unweighted_reasons.add(outcome.unweighted_reason)
            if outcome.is_patched:
                self.patched_blocks.update(outcome.blocks)
        if has_merged:
            self.merged_steps.add(evaluation.step)

    @property
    def shallow_steps(self) -> Set[int]:
        """The steps whose evaluations were all shallow."""
        return self._shallow - self._whole

    @property
    def skipped_steps(self) -> Set[int]:
        """The steps in which the model did not run, or only its outermost blocks."""
        return self.forecast_steps | self.shallow_steps

    @property
    def merged_blocks(self) -> int:
        """The number of blocks that merged in any step."""
        return len(set().union(*self.merged.values()))

    @property
    def most_common_reason(self) -> Reason | None:
        """The most common reason why blocks or whole evaluations merged nothing, None if unknown.

        Reasons of evaluations that were not meant to merge count only if there are no others.
        """
        found = self._reasons or self._reasons_of_idle
        return found.most_common(1)[0][0] if found else None
