"""Many random runs in one process: none fails, nothing is left behind, memory does not grow.

A run draws a model, settings, a picture size, other nodes, a report and a fault in the middle. It
is done without our node, then with it. It fails if

- our part raises, or warns of an error, where the unpatched model does not;
- the result has another shape than the unpatched model's, or is not finite where that is;
- a fault does not reach the caller as it was raised, or the next run is another one for it;
- an override, a hook, a wrapper or anything else is left on the model, or a tensor alive that the
  run without our node leaves not;
- every seventh run: the unpatched model's result is no longer bit for bit that of before all runs.

Growth of memory is that of the process after a warm-up of a hundred runs, or of half of them if
there are fewer than 200; in it the host fills its caches.

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
from .tally import failure_text, summary
from .traces import resident_bytes, steady_memory

use_cpu()

from .models import Merging, all_models, load_nodes  # noqa: E402
from .runs import Runs  # noqa: E402

# How many runs --quick takes.
_QUICK = 100


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="dev.py soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK} runs")
    parser.add_argument("--seed", type=int, default=0, help="what all runs are drawn from")
    parser.add_argument("--only", type=int, metavar="N", help="do run N alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steady_memory()
    # The hosts warn of what they do themselves; ComfyUI takes a clone of a clone for a leak.
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(comfy|ldm|torchsde)\b")
    numbers: Sequence[int] = range(1, (_QUICK if arguments.quick else arguments.runs) + 1)
    if arguments.only is not None:
        numbers = [arguments.only]
    load_nodes()
    verdicts, memory = [], []
    with closing(Runs(all_models(), Merging())) as runs:
        for done, number in enumerate(numbers, 1):
            run = draw(arguments.seed, number, runs.traits)
            verdict = runs.run(run)
            verdicts.append(verdict)
            memory.append(resident_bytes())
            if verdict.failures:
                print(failure_text(run, verdict.failures, arguments.seed), flush=True)
            if done % 50 == 0:
                print(f"{done}/{len(numbers)} runs, {memory[-1] / 1e6:.0f} MB", flush=True)
    line, is_good = summary(verdicts, memory)
    print(line)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
