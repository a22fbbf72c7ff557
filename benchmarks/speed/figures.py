"""Figures derived from measurements, their tables, and the summary line.

This needs only the dictionaries of a results file, so old results can be shown again.
"""

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

Run = Mapping[str, Any]
"""The comparison of one model at one size and batch."""

WEBP: dict[str, Any] = {"quality": 75, "method": 6}
"""How pictures are saved, so that they are small enough for a repository."""

WORTH_SAVING = 0.05
"""If the ideal saves a smaller share of the time, efficiency is mostly noise."""


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def share_of_time(run: Run, name: str) -> float:
    """Time relative to unpatched: the median of the rounds, each by its own unpatched run."""
    rows = run["methods"]
    return _share(rows[name]["seconds"], rows["unpatched"]["seconds"])


def _share(seconds: Sequence[float], plain: Sequence[float]) -> float:
    return median(own / other for own, other in zip(seconds, plain, strict=True))


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


def joined(parts: Sequence[str]) -> str:
    """Paragraphs as a page."""
    return "\n\n".join(part for part in parts if part) + "\n"


def title(run: Run) -> str:
    """For example ``sd15, 512x512, batch 2``."""
    return f"{model_and_size(run)}, batch {run['batch']}"


def model_and_size(run: Run) -> str:
    """For example ``sd15 (first level only), 512x512``."""
    note = f" ({run['note']})" if run["note"] else ""
    return f"{run['model']}{note}, {run['size']}x{run['size']}"


def table(run: Run) -> str:
    """One row for each method, in Markdown that can be read as plain text."""
    head = [
        *("method", "seconds", "quartiles", "times faster", "efficiency"),
        *("error", "peak MB", "merged", "launches"),
    ]
    is_traced = any(row.get("gpu_seconds") for row in run["methods"].values())
    head += ["GPU seconds"] * is_traced
    rows = []
    for name, row in run["methods"].items():
        low, middle, high = spread(row["seconds"])
        share = None if name == row.get("ideal") else efficiency(run, name)
        launches = row.get("launches_per_block")
        on_gpu = row.get("gpu_seconds")
        rows.append(
            [
                name,
                f"{middle:.4g}",
                f"{low:.4g}-{high:.4g}",
                f"{speed_up(run, name):.2f}",
                "" if share is None else f"{share:.2f}",
                f"{row['error']:.3f}",
                f"{row['peak_bytes'] / 1e6:.0f}",
                row.get("merged", ""),
                "" if launches is None else f"{launches:.1f}",
                *(["" if on_gpu is None else f"{on_gpu:.4g}"] * is_traced),
            ]
        )
    return grid(head, rows)


def gain_in_mode(row: Run, name: str, figure: str = "seconds") -> float | None:
    """Times faster than the unpatched model in the same mode of a compiler, if both were measured.

    ``figure`` is ``seconds`` for evaluations, ``gpu_seconds`` for kernels alone.
    """
    way = row["ways"][name]
    plain = row["ways"].get(f"unpatched, {way['mode']}")
    if plain is None or not (way[figure] and plain[figure]):
        return None
    if figure == "gpu_seconds":
        return float(plain[figure] / way[figure])
    return 1 / _share(way[figure], plain[figure])


def table_of_modes(row: Run) -> str:
    """One row for each method in each mode of a compiler."""
    head = ["method", "ms", "quartiles", "times faster", "kernels, ms", "times faster"]
    head += ["error", "merged", "launches", "graphs", "breaks", "recompiles"]
    rows = []
    for name, way in row["ways"].items():
        low, middle, high = spread([1000 * seconds for seconds in way["seconds"]])
        gain, in_kernels = (gain_in_mode(row, name, each) for each in ("seconds", "gpu_seconds"))
        rows.append(
            [
                *(name, f"{middle:.2f}", f"{low:.2f}-{high:.2f}"),
                f"{gain:.2f}" if gain else "",
                f"{1000 * way['gpu_seconds']:.2f}" if way["gpu_seconds"] else "",
                f"{in_kernels:.2f}" if in_kernels else "",
                *(f"{way['error']:.4f}", way["merged"], str(way["launches"])),
                *(str(way.get(figure, "")) for figure in ("graphs", "breaks", "recompiles")),
            ]
        )
    return grid(head, rows)


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column aligned left and the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *padded[1:]]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *map(line, rows)])
