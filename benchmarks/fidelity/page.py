"""Tables, plots and picture strips of the fidelity results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from benchmarks import webp
from benchmarks.speed.figures import grid

matplotlib.use("agg")
from matplotlib import pyplot as plt

TIME = ("time", "quartiles")

PLAIN = "plain"
"""The name of the unpatched model in the results."""

TOMESD, TODO = "tomesd q,k,v 0.5", "ToDo k,v 0.75"
DEFAULT, KV75 = "ours balanced 0.6", "ours k,v 0.75, window 4x2"
FAST, FAST_DEFAULT = "ours fast 0.5", "ours fast 0.6"
PAPER, POOLED = "ours q,k,v 0.5, unweighted", "ours k,v pooled 0.75"
BALANCED75 = "ours balanced 0.75"

IN_SUMMARY = (TOMESD, TODO, DEFAULT, KV75, FAST, PAPER, POOLED, BALANCED75)

JUDGES = {
    "pictures": "Pictures of a UNet",
    "image": "Pictures of a transformer",
    "video": "Videos of a transformer",
}
"""The judges of pictures, by their part of the results."""


def pictures_table(pictures: dict[str, Any], title: str) -> str:
    """Figures of the pictures, and the time of the evaluations of a run."""
    judged = ("error", "psnr", "ssim", "spectrum", "flicker", "distance")
    columns = [column for column in judged if any(column in row for row in pictures.values())]
    rows = [
        [
            name,
            *(f"{row[column]:.4f}" if column in row else "" for column in columns),
            *_time(row),
        ]
        for name, row in pictures.items()
    ]
    return grid([title, *columns, *TIME], rows)


def _time(row: Mapping[str, Any]) -> list[str]:
    low, high = row["quartiles"]
    return [f"{row['time']:.2f}", f"{low:.2f}-{high:.2f}"]


def markdown(result: dict[str, Any], summary: str) -> str:
    """The tables as a page, each with the runs that it comes from."""
    parts = [
        "# Fidelity: `python3 dev.py bench --fidelity`",
        "How to read this: [FIDELITY](../FIDELITY.md).",
        f"`{summary}`",
    ]
    for judge, title in JUDGES.items():
        for name, rows in result.get(judge, {}).items():
            parts += [f"## {title}, {name}", pictures_table(rows, name), *origins(rows)]
    parts.append("![Error against time](fidelity.webp)")
    for judge, title in JUDGES.items():
        parts += [
            f"![{title}, {name}]({sheet_name(judge, name)})" for name in result.get(judge, {})
        ]
    return "\n\n".join(parts) + "\n"


def origins(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where the rows of a table come from, the run of most rows first."""
    runs: dict[str, list[str]] = {}
    for name, row in rows.items():
        origin = row["origin"]
        run = f"`{origin['command']}`, {origin['machine']}, {origin['date']}"
        runs.setdefault(run, []).append(name)
    first, *others = sorted(runs, key=lambda run: -len(runs[run]))
    return [f"{first}.", *(f"Of {', '.join(runs[run])}: {run}." for run in others)]


def sheet_name(judge: str, sampling: str) -> str:
    """The file with the pictures of a sampling."""
    words = sampling.replace(",", "").split()
    return "-".join(["fidelity", judge, *words]) + ".webp"


def strips(pictures: dict[str, Tensor], rows: list[str], path: Path) -> None:
    """Save a row of pictures for each method; the rows without pictures stay as they are.

    Of videos, every other frame of the first two is shown.
    """
    label = 190
    pictures = {
        name: batch if batch.ndim == 4 else batch[:2, :, ::2].transpose(1, 2).flatten(0, 1)
        for name, batch in pictures.items()
    }
    size = next(iter(pictures.values())).shape[-1]
    side = size * max(2, 128 // size)
    count = min(10, len(next(iter(pictures.values()))))
    sheet = Image.new("RGB", (label + count * side, len(rows) * side), "white")
    if len(pictures) < len(rows):
        sheet.paste(Image.open(path))
    draw = ImageDraw.Draw(sheet)
    for name, batch in pictures.items():
        row = rows.index(name)
        draw.rectangle((0, row * side, sheet.width, (row + 1) * side - 1), fill="white")
        draw.text((4, row * side + side // 2), name, fill="black")
        for column, picture in enumerate(batch[:count]):
            pixels = (picture.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
            tile = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
            sheet.paste(tile, (label + column * side, row * side))
    webp.save(sheet, path)


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot error against time for each judge, in its first sampling; the lower left is best."""
    panels: list[tuple[str, dict[str, tuple[float, float]]]] = []
    for judge, title in JUDGES.items():
        for name, rows in list(result.get(judge, {}).items())[:1]:
            points = {
                method: (row["time"], row["error"]) for method, row in rows.items() if row["error"]
            }
            panels.append((f"{title}, {name}", points))
    figure, axes = plt.subplots(1, len(JUDGES), figsize=(22, 7))
    for axis, (title, points) in zip(axes, panels, strict=False):
        unbeaten = front(points)
        axis.plot(*zip(*(points[name] for name in unbeaten), strict=True), color="0.8", zorder=0)
        for name, point in points.items():
            axis.scatter(*point, color="tab:blue" if name.startswith("ours") else "tab:red", s=25)
        axis.set_yscale("log")
        axis.margins(x=0.25, y=0.1)
        axis.set(title=title, xlabel="time, unpatched = 1", ylabel="error against unpatched")
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.tight_layout()
    for axis, (_, points) in zip(axes, panels, strict=False):
        label(axis, points)
    webp.save_figure(figure, path, dpi=110)
    plt.close(figure)


def label(axis: Any, points: dict[str, tuple[float, float]]) -> None:
    """Write the names next to the points, moved up where they would overlap."""
    placed: list[tuple[float, float]] = []
    wide, high = 190, 12
    for name, point in sorted(points.items(), key=lambda item: item[1][1]):
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


def front(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names that no other point beats in both time and error, by time."""
    unbeaten: list[str] = []
    for name in sorted(points, key=lambda name: points[name]):
        if not unbeaten or points[name][1] < points[unbeaten[-1]][1]:
            unbeaten.append(name)
    return unbeaten


def summary(result: dict[str, Any]) -> str:
    """The last line of the run: the worst case over the samplings of a judge."""

    def worst(judge: str, figure: str, name: str, other: str) -> float | None:
        """The largest share that a figure of a method has of another's, if both were judged."""
        shares = [
            rows[name][figure] / rows[other][figure]
            for rows in result.get(judge, {}).values()
            if name in rows and other in rows
        ]
        return max(shares, default=None)

    shares = {
        "image_error_vs_tomesd": worst("pictures", "error", DEFAULT, TOMESD),
        "kv75_error_vs_todo": worst("pictures", "error", KV75, TODO),
        "fast_error_vs_tomesd": worst("pictures", "error", FAST, TOMESD),
        "fast_time": worst("pictures", "time", FAST, PLAIN),
        "dit_fast_error_vs_paper": worst("image", "error", FAST, PAPER),
        "dit_fast_time": worst("image", "time", FAST, PLAIN),
        "video_kv_error_vs_pool": worst("video", "error", BALANCED75, POOLED),
        "video_fast_error_vs_pool": worst("video", "error", FAST, POOLED),
        "video_fast_time": worst("video", "time", FAST, PLAIN),
        "video_flicker": worst("video", "flicker", FAST, POOLED),
    }
    words = (f"{name}={share:.2f}" for name, share in shares.items() if share is not None)
    return " ".join(["summary:", *words])
