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
    """Speed-up against resolution, and against the difference from the unpatched model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_size, by_error) = pyplot.subplots(1, 2, figsize=(15, 6), layout="constrained")
    last = result["runs"][-1]
    colours = pyplot.colormaps["tab20"]
    for index, name in enumerate(last["methods"]):
        runs = [run for run in result["runs"] if run["model"] == last["model"]]
        by_size.plot(
            [run["size"] for run in runs],
            [speed_up(run, name) for run in runs],
            "--" if name.startswith("ideal") else "-o",
            label=name,
            color=colours(index),
        )
        if not name.startswith("ideal"):
            by_error.plot(
                last["methods"][name]["error"], speed_up(last, name), "o", color=colours(index)
            )
            by_error.annotate(
                name, (last["methods"][name]["error"], speed_up(last, name)), fontsize=8
            )
    by_size.set(xlabel="side of the picture, pixels", ylabel="times faster than unpatched")
    by_size.set_title(last["model"])
    by_size.legend(fontsize=7)
    by_error.set(
        xlabel="difference from the unpatched model, random weights",
        ylabel="times faster than unpatched",
        title=f"{last['model']}, {last['size']}x{last['size']}",
    )
    for axes in (by_size, by_error):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{result['command']}, {result['date']}")
    figure.savefig(path, dpi=90)
