"""Tables, plots and picture strips of the fidelity results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from benchmarks.figures import grid

matplotlib.use("agg")
from matplotlib import pyplot as plt

TIME = ("time", "quartiles")


def features_table(features: dict[str, Any]) -> str:
    """Errors of attention and of the block by noise level, and the time of the block."""
    levels = list(next(iter(features.values()))["errors"])
    columns = [(place, level) for place in ("attention", "block") for level in levels]
    rows = [
        [
            name,
            *(
                f"{row['errors'][level][place]:.4f}" if place in row["errors"][level] else ""
                for place, level in columns
            ),
            *_time(row),
        ]
        for name, row in features.items()
    ]
    return grid(["one block", *(f"{place} {level}" for place, level in columns), *TIME], rows)


def pictures_table(pictures: dict[str, Any], title: str = "pictures") -> str:
    """Figures of the pictures, and the time of the evaluations of a run."""
    judged = ("error", "psnr", "ssim", "spectrum", "distance")
    columns = [column for column in judged if column in next(iter(pictures.values()))]
    rows = [
        [name, *(f"{row[column]:.4f}" for column in columns), *_time(row)]
        for name, row in pictures.items()
    ]
    return grid([title, *columns, *TIME], rows)


def _time(row: Mapping[str, Any]) -> list[str]:
    low, high = row["quartiles"]
    return [f"{row['time']:.2f}", f"{low:.2f}-{high:.2f}"]


def markdown(result: dict[str, Any], summary: str) -> str:
    """The tables as a page."""
    parts = [
        f"# fidelity: `{result['command']}`",
        f"{result['machine']}, {result['date']}. How to read this: [FIDELITY](../FIDELITY.md).",
        f"`{summary}`",
        *(
            f"Taken again later, with `{each['command']}` on {each['machine']}, {each['date']}: "
            f"{', '.join(each['methods'])}."
            for each in result.get("later", [])
        ),
    ]
    if "features" in result:
        parts.append(features_table(result["features"]))
    if "pictures" in result:
        parts.append(pictures_table(result["pictures"]))
    for sampling, figures in result.get("image", {}).items():
        parts.append(pictures_table(figures, f"transformer, {sampling}"))
    parts.append("![Error against time](fidelity.png)")
    if "pictures" in result:
        parts.append("![Pictures of every method](fidelity-strips.png)")
    for sampling in result.get("image", {}):
        parts.append(
            f"![Pictures of the transformer, {sampling}](fidelity-image-{sampling.split()[0]}.png)"
        )
    return "\n\n".join(parts) + "\n"


def strips(pictures: dict[str, Tensor], rows: list[str], path: Path) -> None:
    """Save a row of pictures for each method; the rows without pictures stay as they are."""
    scale, label = 2, 190
    side = scale * next(iter(pictures.values())).shape[-1]
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
    sheet.save(path)


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot error against time for both judges; the lower left is best."""
    figure, axes = plt.subplots(1, 2, figsize=(15, 6.5))
    panels: list[tuple[Any, str, dict[str, tuple[float, float]]]] = []
    axes = list(axes)
    if "features" in result:
        middle = list(next(iter(result["features"].values()))["errors"])[1]
        points = {
            name: (row["time"], row["errors"][middle]["block"])
            for name, row in result["features"].items()
        }
        panels.append((axes[len(panels)], f"update of one block, noise {middle}", points))
    if "pictures" in result:
        points = {
            name: (row["time"], row["error"])
            for name, row in result["pictures"].items()
            if name != "plain"
        }
        panels.append((axes[len(panels)], "pictures of the trained denoiser", points))
    for axis, title, points in panels:
        front = _front(points)
        axis.plot(*zip(*(points[name] for name in front), strict=True), color="0.8", zorder=0)
        for name, point in points.items():
            axis.scatter(*point, color="tab:blue" if name.startswith("ours") else "tab:red", s=25)
        axis.set_yscale("log")
        axis.margins(x=0.25, y=0.1)
        axis.set(title=title, xlabel="time, unpatched = 1", ylabel="error against unpatched")
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.tight_layout()
    for axis, _, points in panels:
        _label(axis, points)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _label(axis: Any, points: dict[str, tuple[float, float]]) -> None:
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


def _front(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names that no other point beats in both time and error, by time."""
    front: list[str] = []
    for name in sorted(points, key=lambda name: points[name]):
        if not front or points[name][1] < points[front[-1]][1]:
            front.append(name)
    return front


def summary(
    result: dict[str, Any],
    default: str,
    kv75: str,
    tomesd: str,
    todo: str,
    fast: str,
    paper: str,
    speed_up: float,
) -> str:
    """The last line of the run: the worst case over noise levels, samplings and judges.

    Args:
        result: of the run.
        default: the name of the preset that is the default.
        kv75: of three quarters of the keys and values merged.
        tomesd: of the reference implementation.
        todo: of ToDo.
        fast: of preset *fast*.
        paper: of the paper's method on transformers.
        speed_up: of preset *fast* on transformers.
    """
    words = []
    features, pictures = result.get("features", {}), result.get("pictures", {})
    images = result.get("image", {}).values()

    def attention(name: str, other: str) -> float:
        return max(
            features[name]["errors"][level]["attention"]
            / features[other]["errors"][level]["attention"]
            for level in features[name]["errors"]
        )

    def picture(name: str, other: str) -> float:
        return pictures[name]["error"] / pictures[other]["error"]

    if features:
        words.append(f"attn_error_vs_tomesd={attention(default, tomesd):.2f}")
    if pictures:
        words.append(f"image_error_vs_tomesd={picture(default, tomesd):.2f}")
    against_todo = ([attention(kv75, todo)] if features else []) + (
        [picture(kv75, todo)] if pictures else []
    )
    words.append(f"kv75_error_vs_todo={max(against_todo):.2f}")
    if fast in pictures:
        words.append(f"fast_error_vs_tomesd={picture(fast, tomesd):.2f}")
        words.append(f"fast_time={pictures[fast]['time']:.2f}")
    if images:
        worst = max(figures[fast]["error"] / figures[paper]["error"] for figures in images)
        words.append(f"dit_fast_speedup={speed_up:.2f} dit_fast_error_vs_paper={worst:.2f}")
    if "bias" in result:
        words.append(f"bias_cost={max(result['bias'].values()):.3f}")
    return "summary: " + " ".join(words)
