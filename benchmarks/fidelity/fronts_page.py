"""Tables and pictures of error against time, and the line that says what wins."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks import webp
from benchmarks.fidelity.page import front, label, origins
from benchmarks.speed.figures import grid

matplotlib.use("agg")
from matplotlib import pyplot as plt

Rows = Mapping[str, Mapping[str, Any]]
Point = tuple[float, float]

COLOURS = {
    "fewer steps": "black",
    "cache": "tab:orange",
    "forecast": "tab:purple",
    "lower resolution": "tab:brown",
    "merging": "tab:red",
    "ours": "tab:blue",
    "ours and another": "tab:cyan",
}


def markdown(
    result: Mapping[str, Any], titles: Mapping[str, str], calibration: str, summary: str
) -> str:
    """The calibration, then a table and a picture for each judge."""
    parts = [
        "# What to pick: `python3 dev.py bench --fronts`",
        "How to read this: [FIDELITY](../FIDELITY.md). Points that nothing beats are marked.",
        f"`{summary}`",
        "## Published, and on the judges",
        calibration,
    ]
    for judge, counts in result.items():
        parts.append(f"## {titles[judge]}")
        for steps, rows in counts.items():
            parts += [table(rows, f"{steps} steps"), *origins(rows)]
        parts.append(f"![Error against time](fronts-{judge}.webp)")
    return "\n\n".join(parts) + "\n"


def table(rows: Rows, title: str) -> str:
    """The figures of everything to pick, by time."""
    unbeaten = front(points(rows))
    columns = ("error", "error against many", "psnr", "ssim", "spectrum")
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


def points(rows: Rows, kinds: Sequence[str] = tuple(COLOURS)) -> dict[str, Point]:
    """Time and error of the rows of some kinds that save time."""
    return {
        name: (row["time"], row["error"])
        for name, row in rows.items()
        if row["kind"] in kinds and row["time"] < 0.999 and row["error"] > 0
    }


def plot(counts: Mapping[str, Any], title: str, path: Path) -> None:
    """Plot error against time for each step count; the lower left is best."""
    figure, axes = plt.subplots(1, len(counts), figsize=(10 * len(counts), 8), squeeze=False)
    for axis, (steps, rows) in zip(axes[0], counts.items(), strict=True):
        shown = points(rows)
        unbeaten = front(shown)
        axis.plot(*zip(*(shown[name] for name in unbeaten), strict=True), color="0.8", zorder=0)
        for kind, colour in COLOURS.items():
            of_kind = points(rows, (kind,)).values()
            if of_kind:
                axis.scatter(*zip(*of_kind, strict=True), color=colour, s=25, label=kind)
        axis.set_yscale("log")
        axis.margins(x=0.25, y=0.1)
        axis.set(title=f"{title}, {steps} steps", xlabel="time, unpatched = 1", ylabel="error")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    for axis, rows in zip(axes[0], counts.values(), strict=True):
        label(axis, points(rows))
    webp.save_figure(figure, path, dpi=110)
    plt.close(figure)


def error_at(time: float, rivals: Sequence[Point]) -> float | None:
    """The error of the best rivals at a time, on straight lines between them; None without any.

    The plain run, at a time of 1, has none. Below the shortest time it is that of the fastest.
    """
    unbeaten: list[Point] = []
    for point in sorted(rivals):
        if not unbeaten or point[1] < unbeaten[-1][1]:
            unbeaten.append(point)
    if not unbeaten:
        return None
    if time <= unbeaten[0][0]:
        return unbeaten[0][1]
    ends = [*unbeaten, (1.0, 0.0)]
    for (left, high), (right, low) in pairwise(ends):
        if time <= right:
            return high + (low - high) * (time - left) / (right - left)
    return None


def summary(result: Mapping[str, Any]) -> str:
    """Error of our best preset over that of fewer steps and of caches at its time.

    Of several step counts it is the worst; a figure below 1 says that merging is the better pick.
    """
    words = []
    for rival, kind in (("fewer_steps", "fewer steps"), ("cache", "cache")):
        for judge, counts in result.items():
            shares = [best_share(rows, kind) for rows in counts.values()]
            known = [share for share in shares if share is not None]
            if known:
                words.append(f"vs_{rival}_{judge}={max(known):.2f}")
    return " ".join(["summary:", *words])


def best_share(rows: Rows, kind: str) -> float | None:
    """Error of our best preset over that of a kind of rivals at its time; None without rivals."""
    rivals = [*points(rows, (kind,)).values()]
    shares = [
        error / other
        for time, error in points(rows, ("ours",)).values()
        if (other := error_at(time, rivals))
    ]
    return min(shares, default=None)
