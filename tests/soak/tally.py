"""What became of the runs: counts, memory, and the words for them."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from .draws import Draw

WARM_UP = 100

MOST_GROWTH = 20.0
"""By how much it may grow all the same, in MB of a million bytes."""

FACTS = ("merged", "shallow", "forecast", "refused", "stopped")
"""Whether any tokens merged, any step was shallow or forecast, the host cannot do the run even
without token merging, and the fault that was drawn came about."""


@dataclass
class Verdict:
    """What failed in a run, each in a sentence, and which of :data:`FACTS` hold."""

    failures: list[str] = field(default_factory=list)
    facts: set[str] = field(default_factory=set)


def growth(memory: Sequence[int]) -> float:
    """From the end of the warm-up to the end, in MB; 0 if there are too few runs to tell."""
    warm_up = min(WARM_UP, len(memory) // 2)
    if warm_up < 2:
        return 0.0
    # Runs of which the median is a level of memory.
    window = min(20, warm_up)
    return (median(memory[-window:]) - median(memory[warm_up - window : warm_up])) / 1e6


def summary(verdicts: Sequence[Verdict], memory: Sequence[int]) -> tuple[str, bool]:
    """The last line, and whether nothing failed, leaked or grew.

    ``memory`` is that of the process after each run.
    """
    failed = sum(bool(verdict.failures) for verdict in verdicts)
    counts = Counter(fact for verdict in verdicts for fact in verdict.facts)
    facts = " ".join(f"{fact}={counts[fact]}" for fact in FACTS)
    grown = growth(memory)
    line = f"summary: runs={len(verdicts)} failed={failed} rss_growth_mb={grown:.1f} {facts}"
    return line, not failed and grown <= MOST_GROWTH


def failure_text(run: Draw, failures: Sequence[str], seed: int) -> str:
    """What failed in a run, its settings, and how to repeat it."""
    return "\n".join(
        [
            *(f"failed: run {run.number}: {failure}" for failure in failures),
            f"  settings: {json.dumps(asdict(run))}",
            f"  repeat: python3 dev.py soak --seed {seed} --only {run.number}",
        ]
    )
