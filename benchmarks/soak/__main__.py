"""Many random runs in one process: none fails, nothing is left behind, memory does not grow.

A run draws a model, settings, a picture size, other nodes, a report, a fault in the middle or a
second model at the same time. It is done without token merging, then with it. It fails if

- our part raises, or warns of an error, where the unpatched model does not;
- the result has another shape than the unpatched model's, or is not finite where that is;
- a fault does not reach the caller as it was raised, or the next run is another one for it;
- two models at the same time have other results than each by itself;
- an override, a hook, a wrapper or anything else is left on the model;
- every tenth run: the unpatched model's result is no longer bit for bit that of before all runs.

Leaked tensors are those that token merging leaves alive after garbage collection. What the run
without it leaves alive just before is the host's and does not count.

Growth of memory is that of the process from the end of the warm-up to the end, each the median of
twenty runs. The warm-up is the first hundred runs, of 200 or fewer the first half; in it the host
fills its caches. With --quick, growth is thus judged from run 50 to run 100.

The exit code is 0 if nothing failed or leaked and memory grew by 20 MB at most.
"""

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from benchmarks.host import use_cpu
from benchmarks.machine import origin
from tools.environment import ROOT

use_cpu()

from .draws import Draw, draw
from .merging import Merging
from .models import all_models
from .neighbours import load_nodes
from .runs import Runs
from .traces import resident_bytes

QUICK = 100
WARM_UP = 100
MOST_GROWTH = 20.0
"""In MB of a million bytes."""

_LEVEL_OF = 20
_LINE_EVERY = 50
_RESULTS = ROOT / "benchmarks" / "results"


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

    def add(self, run: Draw, verdict: Any, memory: int) -> None:
        """Add a run."""
        self.bytes.append(memory)
        self.leaked += verdict.leaked
        if verdict.failures:
            self.failures.append((run, verdict.failures))
        self.counts.update(
            runs=1,
            merged=verdict.merged,
            refused=verdict.refused is not None,
            stopped=verdict.stopped,
            beside_another=run.beside is not None,
            other_nodes=run.neighbour is not None,
            loras=run.lora,
            reports=run.report is not None,
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
        return (
            f"summary: runs={len(self.bytes)} failed={len(self.failures)} "
            f"leaked_tensors={self.leaked} rss_growth_mb={self.growth:.1f}"
        )


def growth(memory: Sequence[int]) -> float:
    """From the end of the warm-up to the end, in MB; 0 if there are too few runs to tell."""
    warm_up = min(WARM_UP, len(memory) // 2)
    if warm_up < 2:
        return 0.0
    window = min(_LEVEL_OF, warm_up)
    return (median(memory[-window:]) - median(memory[warm_up - window : warm_up])) / 1e6


class Progress:
    """Shows how far the runs are: in one line of a terminal, in some lines of a log."""

    def __init__(self, runs: int):
        self._runs = runs
        self._is_terminal = sys.stdout.isatty()

    def show(self, tally: Tally) -> None:
        """Show a finished run."""
        done = len(tally.bytes)
        line = (
            f"{done}/{self._runs} runs, {len(tally.failures)} failed, "
            f"{tally.bytes[-1] / 1e6:.0f} MB"
        )
        if self._is_terminal:
            print(f"\r{line}", end="" if done < self._runs else "\n", flush=True)
        elif done % _LINE_EVERY == 0:
            print(line, flush=True)

    def tell(self, text: str) -> None:
        """Print something else."""
        print(f"\r{text}" if self._is_terminal else text, flush=True)


def soak(runs: Runs, draws: Iterable[Draw], progress: Progress, seed: int) -> Tally:
    """Do runs, and tell of each that failed."""
    tally = Tally()
    for each in draws:
        verdict = runs.run(each)
        tally.add(each, verdict, resident_bytes())
        if verdict.failures:
            progress.tell(told(each, verdict.failures, seed))
        progress.show(tally)
    return tally


def told(run: Draw, failures: Sequence[str], seed: int) -> str:
    """What failed in a run, its settings, and how to repeat it."""
    return "\n".join(
        [
            *(f"failed: run {run.number}: {failure}" for failure in failures),
            f"  settings: {json.dumps(asdict(run))}",
            f"  repeat: python3 dev.py soak --seed {seed} --only {run.number}",
        ]
    )


def page(result: dict[str, Any]) -> str:
    """A result in Markdown."""
    counts = result["counts"]
    lines = [
        f"# Soak: `{result['command']}`",
        f"{result['machine']['description']}, {result['date']}; torch "
        f"{result['machine']['torch']}. {counts['runs']} random runs on {result['models']} models in "
        f"one process, in {result['minutes']:.0f} minutes.",
        f"`{result['summary']}`",
        f"Tokens merged in {counts['merged']} runs. {counts['other_nodes']} had another node on the "
        f"model, {counts['loras']} a LoRA, {counts['reports']} a report, "
        f"{counts['beside_another']} a second model at the same time; {counts['stopped']} were "
        f"stopped by an error or an interrupt. {counts['refused']} the host cannot do even without "
        "token merging. Memory after every hundredth run, in MB: "
        f"{', '.join(str(each) for each in result['megabytes'])}.",
    ]
    return "\n\n".join(lines) + "\n"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="dev.py soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} runs")
    parser.add_argument("--seed", type=int, default=0, help="what all runs are drawn from")
    parser.add_argument("--only", type=int, metavar="N", help="do run N alone")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/soak.json and soak.md"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The hosts warn while they build models.
    warnings.filterwarnings("ignore", module=r"(comfy|ldm)\b")
    numbers: Sequence[int] = range(1, (QUICK if arguments.quick else arguments.runs) + 1)
    if arguments.only is not None:
        numbers = [arguments.only]
    load_nodes()
    models = all_models()
    traits = {name: model.traits for name, model in models.items()}
    draws = (draw(arguments.seed, number, traits) for number in numbers)
    began = time.monotonic()
    with closing(Runs(models, Merging())) as runs:
        tally = soak(runs, draws, Progress(len(numbers)), arguments.seed)
    if arguments.save:
        result = {
            **origin("cpu"),
            "command": " ".join(["python3 dev.py soak", *sys.argv[1:]]),
            "models": len(models),
            "minutes": (time.monotonic() - began) / 60,
            "summary": tally.summary(),
            "counts": dict(tally.counts),
            "megabytes": [round(each / 1e6) for each in tally.bytes[99::100]],
            "failures": [[asdict(run), failures] for run, failures in tally.failures],
        }
        text = json.dumps(result, indent=1) + "\n"
        (_RESULTS / "soak.json").write_text(text, encoding="utf-8")
        (_RESULTS / "soak.md").write_text(page(result), encoding="utf-8")
    print(tally.summary())
    return 0 if tally.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
