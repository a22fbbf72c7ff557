"""The four commands of `dev.py gpu`: tests and measurements on a GPU.

benchmarks/GPU.md explains them.
"""

import argparse
import os
import sys
from pathlib import Path

from benchmarks.host import use
from tools.environment import ROOT

# Without a GPU, the profiler would log its absence as an error.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

RESULTS = ROOT / "benchmarks" / "results"
MINUTES = 8.5


def main() -> int:
    arguments = _arguments()
    import torch

    if not (arguments.dry or torch.cuda.is_available()):
        print("PyTorch sees no GPU here; --dry goes through the motions without one.")
        return 2
    device = "cpu" if arguments.dry else "cuda"
    use(device)
    from benchmarks.speed import compiled, suite, transformers, unets
    from benchmarks.speed.record import Record

    number, dry = arguments.number, arguments.dry
    folder = arguments.out or (None if dry else Path(os.environ.get("OUT", RESULTS)))
    if number == 1:
        return suite.run(folder, arguments.minutes, dry)
    with torch.no_grad():
        record = Record(f"gpu-{number}", "gpu", folder, arguments.minutes, device, dry)
        if number == 2:
            unets.run(record, unets.DRY_CASES if dry else unets.CASES)
        elif number == 3:
            transformers.run(record, transformers.DRY_RUNS if dry else transformers.RUNS)
        else:
            compiled.run(record, compiled.DRY_CASES if dry else compiled.CASES)
        return record.finish()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py gpu", description=__doc__)
    numbers = "1: the tests; 2: UNets; 3: runs of transformers; 4: compiled UNets"
    parser.add_argument("number", type=int, choices=(1, 2, 3, 4), help=numbers)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, in a minute")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="start nothing after this time"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the results; default: $OUT, else results"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
