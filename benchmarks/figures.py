"""Figures derived from measurements, tables of them, and the summary line.

Needs only the dictionaries of a results file, so old results can be shown again.
"""

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

Run = Mapping[str, Any]
"""The comparison of one model at one size and batch."""

LINEAR = ("window",)
"""The strategies whose matching should grow with the number of tokens, not its square."""

WORTH_SAVING = 0.05
"""If the ideal saves a smaller share of the time, efficiency is mostly noise."""


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def share_of_time(run: Run, name: str) -> float:
    """Time relative to unpatched: the median over the rounds, each by its own unpatched run."""
    rows = run["methods"]
    pairs = zip(rows[name]["seconds"], rows["unpatched"]["seconds"], strict=True)
    return median(own / plain for own, plain in pairs)


def speed_up(run: Run, name: str) -> float:
    """Times faster than unpatched."""
    return 1 / share_of_time(run, name)


def efficiency(run: Run, name: str) -> float | None:
    """The share of its ideal's saving that a method reaches; None if there is little to save."""
    ideal = run["methods"][name].get("ideal")
    if ideal not in run["methods"]:
        return None
    saved = 1 - share_of_time(run, ideal)
    return (1 - share_of_time(run, name)) / saved if saved >= WORTH_SAVING else None


def best_of_ours(run: Run) -> str | None:
    """Our fastest method among those that have an ideal."""
    own = [
        name
        for name, row in run["methods"].items()
        if row["family"] == "ours" and row.get("ideal") in run["methods"]
    ]
    return min(own, key=lambda name: share_of_time(run, name), default=None)


def summary(result: dict[str, Any]) -> str:
    """The worst case over all runs, with our best scope in each; ``none`` if not measured."""
    worst: dict[str, list[float | None]] = {
        name: [] for name in ("efficiency", "vs_unpatched", "vs_tomesd", "vs_core", "launches")
    }
    for run in result["runs"]:
        best = best_of_ours(run)
        if best is None:
            continue
        gain = speed_up(run, best)
        peers = {name: speed_up(run, name) for name in run["methods"] if _is_peer(run, name)}
        tomesd = [value for name, value in peers.items() if name.startswith("tomesd")]
        core = [value for name, value in peers.items() if name.startswith("core")]
        worst["efficiency"].append(efficiency(run, best))
        worst["vs_unpatched"].append(gain)
        worst["vs_tomesd"].append(gain / max(tomesd) if tomesd else None)
        worst["vs_core"].append(gain / max(core) if core else None)
        worst["launches"].append(run["methods"][best].get("launches_per_block"))

    def shown(name: str, choose: Any, digits: int) -> str:
        values = [value for value in worst[name] if value is not None]
        return f"{name}={choose(values):.{digits}f}" if values else f"{name}=none"

    slopes = [result["slopes"][name] for name in LINEAR if name in result["slopes"]]
    return " ".join(
        [
            "summary:",
            shown("efficiency", min, 2),
            f"slope={max(slopes):.2f}" if slopes else "slope=none",
            shown("vs_unpatched", min, 2),
            shown("vs_tomesd", min, 2),
            shown("vs_core", min, 2),
            shown("launches", max, 1),
        ]
    )


def _is_peer(run: Run, name: str) -> bool:
    return run["methods"][name]["family"] == "peer"


def title(run: Run) -> str:
    """For example ``sd15, 512x512, batch 2``."""
    note = f" ({run['note']})" if run["note"] else ""
    return f"{run['model']}{note}, {run['size']}x{run['size']}, batch {run['batch']}"


def table(run: Run) -> str:
    """One row for each method, in Markdown that is readable as plain text."""
    head = [
        *("method", "seconds", "quartiles", "times faster", "by FLOPs", "efficiency"),
        *("error", "peak MB", "merged", "launches"),
    ]
    rows = []
    for name, row in run["methods"].items():
        low, middle, high = spread(row["seconds"])
        share = None if name == row.get("ideal") else efficiency(run, name)
        foretold = run["forecast"].get(row.get("ideal"))
        launches = row.get("launches_per_block")
        rows.append(
            [
                name,
                f"{middle:.4g}",
                f"{low:.4g}-{high:.4g}",
                f"{speed_up(run, name):.2f}",
                "" if foretold is None else f"{foretold:.2f}",
                "" if share is None else f"{share:.2f}",
                f"{row['error']:.3f}",
                f"{row['peak_bytes'] / 1e6:.0f}",
                row.get("merged", ""),
                "" if launches is None else f"{launches:.1f}",
            ]
        )
    return grid(head, rows)


def stage_table(run: Run) -> str:
    """The stages of an evaluation, one row for each method for which they were timed."""
    split = {name: row["stages"] for name, row in run["methods"].items() if "stages" in row}
    head = ["seconds in", *next(iter(split.values()), {})]
    rows = [[name, *(f"{value:.4f}" for value in each.values())] for name, each in split.items()]
    return grid(head, rows) if rows else ""


def forecast_table(forecasts: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """The speed-ups that FLOPs allow, by model, size and ideal."""
    names = list(
        dict.fromkeys(n for model in forecasts.values() for at in model.values() for n in at)
    )
    rows = [
        [f"{model} {size}x{size}", *(f"{at[name]:.2f}" for name in names)]
        for model, sizes in forecasts.items()
        for size, at in sizes.items()
    ]
    return grid(["times fewer FLOPs", *names], rows)


def slope_table(result: dict[str, Any]) -> str:
    """Milliseconds of matching, a merge and an unmerge, by tokens."""
    times = result["matching_seconds"]
    tokens = list(next(iter(times.values()), {}))
    rows = [
        [name, *(f"{values[each] * 1000:.2f}" for each in tokens), f"{result['slopes'][name]:.2f}"]
        for name, values in times.items()
    ]
    return grid(["ms at tokens", *tokens, "slope"], rows) if rows else ""


def markdown(result: dict[str, Any], picture: str) -> str:
    """A results file as a readable page."""
    machine = result["machine"]
    parts = [
        f"# {result['name']}: `{result['command']}`",
        f"{machine['description']}, {result['date']}; torch {machine['torch']}. Ratio "
        f"{result['ratio']}. How to read this: [README](../README.md).",
        f"`{summary(result)}`",
        slope_table(result),
    ]
    for run in result["runs"]:
        rounds = f"{run['dtype']}, timed rounds: {run['repeats']}."
        refused = "".join(f"\n\nNot timed: {name}: {why}" for name, why in run["refused"].items())
        parts += [f"## {title(run)}", rounds + refused, table(run), stage_table(run)]
    parts += [f"Left out: {why}" for why in result["left_out"]]
    parts.append(f"![Speed-up by resolution and by fidelity]({picture})" if result["runs"] else "")
    return "\n\n".join(part for part in parts if part) + "\n"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column aligned left and the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *padded[1:]]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *map(line, rows)])
