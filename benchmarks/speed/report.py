"""Pages of results, and the figures of a GPU for docs/measured.md."""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed import figures

RESULTS = Path(__file__).parents[1] / "results"
Result = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="dev.py bench --report", description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=RESULTS, help="of gpu-2.json to gpu-4.json"
    )
    folder = parser.parse_args().folder
    results = {
        number: json.loads(path.read_text(encoding="utf-8"))
        for number in (2, 3, 4)
        if (path := folder / f"gpu-{number}.json").is_file()
    }
    if not results:
        print(f"{folder} has none of gpu-2.json to gpu-4.json; see benchmarks/GPU.md")
        return 1
    text = page(results)
    (folder / "gpu.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def page(results: Mapping[int, Result]) -> str:
    """A page of the results from a GPU, by the number of their command."""
    sections = [part for result in results.values() for part in section(result)]
    return figures.joined(["# On a GPU", readme(results), *sections])


def section(result: Result) -> list[str]:
    """Everything in a result, whichever command made it."""
    parts = [f"## `{result['command']}`", source(result)]
    for run in result.get("runs", []):
        parts += [f"### {figures.title(run)}", figures.table(run)]
        parts += [f"Not timed: {name}: {why}" for name, why in run["refused"].items()]
    for run in result.get("whole_runs", []):
        about = f"{run['name']}, {run['size']}, {run['steps']} steps of euler, {run['dtype']}"
        layers = f"In the host's sampler, with {run['layers']} blocks that share their weights."
        parts += [f"### A run of {about}", layers, table_of_run(run)]
    for run in result.get("compiled", []):
        parts += [f"### {figures.model_and_size(run)}, compiled", figures.table_of_modes(run)]
    parts += [f"Failed: {name}: {why}" for name, why in result["failed"].items()]
    if result["left_out"]:
        parts.append(f"No time for: {'; '.join(result['left_out'])}.")
    return parts


def source(result: Result) -> str:
    """The machine, the date, and the last line of a run."""
    machine, gpu = result["machine"], result["gpu"]
    text = f"{machine['description']}, {result['date']}; torch {machine['torch']}"
    if gpu:
        text += (
            f", CUDA {gpu['cuda']}, cuDNN {gpu['cudnn']}, Triton {gpu['triton']}, compute "
            f"capability {gpu['capability']}"
        )
    return f"{text}.\n\n`{result.get('summary', 'cut off before its end')}`"


def readme(results: Mapping[int, Result]) -> str:
    """Times faster with presets, in two tables, for docs/measured.md; empty if none was timed."""
    presets = ("preset balanced", "preset fast")
    rows = []
    for run in results.get(2, {}).get("runs", []):
        in_kernels = {
            name: {"seconds": [row["gpu_seconds"]]}
            for name, row in run["methods"].items()
            if row.get("gpu_seconds")
        }
        whole = _faster(run, (*presets, "tomesd attn"), 1000)
        kernels = _faster({"methods": in_kernels}, presets, 1000)
        rows.append([f"{run['model']}, {run['size']}x{run['size']}", *whole, *kernels])
    parts = []
    if rows:
        head = ["one evaluation", "ms", "balanced", "fast", "tomesd"]
        head += ["kernels alone, ms", "balanced", "fast"]
        parts += ["Times faster than unpatched:", figures.grid(head, rows)]
    ways = ("the defaults", "keys 0.6", "keys 0.75", "6 steps")
    rows = [
        [
            f"{run['name']}, {run['size']}, {run['layers']} blocks, {run['steps']} steps",
            *_faster(run, ways),
        ]
        for run in results.get(3, {}).get("whole_runs", [])
    ]
    if rows:
        parts += ["Times faster than unpatched:", figures.grid(["a run", "s", *ways], rows)]
    return "\n\n".join(parts)


def _faster(run: figures.Run, names: Sequence[str], unit: int = 1) -> list[str]:
    """Time of the unpatched model in a unit of so many in a second, and times faster with others.

    What was not timed is empty.
    """
    methods = run["methods"]
    if "unpatched" not in methods:
        return [""] * (1 + len(names))
    seconds = statistics.median(methods["unpatched"]["seconds"])
    return [
        f"{unit * seconds:.{1 if unit > 1 else 2}f}",
        *(f"{figures.speed_up(run, name):.2f}" if name in methods else "" for name in names),
    ]


def table_of_run(row: Mapping[str, Any]) -> str:
    """Seconds of a whole run in all ways, and times faster."""
    rows = [
        [
            name,
            f"{statistics.median(method['seconds']):.2f}",
            f"{min(method['seconds']):.2f} to {max(method['seconds']):.2f}",
            f"{figures.speed_up(row, name):.2f}",
        ]
        for name, method in row["methods"].items()
    ]
    return figures.grid(["run", "seconds", "from, to", "times faster"], rows)


if __name__ == "__main__":
    sys.exit(main())
