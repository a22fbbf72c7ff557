"""Many random runs in one process: none fails, nothing is left behind, memory does not grow.

A run draws a model, settings, a picture size, other nodes, a report and a fault in the middle. It
is done without our node, then with it. It fails if

- our part raises, or warns of an error, where the unpatched model does not;
- the result has another shape than the unpatched model's, or is not finite where that is;
- a fault does not reach the caller as it was raised, or the next run is another one for it;
- an override, a hook, a wrapper or anything else is left on the model;
- every seventh run: the unpatched model's result is no longer bit for bit that of before all runs.

Leaked tensors are those that our node leaves alive after garbage collection. What the run without
it leaves alive just before is the host's and does not count.

Growth of memory is that of the process from the end of the warm-up to the end, each the median of
twenty runs. The warm-up is the first hundred runs, of 200 or fewer the first half; in it the host
fills its caches. With --quick, growth is thus judged from run 50 to run 100.

The exit code is 0 if nothing failed or leaked and memory grew by 20 MB at most.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing

import comfyui_in_process  # noqa: F401
import torch

from benchmarks.host import use_cpu

from .draws import draw
from .tally import Tally, failure_text
from .traces import resident_bytes, steady_memory

use_cpu()

from .models import Merging, all_models, load_nodes  # noqa: E402
from .runs import Runs  # noqa: E402

QUICK = 100
"""How many runs --quick takes."""

# Runs between two lines of progress.
_LINE_EVERY = 50


def soak(runs: Runs, numbers: Sequence[int], seed: int) -> Tally:
    """Do the runs of some numbers, and tell of each that failed."""
    tally = Tally()
    for done, number in enumerate(numbers, 1):
        run = draw(seed, number, runs.traits)
        verdict = runs.run(run)
        tally.add(run, verdict, resident_bytes())
        if verdict.failures:
            print(failure_text(run, verdict.failures, seed), flush=True)
        if done % _LINE_EVERY == 0:
            print(
                f"{done}/{len(numbers)} runs, {len(tally.failures)} failed, "
                f"{tally.bytes[-1] / 1e6:.0f} MB",
                flush=True,
            )
    return tally


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="dev.py soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} runs")
    parser.add_argument("--seed", type=int, default=0, help="what all runs are drawn from")
    parser.add_argument("--only", type=int, metavar="N", help="do run N alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steady_memory()
    # The hosts warn of what they do themselves; ComfyUI takes a clone of a clone for a leak.
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(comfy|ldm|torchsde)\b")
    numbers: Sequence[int] = range(1, (QUICK if arguments.quick else arguments.runs) + 1)
    if arguments.only is not None:
        numbers = [arguments.only]
    load_nodes()
    with closing(Runs(all_models(), Merging())) as runs:
        tally = soak(runs, numbers, arguments.seed)
    print(tally.summary())
    return 0 if tally.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
