"""Plots of a results file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import webp
from benchmarks.figures import Run, speed_up

LOOKS = {
    "unpatched": {"color": "black", "marker": "x"},
    "ideal": {"color": "0.55", "marker": "s"},
    "peer": {"color": "tab:blue", "marker": "^"},
    "ours": {"color": "tab:red", "marker": "o"},
}
"""The style of each family of methods."""


def draw(result: dict[str, Any], path: Path) -> None:
    """For each model and batch, plot speed-up against resolution, and against the error."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[tuple[str, int], list[Run]] = {}
    for run in result["runs"]:
        groups.setdefault((run["model"], run["batch"]), []).append(run)
    figure, rows = pyplot.subplots(
        len(groups), 2, figsize=(17, 6.5 * len(groups)), squeeze=False, layout="constrained"
    )
    for ((model, batch), runs), (by_size, by_error) in zip(groups.items(), rows, strict=True):
        runs = sorted(runs, key=lambda run: run["size"])
        note = f" ({runs[0]['note']})" if runs[0]["note"] else ""
        size = runs[-1]["size"]
        if len(runs) > 1:
            _lines(by_size, runs)
            by_size.set_title(f"{model}{note}, batch {batch}: speed-up by resolution")
        else:
            _bars(by_size, runs[0])
            by_size.set_title(f"{model}{note}, {size}x{size}, batch {batch}: speed-up")
        _fidelity(by_error, runs[-1])
        by_error.set_title(f"{model}, {size}x{size}, batch {batch}: speed-up by fidelity")
    machine = result["machine"]["description"]
    figure.suptitle(f"{result['command']}\n{machine}, {result['date']}, ratio {result['ratio']}")
    webp.save_figure(figure, path, dpi=90)
    pyplot.close(figure)


def pareto(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names of the (error, speed-up) points that no other beats in both, by rising error."""
    front: list[str] = []
    for name in sorted(points, key=lambda each: (points[each][0], -points[each][1])):
        if not front or points[name][1] > points[front[-1]][1]:
            front.append(name)
    return front


def spaced(values: Sequence[float], step: float) -> list[float]:
    """The rising ``values``, moved as little as possible to be at least ``step`` apart."""
    # After subtracting the steps, values that rise too slowly are those that fall: each falling run
    # moves to its mean.
    runs: list[tuple[float, int]] = []
    for index, value in enumerate(values):
        mean, count = value - index * step, 1
        while runs and runs[-1][0] >= mean:
            other, others = runs.pop()
            mean = (mean * count + other * others) / (count + others)
            count += others
        runs.append((mean, count))
    means = [mean for mean, count in runs for _ in range(count)]
    return [mean + index * step for index, mean in enumerate(means)]


def _lines(axes: Any, runs: list[Run]) -> None:
    """Plot speed-up over the side of the picture."""
    names = list(dict.fromkeys(name for run in runs for name in run["methods"]))
    ends = {}
    for name in names:
        own = [run for run in runs if name in run["methods"]]
        look = LOOKS[own[0]["methods"][name]["family"]]
        dashes = "--" if look is LOOKS["ideal"] else "-"
        sizes, gains = [run["size"] for run in own], [speed_up(run, name) for run in own]
        axes.plot(sizes, gains, dashes, **look, markersize=5, linewidth=1.3)
        if own[-1] is runs[-1]:
            ends[name] = (sizes[-1], gains[-1], look["color"])
    axes.set(xlabel="side of the picture, pixels", xticks=[run["size"] for run in runs])
    _finish(axes, ends)


def _bars(axes: Any, run: Run) -> None:
    """Plot speed-up at the only size that was measured."""
    names = sorted(run["methods"], key=lambda name: speed_up(run, name))
    gains = [speed_up(run, name) for name in names]
    colours = [LOOKS[run["methods"][name]["family"]]["color"] for name in names]
    bars = axes.barh(names, gains, color=colours, height=0.7)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xlabel=f"times faster than unpatched at {run['size']}x{run['size']}")
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)


def _fidelity(axes: Any, run: Run) -> None:
    """Plot speed-up over error, and mark the front of the methods that can be used."""
    rows = run["methods"]
    points = {name: (row["error"], speed_up(run, name)) for name, row in rows.items()}
    front = pareto({name: at for name, at in points.items() if rows[name]["family"] != "ideal"})
    axes.step(
        *zip(*(points[name] for name in front), strict=True),
        where="post",
        color="tab:red",
        alpha=0.25,
        linewidth=6,
        solid_joinstyle="round",
        label="best speed-up for an error",
    )
    ends = {}
    for name, (error, gain) in points.items():
        family = rows[name]["family"]
        axes.plot(error, gain, linestyle="", **LOOKS[family], markersize=8)
        ends[name] = (error, gain, LOOKS[family]["color"])
    for family in dict.fromkeys(row["family"] for row in rows.values()):
        axes.plot([], [], linestyle="", **LOOKS[family], label=family)
    axes.set(xlabel="relative difference from the unpatched model (random weights: a proxy)")
    axes.legend(loc="upper left", fontsize=9)
    _finish(axes, ends, bold=front)


def _finish(
    axes: Any, ends: dict[str, tuple[float, float, str]], bold: list[str] | None = None
) -> None:
    """Name the points in a column on the right, one per line."""
    axes.set_ylabel("times faster than unpatched")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.margins(0.06)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    low, high = axes.get_ylim()
    step = (high - low) / 26
    names = sorted(ends, key=lambda name: ends[name][1])
    heights = spaced([ends[name][1] for name in names], step)
    to_axes = axes.transData + axes.transAxes.inverted()
    for name, height in zip(names, heights, strict=True):
        x, y, colour = ends[name]
        axes.annotate(
            f"{name}  {y:.2f}",
            (x, y),
            xytext=(1.02, to_axes.transform((x, height))[1]),
            textcoords=axes.transAxes,
            va="center",
            fontsize=9,
            color=colour,
            weight="bold" if name in (bold or ()) else "normal",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.4, "linewidth": 0.8},
        )
