"""Show the results: a table, plots, and one line."""

from pathlib import Path
from typing import Any

from benchmarks.methods import ideal_of

WORTH_SAVING = 0.05
"""Where the ideal saves a smaller share of the time, its efficiency is noise."""


def speed_up(run: dict[str, Any], name: str) -> float:
    """Times faster than unpatched, by medians of one run."""
    rows = run["methods"]
    return rows["unpatched"]["seconds"]["median"] / rows[name]["seconds"]["median"]


def efficiency(run: dict[str, Any], name: str) -> float | None:
    """The share of the ideal's saving that a method saves, None where there is little to save."""
    ideal = ideal_of(name)
    if ideal is None:
        return None
    rows = run["methods"]
    plain, own, best = (rows[each]["seconds"]["median"] for each in ("unpatched", name, ideal))
    return (plain - own) / (plain - best) if plain - best >= WORTH_SAVING * plain else None


def table(run: dict[str, Any]) -> str:
    """One row for each method."""
    head = f"{run['model']}, {run['size']}x{run['size']}, batch {run['batch']}"
    columns = (
        f"{'seconds':>9}{'quartiles':>18}{'times':>7}{'effic.':>8}{'error':>8}{'l./block':>10}"
    )
    lines = [f"\n{head}, ratio {run['ratio']}", f"{'method':22}{columns}"]
    for name, row in run["methods"].items():
        seconds, share = row["seconds"], efficiency(run, name)
        lines.append(
            f"{name:22}{seconds['median']:9.3f}"
            f"{seconds['low']:10.3f}-{seconds['high']:<7.3f}{speed_up(run, name):7.2f}"
            f"{'' if share is None else format(share, '.2f'):>8}{row['error']:8.3f}"
            + (f"{row['launches_per_block']:10.1f}" if "launches_per_block" in row else "")
        )
    stages = ", ".join(f"{stage} {value:.3f}" for stage, value in run["stages_window_attn"].items())
    return "\n".join([*lines, f"seconds by stage, ours window attn: {stages}"])


def summary(result: dict[str, Any]) -> str:
    """The worst case over all runs, with the best scope of ours in each."""
    efficiencies, gains, over_tomesd, over_core, launches = [], [], [], [], []
    for run in result["runs"]:
        own = [name for name in run["methods"] if ideal_of(name)]
        shares = [share for name in own if (share := efficiency(run, name)) is not None]
        if shares:
            efficiencies.append(max(shares))
        best = max(own, key=lambda name: speed_up(run, name))
        gains.append(speed_up(run, best))
        over_tomesd.append(gains[-1] / speed_up(run, "tomesd all"))
        over_core.append(gains[-1] / speed_up(run, "core TomePatchModel"))
        launches.append(run["methods"][best]["launches_per_block"])
    least = f"{min(efficiencies):.2f}" if efficiencies else "none"
    return (
        f"summary: efficiency={least} slope={result['slope']:.2f} "
        f"vs_unpatched={min(gains):.2f} vs_tomesd={min(over_tomesd):.2f} "
        f"vs_core={min(over_core):.2f} launches={max(launches):.1f}"
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """For each model, speed-up against resolution, and against the difference from unpatched."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(run["model"] for run in result["runs"]))
    figure, rows = pyplot.subplots(
        len(models), 2, figsize=(15, 6 * len(models)), squeeze=False, layout="constrained"
    )
    colours = pyplot.colormaps["tab20"]
    for model, (by_size, by_error) in zip(models, rows, strict=True):
        runs = [run for run in result["runs"] if run["model"] == model]
        largest = runs[-1]
        sizes = [run["size"] for run in runs]
        for index, name in enumerate(largest["methods"]):
            gains = [speed_up(run, name) for run in runs]
            style = "--s" if name.startswith("ideal") else "-o"
            by_size.plot(sizes, gains, style, label=name, color=colours(index))
            error = largest["methods"][name]["error"]
            by_error.plot(error, gains[-1], style[-1], color=colours(index))
            by_error.annotate(name, (error, gains[-1]), fontsize=8, rotation=20)
        by_size.set(title=model, xlabel="side of the picture, pixels", xticks=sizes)
        by_size.legend(fontsize=7)
        by_error.set(
            title=f"{model}, {sizes[-1]}x{sizes[-1]}",
            xlabel="difference from the unpatched model, random weights",
        )
        for axes in (by_size, by_error):
            axes.set_ylabel("times faster than unpatched")
            axes.margins(0.15)
            axes.grid(alpha=0.3)
    figure.suptitle(f"{result['command']}, {result['date']}")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
