"""The page of what `dev.py gpu` has measured."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    files = [folder / f"gpu-{number}.json" for number in (2, 3, 4)]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    if not results:
        print(f"{folder} has none of gpu-2.json to gpu-4.json; see benchmarks/GPU.md")
        return 1
    text = page(results)
    (folder / "gpu.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def page(results: Sequence[Result]) -> str:
    """A page of results."""
    return figures.joined(["# On a GPU", *(part for each in results for part in _section(each))])


def _section(result: Result) -> Iterator[str]:
    machine, gpu = result["machine"], result["gpu"]
    yield f"## `{result['command']}`"
    source = f"{machine['description']}, {result['date']}; torch {machine['torch']}"
    if gpu:
        source += (
            f", CUDA {gpu['cuda']}, cuDNN {gpu['cudnn']}, Triton {gpu['triton']}, compute "
            f"capability {gpu['capability']}"
        )
    yield f"{source}."
    yield f"`{result.get('summary', 'cut off before its end')}`"
    for comparison in result.get("comparisons", ()):
        yield f"### {comparison['case']}"
        yield figures.table(comparison)
    yield from (f"Failed: {name}: {why}" for name, why in result["failed"].items())
    if result["left_out"]:
        yield f"No time for: {'; '.join(result['left_out'])}."


if __name__ == "__main__":
    sys.exit(main())
