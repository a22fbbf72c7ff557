"""Compare the methods on a CPU: on UNets, or with --transformers on single blocks of transformers.

Every method is checked before it is timed. Results are written to benchmarks/results/ after each
model and size, so an interrupted run loses only the current one. `dev.py gpu` does the same on a
GPU.
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from benchmarks.host import use_cpu
from tools.environment import ROOT

# Without a GPU, the profiler would log its absence as an error.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

use_cpu()

if TYPE_CHECKING:
    from benchmarks.speed.transformers import Block
    from benchmarks.speed.unets import Case

RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("sd15", "sdxl")


def main() -> int:
    """Run the command line."""
    arguments = _arguments()
    import torch

    from benchmarks.speed import report, transformers, unets
    from benchmarks.speed.record import Record

    command = " ".join(["python3 dev.py bench", *sys.argv[1:]])
    record = Record(arguments.name, command, RESULTS, arguments.minutes, "cpu")
    try:
        with torch.no_grad():
            if arguments.transformers:
                return transformers.run(record, chosen_blocks(arguments), ())
            return unets.run(record, chosen_cases(arguments))
    finally:
        text = report.joined([f"# {record.name}", *report.section(record.result)])
        (RESULTS / f"{record.name}.md").write_text(text, encoding="utf-8")


def chosen_cases(arguments: argparse.Namespace) -> "list[Case]":
    """The comparisons of UNets that the command line asks for."""
    from dataclasses import replace

    from benchmarks.speed.unets import CPU_CASES, QUICK_CASES

    cases = [
        case
        for case in (QUICK_CASES if arguments.quick else CPU_CASES)
        if case.model in arguments.model
    ]
    if arguments.size:
        cases = [replace(case, size=size) for case in cases for size in arguments.size]
    if arguments.methods:
        cases = [replace(case, methods=arguments.methods) for case in cases]
    return cases


def chosen_blocks(arguments: argparse.Namespace) -> "tuple[Block, ...]":
    """The blocks of transformers that the command line asks for."""
    from benchmarks.speed.transformers import CPU_BLOCKS, QUICK_BLOCKS

    return QUICK_BLOCKS if arguments.quick else CPU_BLOCKS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__)
    parser.add_argument("--transformers", action="store_true", help="blocks of transformers")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute or two")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS], help="which UNets")
    parser.add_argument(
        "--size", nargs="+", type=int, help="sides of the pictures, in pixels: multiples of 64"
    )
    parser.add_argument("--methods", nargs="+", help="names from the tables; default: all")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="nothing begins after these; default: 15"
    )
    parser.add_argument("--name", help="name of the result files, for example quick-cpu")
    arguments = parser.parse_args()
    for size in arguments.size or ():
        if size < 64 or size % 64:
            parser.error(f"--size {size} is not allowed: it must be a multiple of 64 from 64 on")
    length = "quick" if arguments.quick else "full"
    if arguments.transformers:
        arguments.name = arguments.name or f"transformers{'-quick' * arguments.quick}"
    arguments.name = arguments.name or f"{length}-cpu"
    return arguments


if __name__ == "__main__":
    sys.exit(main())
