"""The tables and the plot whose figures come from the results of benchmarks.

``dev.py generate`` writes them into the pages, and ``dev.py lint`` fails if a page has other
figures than the results. Standard library only.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.fidelity.shares import (
    CACHE,
    MERGED_STEPS,
    MERGING,
    OURS,
    PAPER,
    STEPS,
    TODO,
    TOMESD,
    Rows,
    error_at,
    points,
    share,
    spread,
)
from tome_nodes.settings.presets import PRESETS
from tools.environment import ROOT
from tools.plot import plot

RESULTS = ROOT / "benchmarks" / "results"

_SHORT = {PAPER: "paper 0.5", TOMESD: "tomesd 0.5", TODO: "ToDo"}
"""Names of methods of others in tables."""

_UNET = ("balanced 0.6", "fast 0.6")
_PLAIN = ("fast 0.6", "fast 0.75")
_ERRORS: Sequence[tuple[str, int, Sequence[str]]] = (
    ("pictures", 12, (*_UNET, "9 steps", "7 steps", "EasyCache 0.2", TOMESD, TODO)),
    ("pictures", 20, (*_UNET, "10 steps", "8 steps", "EasyCache 0.2", TOMESD, TODO)),
    ("pictures", 8, (*_UNET, "6 steps", "5 steps", "EasyCache 0.2", TOMESD, TODO)),
    ("image", 8, (*_PLAIN, "6 steps", "5 steps", "EasyCache 0.2", "EasyCache 0.4", PAPER)),
    ("image", 20, (*_PLAIN, "10 steps", "8 steps", "EasyCache 0.2", "EasyCache 0.4", PAPER)),
    ("few", 4, ("fast 0.6", "3 steps", "EasyCache 0.2", "EasyCache 0.4", PAPER)),
    ("few", 8, (*_PLAIN, "6 steps", "5 steps", "EasyCache 0.2", "EasyCache 0.4", PAPER)),
    ("few_multistep", 8, (*_PLAIN, "6 steps", "5 steps", "EasyCache 0.2", "EasyCache 0.4", PAPER)),
    ("second", 8, (*_PLAIN, "5 steps", "4 steps", "EasyCache 0.1", "EasyCache 0.2", PAPER)),
    ("video", 8, (*_PLAIN, "6 steps", "5 steps", "EasyCache 0.2", TODO)),
    ("video", 20, (*_PLAIN, "10 steps", "8 steps", "EasyCache 0.2", "EasyCache 0.4", TODO)),
    ("video_multistep", 8, (*_PLAIN, "6 steps", "5 steps", "EasyCache 0.2")),
    (
        *("video_multistep", 20),
        ("fast 0.5", "fast 0.6", "13 steps", "10 steps", "EasyCache 0.1", "EasyCache 0.2"),
    ),
    ("edit", 8, (*_PLAIN, "5 steps", "4 steps", "EasyCache 0.1", "EasyCache 0.2", PAPER)),
)
"""What the table of errors shows: judge, number of steps, and rows."""

_COMPARED: Sequence[tuple[str, str, Sequence[int], Sequence[str]]] = (
    ("UNet, *balanced*", "pictures", (8, 12, 20), ("balanced 0.6",)),
    ("UNet, *fast*", "pictures", (8, 12, 20), ("fast 0.6",)),
    ("The same, guidance 7, *balanced* and *fast*", "pictures_7", (20,), _UNET),
    ("Transformer", "image", (8, 20), ("fast 0.6",)),
    ("Transformer distilled to four steps", "few", (4, 8), ("fast 0.6",)),
    ("The same, sampled by res_multistep", "few_multistep", (8,), ("fast 0.6",)),
    ("Second passes of a transformer", "second", (8,), ("fast 0.6",)),
    ("Edits with two references", "edit", (8,), ("fast 0.6",)),
    ("Videos", "video", (8, 20), ("fast 0.6",)),
    ("The same, sampled by res_multistep", "video_multistep", (8, 20), ("fast 0.6",)),
)
"""What is compared with fewer steps and caches: title, judge, numbers of steps, and rows."""


def tables() -> dict[Path, dict[str, str]]:
    """The tables of each page, by the name in their markers."""
    return {
        ROOT / "README.md": {"work": _work()},
        ROOT / "web" / "docs" / "ToMePatchModel.md": {"work": _work()},
        ROOT / "docs" / "measured.md": {
            "work by size": _work_by_size(),
            "presets": _presets(),
            "compared": _compared(),
        },
        ROOT / "benchmarks" / "FIDELITY.md": {
            "errors": _errors(),
            "shallow": _shallow(),
            "deep cache": _deep_cache(),
            "few steps": few_steps(),
        },
    }


def plots() -> dict[Path, str]:
    """The plots by their files."""
    panels = (
        ("UNet, 20 steps", "stickers", 20),
        ("UNet, second pass", "hires", 8),
        ("Transformer, 20 steps", "image", 20),
        ("Transformer, second pass", "second", 8),
    )
    shown = [(title, _as_at_1024(rows(judge, steps))) for title, judge, steps in panels]
    return {ROOT / "docs" / "change-and-work.svg": plot(shown)}


def _as_at_1024(asked: Rows) -> Rows:
    """Rows in which *balanced* merges nothing, as in SDXL at 1024x1024, if there are such rows."""
    alone = {
        name.replace("shallow", "balanced").removesuffix(", nothing merged"): row
        for name, row in asked.items()
        if name in ("shallow 0.225, nothing merged", "shallow 0.45, nothing merged")
    }
    if not alone:
        return asked
    return {**{name: row for name, row in asked.items() if "balanced" not in name}, **alone}


@cache
def _counted() -> Mapping[str, Mapping[str, Any]]:
    """The counted work by model and size."""
    found: Any = json.loads((RESULTS / "work.json").read_text(encoding="utf-8"))
    return found


def _work() -> str:
    """How many times less work the model has in whole runs."""
    asked = (
        ("SDXL", 1536, "second pass"),
        ("SDXL", 2048, "second pass"),
        ("SDXL", 1024, "20 steps"),
        ("SDXL", 1024, "8 steps"),
        ("SD 1.5", 1024, "second pass"),
        ("SD 1.5", 512, "20 steps"),
        ("SD 1.5", 1024, "20 steps"),
        ("SD 1.5", 2048, "20 steps"),
    )

    def cells(model: str, side: int, run: str) -> Iterator[str]:
        size = f"{model} at {side}×{side}"
        yield f"{size}, second pass of 8 steps" if run == "second pass" else f"{size}, {run}"
        row = _counted()[f"{model}, {side}x{side}"]
        yield from (f"{1 / row[f'{run}, {preset}']:.1f}" for preset in ("balanced", "fast"))

    def forecast(judge: str, steps: int) -> str:
        return f"{steps / (steps - _skipped_in(judge, steps)):.1f}"

    body = [[*cells(*each)] for each in asked]
    body += [
        [f"{model} at any size, {steps} steps", forecast(judge, steps), "the same"]
        for model, judge, numbers in (
            ("Flux, Qwen-Image and other transformers", "image", (20, 8)),
            ("Wan and other videos", "video", (20,)),
        )
        for steps in numbers
    ]
    return table(("You run", "Default", "*fast*"), body)


def _work_by_size() -> str:
    """The share of the work that is left, of an evaluation, a run and a second pass, by preset."""

    def body() -> Iterator[Sequence[str]]:
        before = ""
        for size, row in _counted().items():
            model, side = size.split(", ")
            left = (
                " / ".join(f"{row[f'{run}{preset}']:.2f}" for preset in ("balanced", "fast"))
                for run in ("", "20 steps, ", "second pass, ")
            )
            yield "" if model == before else model, side.replace("x", "×"), *left
            before = model

    return table(("Model", "Size", "One evaluation", "20 steps", "Second pass"), body())


@cache
def _fidelity() -> Mapping[str, Mapping[str, Rows]]:
    """The results by judge and number of steps."""
    found: Any = json.loads((RESULTS / "fidelity.json").read_text(encoding="utf-8"))
    return found


def rows(judge: str, steps: int) -> Rows:
    """The rows of a judge in a number of steps."""
    return _fidelity()[judge][str(steps)]


def table(head: Sequence[str], body: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *body]
    return "\n".join(f"| {' | '.join(map(str, line))} |".replace("  |", " |") for line in lines)


def _skipped_in(judge: str, steps: int) -> int:
    """How many steps of a run the default forecasts on a transformer."""
    return steps - round(steps * rows(judge, steps)["fast 0.6"]["time"])


def _share(judge: str, steps: int, name: str = "fast 0.6", kind: str = STEPS) -> float:
    """The error of a row over that of fewer steps, or of the best cache, in the same time.

    Raises:
        KeyError: the results have no such row, or none to compare it with.
    """
    found = share(rows(judge, steps), name, kind)
    if found is None:
        raise KeyError(f"{judge} in {steps} steps: {name} over {kind}")
    return found


_ON_STICKERS: Sequence[tuple[str, str, Sequence[int]]] = (
    ("dpmpp_2m", "stickers", (20, 12, 8)),
    ("euler", "stickers_euler", (20, 12, 8)),
    ("dpmpp_2m_sde", "stickers_sde", (20, 12, 8)),
    ("second pass, dpmpp_2m", "stickers_second", (8,)),
    ("second pass, dpmpp_2m_sde", "stickers_second_sde", (8,)),
    ("dpmpp_2m, SD 1.5's layout", "stickers_sd15", (20, 8)),
    ("second pass, dpmpp_2m, SD 1.5's layout", "stickers_sd15_second", (8,)),
)
"""What the table of shallow steps shows: words for the sampler, judge, and numbers of steps."""


def _shallow() -> str:
    """Shallow steps against fewer steps in the same work, without merging and with it."""

    def cells(judge: str, steps: int) -> Iterator[str]:
        asked = rows(judge, steps)
        for name, kind in (("shallow 0.6, nothing merged", STEPS), ("fast 0.6", MERGED_STEPS)):
            time, error = points(asked)[name]
            fewer = error_at(time, [*points(asked, (kind,)).values()])
            assert fewer is not None
            yield f"{error:.4f} at {time:.2f}"
            yield f"{fewer:.4f}"
            yield f"{error / fewer:.2f}"

    head = ("Run", "Shallow", "Fewer steps", "Ratio", "*fast*", "Fewer steps, merged", "Ratio")
    body = (
        (f"{steps} steps, {words}", *cells(judge, steps))
        for words, judge, numbers in _ON_STICKERS
        for steps in numbers
    )
    return table(head, body)


def _deep_cache() -> str:
    """Shallow steps against DeepCache, by sampler, number of steps, and interval."""
    found: Any = json.loads((RESULTS / "deep-cache.json").read_text(encoding="utf-8"))
    intervals = ("2", "3", "5")

    def cell(both: Mapping[str, Mapping[str, Any]]) -> str:
        ours, theirs = both["ours"], both["deep_cache"]
        ratios = spread(ours["scenes"], theirs["scenes"])
        return f"{ratios}; {ours['error']:.4f} and {theirs['error']:.4f} at {ours['work']:.2f}"

    body = (
        (f"{steps} steps, {sampler}", *(cell(row[interval]) for interval in intervals))
        for sampler, numbers in found.items()
        for steps, row in numbers.items()
    )
    return table(("Run", *(f"Interval {each}" for each in intervals)), body)


def few_steps(is_short: bool = True) -> str:
    """Forecasts in few steps against the line, fewer steps and the best cache, by run.

    With the error and the evaluations of all scenes together, unless it is short.
    """
    found: Any = json.loads((RESULTS / "few-steps.json").read_text(encoding="utf-8"))

    def cell(run: Mapping[str, Any], name: str | None) -> str:
        if name is None:
            return "none runs as seldom"
        row, fewer = (run["rows"][each] for each in (name, "fewer"))
        ran = statistics.mean(row["evaluations"])
        all_together = "" if is_short else f"{row['error']:.4f} in {ran:.3g}"
        ratios = "" if name == "fewer" else spread(row["scenes"], fewer["scenes"])
        title = f"{name}: " if name == run["cache"] else ""
        return title + "; ".join(filter(None, (all_together, ratios)))

    body = (
        (
            f"*{run['judge']}*" + (f" under {run['sampler']}" if "sampler" in run else ""),
            run["steps"],
            _of_scenes(run["rows"]),
            *(cell(run, name) for name in ("ours", "line", run["cache"])),
            *(() if is_short else (cell(run, "fewer"),)),
        )
        for run in found.values()
    )
    head = ("Judge", "Steps", "Scenes", "Now", "The line", "Best cache", "Fewer steps")
    return table(head[:6] if is_short else head, body)


def _of_scenes(asked: Mapping[str, Any]) -> str:
    """How many scenes there are, and in how many of them a step is forecast."""
    errors = asked["ours"]["scenes"]
    return f"{sum(map(bool, errors))} of {len(errors)}"


def _presets() -> str:
    """Work and change of the presets."""
    unet, transformer = rows("pictures", 12), rows("image", 8)

    def cell(judged: Rows, name: str, paper: str) -> str:
        row = judged[name]
        return f"{row['time']:.2f}, {row['error'] / judged[paper]['error']:.2f}"

    return table(
        ("Preset", "UNet, 12 steps", "Transformer, 8 steps"),
        (
            (
                "*balanced*",
                cell(unet, "balanced 0.6", TOMESD),
                cell(transformer, "fast 0.6", PAPER),
            ),
            ("*fast*", cell(unet, "fast 0.6", TOMESD), "the same"),
            (
                "*paper*, at 0.5",
                cell(unet, TOMESD, TOMESD),
                f"{cell(transformer, PAPER, PAPER)}, when it merged queries there, too",
            ),
        ),
    )


def _compared() -> str:
    """Errors over those of fewer steps and of caches."""

    def shares(judge: str, numbers: Sequence[int], names: Sequence[str], kind: str) -> str:
        if not points(rows(judge, numbers[0]), (kind,)):
            return ""
        found = (_share(judge, steps, name, kind) for steps in numbers for name in names)
        return ", ".join(f"{each:.2f}" for each in found)

    return table(
        ("Model", "Steps", "Over fewer steps", "Over a cache"),
        (
            (
                *(title, ", ".join(map(str, numbers))),
                *(shares(judge, numbers, names, kind) for kind in (STEPS, CACHE)),
            )
            for title, judge, numbers, names in _COMPARED
        ),
    )


def _errors() -> str:
    """The error and the work of everything that a user could pick."""
    columns = (OURS, STEPS, CACHE, MERGING)

    def label(judge: str, name: str) -> str:
        word, _, number = name.rpartition(" ")
        if word in PRESETS:
            return f"*{word}* {number}" if judge == "pictures" else number
        return _SHORT.get(name) or name.removeprefix("EasyCache ").removesuffix(" steps")

    def cells(judge: str, steps: int, names: Sequence[str]) -> Iterator[str]:
        judged = rows(judge, steps)
        for kind in columns:
            told = (
                f"{label(judge, name)}: {row['error']:.4f} at {row['time']:.2f}"
                if row["error"]
                else f"{label(judge, name)} skips nothing"
                for name in names
                if (row := judged[name])["kind"] == kind
            )
            yield "; ".join(told)

    return table(
        ("", "ours", "fewer steps", "EasyCache", "merging by others"),
        (
            (f"*{judge}*, {steps} steps", *cells(judge, steps, names))
            for judge, steps, names in _ERRORS
        ),
    )
