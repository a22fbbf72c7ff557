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
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="dev.py bench --report", description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=RESULTS, help="of gpu-1.json to gpu-3.json"
    )
    folder = parser.parse_args().folder
    results = {
        number: json.loads(path.read_text(encoding="utf-8"))
        for number in (1, 2, 3)
        if (path := folder / f"gpu-{number}.json").is_file()
    }
    if not results:
        print(f"{folder} has no gpu-1.json, gpu-2.json or gpu-3.json; see benchmarks/GPU.md")
        return 1
    text = page(results)
    (folder / "gpu.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def page(results: Mapping[int, Result]) -> str:
    """A page of the results from a GPU, by the number of their command."""
    parts = ["# On a GPU", readme(results)]
    for result in results.values():
        parts += section(result)
    return figures.joined(parts)


def section(result: Result) -> list[str]:
    """Everything in a result, whichever command made it."""
    parts = [f"## `{result['command']}`", source(result)]
    for tables in (tests, unets, transformers):
        parts += tables(result)
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
    parts = []
    rows = []
    for run in results.get(2, {}).get("runs", []):
        if not run["compiled"]:
            methods = run["methods"]
            on_gpu = {
                name: row["gpu_seconds"] for name, row in methods.items() if row.get("gpu_seconds")
            }
            rows.append(
                [
                    f"{run['model']}, {run['size']}x{run['size']}",
                    f"{1000 * statistics.median(methods['unpatched']['seconds']):.1f}",
                    *(
                        f"{figures.speed_up(run, name):.2f}" if name in methods else ""
                        for name in ("preset balanced", "preset fast", "tomesd attn")
                    ),
                    f"{1000 * on_gpu['unpatched']:.1f}" if on_gpu else "",
                    *(
                        f"{on_gpu['unpatched'] / on_gpu[name]:.2f}" if name in on_gpu else ""
                        for name in ("preset balanced", "preset fast")
                    ),
                ]
            )
    if rows:
        head = ["one evaluation", "ms", "balanced", "fast", "tomesd"]
        head += ["kernels alone, ms", "balanced", "fast"]
        parts += ["Times faster than unpatched:", figures.grid(head, rows)]
    rows = [
        [
            f"{row['name']}, {row['size']}, {row['layers']} blocks, {row['steps']} steps",
            f"{statistics.median(row['methods']['unpatched']['seconds']):.2f}",
            *(
                f"{figures.speed_up(row, name):.2f}" if name in row["methods"] else ""
                for name in ("the defaults", "keys 0.6", "keys 0.75", "6 steps")
            ),
        ]
        for row in results.get(3, {}).get("whole_runs", [])
    ]
    if rows:
        head = ["a run", "s", "the defaults", "keys 0.6", "keys 0.75", "6 steps"]
        parts += ["Times faster than unpatched:", figures.grid(head, rows)]
    return "\n\n".join(parts)


def tests(result: Result) -> Sequence[str]:
    """What happened in the tests, file by file."""
    head = ["tests", "passed", "failed", "skipped", "seconds"]
    rows = [
        [row["file"], *(str(row[name]) for name in head[1:4]), f"{row['seconds']:.0f}"]
        for row in result.get("files", [])
    ]
    return [figures.grid(head, rows)] if rows else []


def unets(result: Result) -> Sequence[str]:
    """A table for each comparison."""
    parts = []
    for run in result.get("runs", []):
        parts += [f"### {figures.title(run)}", figures.table(run)]
        parts += [f"Not timed: {name}: {why}" for name, why in run["refused"].items()]
    return parts


def transformers(result: Result) -> Sequence[str]:
    """A table for each whole run."""
    parts = []
    for row in result.get("whole_runs", []):
        rows = [
            [
                name,
                f"{statistics.median(each['seconds']):.2f}",
                f"{min(each['seconds']):.2f} to {max(each['seconds']):.2f}",
                f"{figures.speed_up(row, name):.2f}",
            ]
            for name, each in row["methods"].items()
        ]
        about = f"{row['name']}, {row['size']}, {row['steps']} steps of euler, {row['dtype']}"
        parts += [
            f"### A run of {about}",
            f"In the host's sampler, with {row['layers']} blocks that share their weights.",
            figures.grid(["run", "seconds", "from, to", "times faster"], rows),
        ]
    return parts


if __name__ == "__main__":
    sys.exit(main())
