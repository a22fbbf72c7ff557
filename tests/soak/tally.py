"""What became of the runs: counts, memory, and the words for them."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from .draws import Draw

WARM_UP = 100
"""Runs after which memory is to stay the same."""

MOST_GROWTH = 20.0
"""By how much it may grow all the same, in MB of a million bytes."""

# Runs of which the median is a level of memory.
_LEVEL_OF = 20


@dataclass
class Verdict:
    """What became of a run.

    Attributes:
        failures: what failed, each in a sentence.
        leaked: number of tensors that token merging left alive.
        refused: why the host cannot do this run even without token merging, else None.
        merged: whether any tokens merged.
        forecast: whether any step was forecast.
        stopped: whether the fault that was drawn came about.
    """

    failures: list[str] = field(default_factory=list)
    leaked: int = 0
    refused: str | None = None
    merged: bool = False
    forecast: bool = False
    stopped: bool = False


class Tally:
    """What became of the runs so far.

    Attributes:
        counts: how many runs failed, were refused by the host, merged and so on.
        failures: those runs that failed, with what failed in them.
        leaked: number of leaked tensors.
        bytes: memory of the process after each run.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[tuple[Draw, list[str]]] = []
        self.leaked = 0
        self.bytes: list[int] = []

    def add(self, run: Draw, verdict: Verdict, memory: int) -> None:
        """Add a run."""
        self.bytes.append(memory)
        self.leaked += verdict.leaked
        if verdict.failures:
            self.failures.append((run, verdict.failures))
        self.counts.update(
            merged=verdict.merged,
            forecast=verdict.forecast,
            refused=verdict.refused is not None,
            stopped=verdict.stopped,
            with_others=bool(run.neighbours),
            reported=run.report is not None,
        )

    @property
    def growth(self) -> float:
        """Growth of memory after the warm-up, in MB."""
        return growth(self.bytes)

    @property
    def is_good(self) -> bool:
        """Whether nothing failed, leaked or grew."""
        return not self.failures and self.leaked == 0 and self.growth <= MOST_GROWTH

    def summary(self) -> str:
        """The last line."""
        counts = " ".join(f"{name}={count}" for name, count in self.counts.items())
        return (
            f"summary: runs={len(self.bytes)} failed={len(self.failures)} "
            f"leaked_tensors={self.leaked} rss_growth_mb={self.growth:.1f} {counts}"
        )


def growth(memory: Sequence[int]) -> float:
    """From the end of the warm-up to the end, in MB; 0 if there are too few runs to tell."""
    warm_up = min(WARM_UP, len(memory) // 2)
    if warm_up < 2:
        return 0.0
    window = min(_LEVEL_OF, warm_up)
    return (median(memory[-window:]) - median(memory[warm_up - window : warm_up])) / 1e6


def failure_text(run: Draw, failures: Sequence[str], seed: int) -> str:
    """What failed in a run, its settings, and how to repeat it."""
    return "\n".join(
        [
            *(f"failed: run {run.number}: {failure}" for failure in failures),
            f"  settings: {json.dumps(asdict(run))}",
            f"  repeat: python3 dev.py soak --seed {seed} --only {run.number}",
        ]
    )
