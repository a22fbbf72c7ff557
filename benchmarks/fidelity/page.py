"""Tables, plots and pictures of the fidelity results, and their summary line."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from benchmarks.fidelity.shares import (
    CACHE,
    FORECAST,
    MERGED_STEPS,
    MERGING,
    OURS,
    PAPER,
    SIZE,
    STEPS,
    TODO,
    TOMESD,
    Point,
    Rows,
    best_share,
    front,
    points,
)
from benchmarks.speed.figures import WEBP, grid, joined

matplotlib.use("agg")
from matplotlib import pyplot as plt

JUDGES = {
    "pictures": "Pictures of a UNet, guidance 2",
    "pictures_7": "The same, guidance 7",
    "hires": "Second passes of the UNet at 128x128 tokens, denoise 0.5, guidance 3",
    "hires_7": "The same, guidance 7",
    "stickers": "Stickers of a UNet whose outer level is thin, guidance 5",
    "stickers_euler": "The same, sampled by euler",
    "stickers_sde": "The same, sampled by dpmpp_2m_sde",
    "stickers_second": "Second passes of the same UNet, denoise 0.5, sampled by dpmpp_2m",
    "stickers_second_sde": "The same passes, sampled by dpmpp_2m_sde",
    "stickers_sd15": "Stickers of a UNet with SD 1.5's layout, guidance 5",
    "stickers_sd15_second": "Second passes of the same UNet, denoise 0.5, sampled by dpmpp_2m",
    "image": "Pictures of a transformer, with guidance",
    "few": "The same distilled to four steps, without guidance",
    "few_multistep": "The distilled transformer, sampled by res_multistep",
    "second": "Second passes of a transformer over pictures scaled up",
    "video": "Videos of a transformer",
    "video_multistep": "Videos of a transformer, sampled by res_multistep",
    "edit": "Edits with two references, of a transformer without guidance",
}
"""The judges by name, with the titles of their tables."""
SHOWN = "pictures", "hires", "image", "few", "second", "video", "edit"
"""Judges whose pictures are shown. The others use the model of one of these in another way, or were
asked only a few questions."""
TRAINED_FIRST = "stickers_sd15", "stickers_sd15_second"
"""Judges whose models have to be trained first."""
_OF_UNETS = {
    "A UNet, 20 steps, guidance 2": ("pictures", "20"),
    "The same, guidance 7": ("pictures_7", "20"),
    "Second pass at 128x128 tokens, 8 steps, guidance 3": ("hires", "8"),
    "The same pass, guidance 7": ("hires_7", "8"),
}
"""The panels of the plot of UNets: judges and numbers of steps."""

COLOURS = {
    STEPS: "black",
    MERGED_STEPS: "tab:green",
    CACHE: "tab:orange",
    FORECAST: "tab:purple",
    SIZE: "tab:brown",
    MERGING: "tab:red",
    OURS: "tab:blue",
}
"""The kinds of options, with their colours in plots."""

PLAIN = "plain"
"""The name of the unpatched model in the results."""
KEYS75 = "k,v 0.75, window 4x2"
DEFAULT = "balanced 0.6"
FAST, FAST_DEFAULT = "fast 0.5", "fast 0.6"
CACHED = "EasyCache 0.2"
QUICK = TOMESD, DEFAULT, FAST_DEFAULT, CACHED
"""The rows of a quick run, besides fewer steps."""
ON_SHEET = (
    *(PLAIN, "6 steps", "3 steps", CACHED, "forecast"),
    *(TOMESD, TODO, PAPER, DEFAULT, FAST, FAST_DEFAULT),
)
"""The rows whose pictures are shown."""


def markdown(result: Mapping[str, Mapping[str, Rows]], summary: str) -> str:
    """Tables and pictures for each judge.

    Args:
        result: rows by judge and number of steps.
        summary: the last line.
    """
    parts = [
        "# How much each choice changes the picture: `python3 dev.py bench --fidelity`",
        "How to read this: [FIDELITY](../FIDELITY.md). What nothing beats in both error and time "
        "is in bold.",
        f"`{summary}`",
    ]
    for judge in filter(result.get, JUDGES):
        parts.append(f"## {JUDGES[judge]}")
        for steps, rows in result[judge].items():
            parts += [table(rows, f"{steps} steps"), *origins(rows)]
        if panels(result, judge):
            parts.append(f"![Error against time]({plot_name(judge)})")
        if judge in SHOWN:
            steps = next(iter(result[judge]))
            parts.append(f"![The pictures, in {steps} steps]({sheet_name(judge)})")
    return joined(parts)


def plot_name(judge: str) -> str:
    """The file with the plot of a judge."""
    return f"fidelity-{judge}.webp"


def sheet_name(judge: str) -> str:
    """The file with pictures of a judge."""
    return f"fidelity-{judge}-pictures.webp"


def panels(result: Mapping[str, Mapping[str, Rows]], judge: str) -> dict[str, Rows]:
    """The rows that the plot of a judge shows, by title; none if it has no plot."""
    if judge not in SHOWN or judge == "hires":
        return {}
    own = {f"{JUDGES[judge]}, {steps} steps": (judge, steps) for steps in result[judge]}
    picked = _OF_UNETS if judge == "pictures" else own
    return {
        title: result[name][steps]
        for title, (name, steps) in picked.items()
        if steps in result.get(name, {})
    }


def table(rows: Rows, title: str) -> str:
    """The figures of every option, by time."""
    unbeaten = front(points(rows))
    judged = "error", "ssim", "lpips", "flicker"
    columns = [column for column in judged if any(column in row for row in rows.values())]
    ordered = sorted(rows, key=lambda name: (-rows[name]["time"], rows[name]["error"]))
    lines = [
        [
            f"**{name}**" if name in unbeaten else name,
            rows[name]["kind"],
            f"{rows[name]['time']:.2f}",
            str(rows[name]["evaluations"]),
            *(f"{rows[name][column]:.4f}" if column in rows[name] else "" for column in columns),
        ]
        for name in ordered
    ]
    return grid([title, "kind", "time", "evaluations", *columns], lines)


def origins(rows: Rows) -> list[str]:
    """Where the rows of a table come from, starting with the run that made most of them."""
    runs: dict[str, list[str]] = {}
    for name, row in rows.items():
        origin = row["origin"]
        run = f"`{origin['command']}`, {origin['machine']}, {origin['date']}"
        runs.setdefault(run, []).append(name)
    first, *others = sorted(runs, key=lambda run: -len(runs[run]))
    return [f"{first}.", *(f"Of {', '.join(runs[run])}: {run}." for run in others)]


def sheet(pictures: Mapping[str, Tensor], path: Path) -> None:
    """Save a row of pictures for each of :data:`ON_SHEET` that was painted.

    For videos, every other frame of the first two is shown.
    """
    shown = {
        name: batch if batch.ndim == 4 else batch[:2, :, ::2].transpose(1, 2).flatten(0, 1)
        for name in ON_SHEET
        if (batch := pictures.get(name)) is not None
    }
    first = next(iter(shown.values()))
    label, side, count = 190, max(128, first.shape[-1]), min(10, len(first))
    drawn = Image.new("RGB", (label + count * side, len(shown) * side), "white")
    draw = ImageDraw.Draw(drawn)
    for row, (name, batch) in enumerate(shown.items()):
        draw.text((4, row * side + side // 2), name, fill="black")
        for column, picture in enumerate(batch[:count]):
            pixels = (picture.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
            tile = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
            drawn.paste(tile, (label + column * side, row * side))
    drawn.save(path, **WEBP)


def plot(shown_in: Mapping[str, Rows], path: Path) -> None:
    """Plot error against time, with a panel for each title; the lower left is best."""
    high = 2 if len(shown_in) > 3 else 1
    wide = -(-len(shown_in) // high)
    figure, grid_of_axes = plt.subplots(high, wide, figsize=(10 * wide, 8 * high), squeeze=False)
    axes = [*grid_of_axes.flat]
    for axis, (title, rows) in zip(axes, shown_in.items(), strict=True):
        shown = points(rows)
        unbeaten = front(shown)
        axis.plot(*zip(*(shown[name] for name in unbeaten), strict=True), color="0.8", zorder=0)
        for kind, colour in COLOURS.items():
            of_kind = points(rows, (kind,)).values()
            if of_kind:
                axis.scatter(*zip(*of_kind, strict=True), color=colour, s=25, label=kind)
        axis.set_yscale("log")
        axis.margins(x=0.25, y=0.1)
        axis.set(title=title, xlabel="time, unpatched = 1", ylabel="error")
        axis.grid(alpha=0.3)
        axis.legend(loc="best", fontsize=8)
    figure.tight_layout()
    for axis, rows in zip(axes, shown_in.values(), strict=True):
        label(axis, points(rows))
    figure.savefig(path, dpi=110, pil_kwargs=WEBP)
    plt.close(figure)


def label(axis: Any, shown: Mapping[str, Point]) -> None:
    """Write the names next to the points, moved up to avoid overlaps."""
    placed: list[Point] = []
    wide, high = 190, 12
    for name, point in sorted(shown.items(), key=lambda item: item[1][1]):
        x, y = axis.transData.transform(point)
        at = y - high / 2
        for other_x, other_y in sorted(placed, key=lambda place: place[1]):
            if abs(x - other_x) < wide and abs(at - other_y) < high:
                at = other_y + high
        placed.append((x, at))
        axis.annotate(
            name,
            point,
            fontsize=7,
            xytext=(8, (at - y) * 72 / axis.figure.dpi),
            textcoords="offset points",
            arrowprops={"arrowstyle": "-", "color": "0.7", "lw": 0.5},
        )


def summary(result: Mapping[str, Mapping[str, Rows]]) -> str:
    """The last line of the run: the worst case over the numbers of steps of each judge.

    ``vs_fewer_steps`` and ``vs_cache`` are the error of our best preset over the error of these in
    the same time, ``vs_tomesd`` the error of *fast* over tomesd's. Below 1, ours is better.
    """
    rivals: Mapping[str, Callable[[Rows], float | None]] = {
        "fewer_steps": partial(best_share, kind=STEPS),
        "cache": partial(best_share, kind=CACHE),
        "tomesd": _over_tomesd,
    }
    words = ["summary:"]
    for (rival, share_of), judge in product(rivals.items(), JUDGES):
        known = [share_of(rows) for rows in result.get(judge, {}).values()]
        shares = [share for share in known if share is not None]
        if shares:
            words.append(f"vs_{rival}_{judge}={max(shares):.2f}")
    return " ".join(words)


def _over_tomesd(rows: Rows) -> float | None:
    if FAST_DEFAULT not in rows or TOMESD not in rows:
        return None
    return float(rows[FAST_DEFAULT]["error"] / rows[TOMESD]["error"])
