"""Tables of the pages whose figures come from the results of benchmarks.

``dev.py generate`` writes them, and ``dev.py lint`` fails where a page has other figures than the
results. Standard library only.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.fidelity.shares import CACHE, STEPS, Rows, share
from tools.environment import ROOT

RESULTS = ROOT / "benchmarks" / "results"

PAPER = "q,k,v 0.5, as the paper"
_TOMESD, _TODO = "tomesd q,k,v 0.5", "ToDo k,v 0.75"
_SHORT = {PAPER: "paper 0.5", _TOMESD: "tomesd 0.5", _TODO: "ToDo"}
"""Names of methods of others in tables."""

_JUDGED: Sequence[tuple[str, str, Sequence[str]]] = (
    ("pictures", "12", ("balanced 0.6", "fast 0.6", "9", "7", "0.2", _TOMESD, _TODO)),
    ("pictures", "20", ("balanced 0.6", "fast 0.6", "10", "8", "0.2", _TOMESD, _TODO)),
    ("pictures", "8", ("balanced 0.6", "fast 0.6", "6", "5", "0.2", _TOMESD, _TODO)),
    ("image", "8", ("fast 0.6", "fast 0.75", "6", "5", "0.2", "0.4", PAPER)),
    ("image", "20", ("fast 0.6", "fast 0.75", "10", "8", "0.2", "0.4", PAPER)),
    ("few", "4", ("fast 0.6", "3", "0.2", "0.4", PAPER)),
    ("few", "8", ("fast 0.6", "fast 0.75", "6", "5", "0.2", "0.4", PAPER)),
    ("few_multistep", "8", ("fast 0.6", "fast 0.75", "6", "5", "0.2", "0.4", PAPER)),
    ("second", "8", ("fast 0.6", "fast 0.75", "5", "4", "0.1", "0.2", PAPER)),
    ("video", "8", ("fast 0.6", "fast 0.75", "6", "5", "0.2", _TODO)),
    ("video", "20", ("fast 0.6", "fast 0.75", "10", "8", "0.2", "0.4", _TODO)),
    ("video_multistep", "8", ("fast 0.6", "fast 0.75", "6", "5", "0.2")),
    ("video_multistep", "20", ("fast 0.5", "fast 0.6", "13", "10", "0.1", "0.2")),
    ("edit", "8", ("fast 0.6", "fast 0.75", "5", "4", "0.1", "0.2", PAPER)),
)
"""What the table of errors shows: judge, number of steps, and rows: ours, numbers of steps,
thresholds of EasyCache, and methods of others."""

_COMPARED: Sequence[tuple[str, Sequence[tuple[str, str, str]]]] = (
    (
        "UNet, *balanced*",
        (
            ("pictures", "8", "balanced 0.6"),
            ("pictures", "12", "balanced 0.6"),
            ("pictures", "20", "balanced 0.6"),
        ),
    ),
    (
        "UNet, *fast*",
        (
            ("pictures", "8", "fast 0.6"),
            ("pictures", "12", "fast 0.6"),
            ("pictures", "20", "fast 0.6"),
        ),
    ),
    (
        "The same, guidance 7, *balanced* and *fast*",
        (("pictures_7", "20", "balanced 0.6"), ("pictures_7", "20", "fast 0.6")),
    ),
    ("Transformer", (("image", "8", "fast 0.6"), ("image", "20", "fast 0.6"))),
    ("Transformer distilled to four steps", (("few", "4", "fast 0.6"), ("few", "8", "fast 0.6"))),
    ("The same, sampled by res_multistep", (("few_multistep", "8", "fast 0.6"),)),
    ("Second passes of a transformer", (("second", "8", "fast 0.6"),)),
    ("Edits with two references", (("edit", "8", "fast 0.6"),)),
    ("Videos", (("video", "8", "fast 0.6"), ("video", "20", "fast 0.6"))),
    (
        "The same, sampled by res_multistep",
        (("video_multistep", "8", "fast 0.6"), ("video_multistep", "20", "fast 0.6")),
    ),
)
"""The rows of the comparison with fewer steps and caches, and what each compares."""


def tables() -> dict[Path, dict[str, str]]:
    """The tables of each page, by the name in their markers."""
    return {
        ROOT / "README.md": {"work": _work(), "skipped": _skipped()},
        ROOT / "docs" / "measured.md": {
            "work by size": _work_by_size(),
            "presets": _presets(),
            "compared": _compared(),
        },
        ROOT / "benchmarks" / "FIDELITY.md": {"errors": _errors()},
    }


@cache
def _counted() -> Mapping[str, Mapping[str, Any]]:
    """The counted work by model and size."""
    found: Any = json.loads((RESULTS / "work.json").read_text(encoding="utf-8"))
    return found


def _work() -> str:
    """The work that is left of whole runs."""
    asked = (
        ("SD 1.5", 512, "20 steps"),
        ("SD 1.5", 1024, "20 steps"),
        ("SD 1.5", 2048, "20 steps"),
        ("SDXL", 1024, "20 steps"),
        ("SDXL", 2048, "20 steps"),
        ("SD 1.5", 1024, "second pass"),
        ("SDXL", 1536, "second pass"),
    )

    def cells(model: str, side: int, run: str) -> Iterator[str]:
        size = f"{model} at {side}×{side}"
        yield f"A second pass of 8 steps, {size}" if run == "second pass" else f"{size}, {run}"
        row = _counted()[f"{model}, {side}x{side}"]
        yield from (f"{row[f'{run}, {preset}']:.2f}" for preset in ("balanced", "fast"))

    return table(("You run", "Default", "*fast*"), ([*cells(*each)] for each in asked))


def _work_by_size() -> str:
    """The work that is left of an evaluation."""

    def body() -> Iterator[Sequence[str]]:
        before = ""
        for size, row in _counted().items():
            model, side = size.split(", ")
            left = (row[preset] for preset in ("balanced", "fast"))
            merged = ("nothing merges" if each == 1 else f"{each:.2f}" for each in left)
            yield "" if model == before else model, side.replace("x", "×"), *merged
            before = model

    return table(("Model", "Size", "*balanced*", "*fast*"), body())


@cache
def _fidelity() -> Mapping[str, Mapping[str, Rows]]:
    """The results by judge and number of steps."""
    found: Any = json.loads((RESULTS / "fidelity.json").read_text(encoding="utf-8"))
    return found


def rows(judge: str, steps: str) -> Rows:
    """The rows of a judge in a number of steps; none if it was not asked."""
    return _fidelity().get(judge, {}).get(steps, {})


def table(head: Sequence[str], body: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *body]
    return "\n".join(f"| {' | '.join(map(str, line))} |".replace("  |", " |") for line in lines)


def _skipped_in(judge: str, steps: int) -> int:
    """How many steps of a run the default forecasts on a transformer."""
    time = rows(judge, str(steps))["fast 0.6"]["time"]
    return steps - round(steps * time)


def _share(judge: str, steps: int, name: str = "fast 0.6", kind: str = STEPS) -> str:
    """The error of a row over that of fewer steps, or of the best cache, in the same time."""
    found = share(rows(judge, str(steps)), name, kind)
    return "" if found is None else f"{found:.2f}"


def _skipped() -> str:
    """What skipping steps changes on transformers."""
    whole, skipped = (_seconds(method) for method in ("unpatched", "the defaults"))
    flux = f"Flux's single blocks at 1024×1024 took {skipped} s instead of {whole} s (H200)"
    eight, twenty, four = (_skipped_in(*of) for of in (("image", 8), ("image", 20), ("few", 4)))
    multistep = sorted(
        _share(judge, steps)
        for judge, steps in (("few_multistep", 8), ("video_multistep", 8), ("video_multistep", 20))
    )
    of_eight = f"{_share('image', 8)}; turbo models {_share('few', 8)}, videos {_share('video', 8)}"
    return table(
        ("You run", "Skipped", "Change, where fewer steps have 1"),
        (
            ("8 steps", f"{eight}: {flux}", of_eight),
            (
                "20 steps",
                f"{twenty}; videos {_skipped_in('video', 20)}",
                f"{_share('image', 20)}; videos {_share('video', 20)}",
            ),
            ("4 steps, turbo models", four, _share("few", 4)),
            ("8 steps or more of res_multistep", "as above", " to ".join(_ends(multistep))),
        ),
    )


def _seconds(method: str) -> str:
    """The seconds of a run of Flux on a GPU."""
    measured = json.loads((RESULTS / "gpu-3.json").read_text(encoding="utf-8"))["whole_runs"]
    flux = next(run for run in measured if (run["name"], run["size"]) == ("Flux", "1024x1024"))
    return f"{statistics.median(flux['methods'][method]['seconds']):.2f}"


def _ends(values: Sequence[str]) -> Sequence[str]:
    return (values[0], values[-1]) if values[0] != values[-1] else values[:1]


def _presets() -> str:
    """Work and change of the presets."""
    unet, transformer = rows("pictures", "12"), rows("image", "8")

    def cell(judged: Rows, name: str, paper: str) -> str:
        row = judged[name]
        return f"{row['time']:.2f}, {row['error'] / judged[paper]['error']:.2f}"

    return table(
        ("Preset", "UNet, 12 steps", "Transformer, 8 steps"),
        (
            (
                "*balanced*",
                cell(unet, "balanced 0.6", _TOMESD),
                cell(transformer, "fast 0.6", PAPER),
            ),
            ("*fast*", cell(unet, "fast 0.6", _TOMESD), "the same"),
            (
                "*paper*, at 0.5",
                cell(unet, _TOMESD, _TOMESD),
                f"{cell(transformer, PAPER, PAPER)}, when it merged queries there, too",
            ),
        ),
    )


def _compared() -> str:
    """Errors over those of fewer steps and of caches."""

    def body() -> Iterator[Sequence[str]]:
        for title, asked in _COMPARED:
            numbers = dict.fromkeys(steps for _, steps, _ in asked)
            columns = [
                ", ".join(
                    filter(None, (_share(judge, int(n), name, kind) for judge, n, name in asked))
                )
                for kind in (STEPS, CACHE)
            ]
            yield title, ", ".join(numbers), *columns

    return table(("Model", "Steps", "Over fewer steps", "Over a cache"), body())


def _errors() -> str:
    """Errors at the work of what a user could pick."""

    def cells(judge: str, steps: str, names: Sequence[str]) -> Iterator[str]:
        judged = rows(judge, steps)
        columns: dict[str, list[str]] = {"ours": [], "steps": [], "cache": [], "merging": []}
        for name in names:
            if name in _SHORT:
                column, row, label = "merging", name, _SHORT[name]
            elif name.isdigit():
                column, row, label = "steps", f"{name} steps", name
            elif name[0].isdigit():
                column, row, label = "cache", f"EasyCache {name}", name
            else:
                preset, ratio = name.split()
                label = f"*{preset}* {ratio}" if judge == "pictures" else ratio
                column, row = "ours", name
            found = judged[row]
            told = f": {found['error']:.4f} at {found['time']:.2f}"
            columns[column].append(label + (told if found["error"] else " skips nothing"))
        yield from ("; ".join(column) for column in columns.values())

    return table(
        ("", "ours", "fewer steps", "EasyCache", "merging by others"),
        (
            (f"*{judge}*, {steps} steps", *cells(judge, steps, names))
            for judge, steps, names in _JUDGED
        ),
    )
