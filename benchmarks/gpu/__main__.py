"""Run one of the three commands; `dev.py gpu` calls it."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.host import use  # noqa: E402

# Without a GPU, the profiler would log its absence as an error.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

RESULTS = ROOT / "benchmarks" / "results"
MINUTES = 8.5


def main() -> int:
    """Run the command line."""
    arguments = _arguments()
    import torch

    if not (arguments.dry or torch.cuda.is_available()):
        print("PyTorch sees no GPU here; --dry goes through the motions without one.")
        return 2
    use("cpu" if arguments.dry else "cuda")
    from benchmarks.gpu import keys, suite, unets
    from benchmarks.gpu.record import Record

    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.out or Path(scratch if arguments.dry else os.environ.get("OUT", RESULTS))
        record = Record(arguments.number, folder, arguments.minutes, arguments.dry)
        run = {1: suite.run, 2: unets.run, 3: keys.run}[arguments.number]
        with torch.no_grad():
            return run(record)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py gpu", description=__doc__)
    parser.add_argument(
        "number",
        type=int,
        choices=(1, 2, 3),
        help="1: the tests; 2: UNets; 3: ways to weigh keys, and blocks of transformers",
    )
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, in a minute")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="nothing begins after these")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default: $OUT, else results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
