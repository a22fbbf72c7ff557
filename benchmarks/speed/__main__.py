"""Compare the methods on a CPU: on UNets, or on whole runs of transformers with --transformers.

Every method is checked before it is timed. Results are written to benchmarks/results/ after each
model and size, so an interrupted run loses only the current one. `dev.py gpu` does the same on a
GPU.
"""

import argparse
import os
import sys
from dataclasses import replace

from benchmarks.host import use_cpu
from tools.environment import ROOT

# Without a GPU, the profiler would log its absence as an error.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

use_cpu()

import torch  # noqa: E402

from benchmarks.speed import report, transformers, unets  # noqa: E402
from benchmarks.speed.record import Record  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("sd15", "sdxl")


def main() -> int:
    arguments = _arguments()
    record = Record(arguments.name, "bench", RESULTS, arguments.minutes)
    quick = arguments.quick
    try:
        with torch.no_grad():
            if arguments.transformers:
                runs = transformers.QUICK_RUNS if quick else transformers.CPU_RUNS
                return transformers.run(record, runs)
            cases = [
                replace(case, size=size)
                for case in (unets.QUICK_CASES if quick else unets.CPU_CASES)
                if case.model in arguments.model
                for size in arguments.size or [case.size]
            ]
            return unets.run(record, cases)
    finally:
        record.write_page([f"# {record.name}", *report.section(record.result)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__)
    parser.add_argument("--transformers", action="store_true", help="runs of transformers")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute or two")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS], help="which UNets")
    parser.add_argument(
        "--size", nargs="+", type=int, help="sides of the pictures, in pixels: multiples of 64"
    )
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="start nothing after this time; default: 15"
    )
    parser.add_argument("--name", help="name of the result files, for example quick-cpu")
    arguments = parser.parse_args()
    for size in arguments.size or ():
        if size < 64 or size % 64:
            parser.error(f"--size {size} is not allowed: it must be a multiple of 64 from 64 on")
    names = ("full-cpu", "quick-cpu")
    if arguments.transformers:
        names = ("transformers", "transformers-quick")
    arguments.name = arguments.name or names[arguments.quick]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
