"""What one sampling run merged, and the line that tells it."""

from collections import Counter


class RunStatistics:
    """Counts of one sampling run."""

    def __init__(self) -> None:
        self.blocks_present = 0
        self.total_steps = 0
        self._merged: dict[tuple[int, int], set[str]] = {}
        self._steps: set[int] = set()
        self._reasons: Counter[str] = Counter()

    def merged(self, step: int, block: str, before: int, after: int) -> None:
        """Note that a block ran on ``after`` instead of ``before`` tokens in a step."""
        self._merged.setdefault((before, after), set()).add(block)
        self._steps.add(step)

    def skipped(self, reason: str) -> None:
        """Note why a block, or a whole step, ran on all its tokens."""
        self._reasons[reason] += 1

    @property
    def merged_anything(self) -> bool:
        return bool(self._merged)

    @property
    def most_common_reason(self) -> str | None:
        """The reason noted most often, None when there is none."""
        return self._reasons.most_common(1)[0][0] if self._reasons else None

    def summary(self) -> str:
        """Such as ``merged 5/16 blocks (4096 -> 2048 tokens), 20/20 steps``."""
        blocks = len(set().union(*self._merged.values()))
        sizes = [
            f"{before} -> {after} tokens" + (f" x{len(names)}" if len(self._merged) > 1 else "")
            for (before, after), names in sorted(self._merged.items(), reverse=True)
        ]
        return (
            f"merged {blocks}/{self.blocks_present} blocks ({', '.join(sizes)}), "
            f"{len(self._steps)}/{self.total_steps} steps"
        )
