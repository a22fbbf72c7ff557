"""Figures derived from measurements, their table, and the summary line.

This needs only the dictionaries of a results file, so old results can be shown again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

Row = Mapping[str, Any]
"""What was measured of a method: ``seconds``, a list with the time of each round.

A round is an evaluation or a whole run. Further figures, if they were measured:
``gpu_seconds``: the seconds of kernels alone in an evaluation.
``launches``: the kernels that an evaluation launches.
``peak_bytes``: the most bytes in tensors.
``merged``: the blocks that merged, such as ``5/16``.
``error``: the norm of the difference from the first method's output, over the norm of that output.
``graphs``, ``breaks``, ``recompiles``: the compiler's graphs in the first evaluations, breaks of
graphs, and graphs made later.
"""

Comparison = Mapping[str, Any]
"""A ``case``, in words, and its ``rows``, by the name of the method.

A name may end with a comma and a mode: ``fast, CUDA graphs`` is compared with ``unpatched, CUDA
graphs``, and ``fast`` with ``unpatched``.
"""

WEBP: dict[str, Any] = {"quality": 75, "method": 6}
"""How pictures are saved, so that they are small enough for a repository."""

PRESETS = ("balanced", "fast")
"""The methods in the summary."""


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def times_faster(rows: Mapping[str, Row], name: str, figure: str = "seconds") -> float | None:
    """Times faster than unpatched in the same mode, None if both were not measured.

    For ``seconds``, this is the median over the rounds, each compared with the unpatched time of
    the same round.
    """
    row, plain = rows[name], rows.get(_unpatched(name), {})
    own, other = row.get(figure), plain.get(figure)
    if not (own and other):
        return None
    if figure != "seconds":
        return float(other / own)
    return 1 / median(each / before for each, before in zip(own, other, strict=True))


def _unpatched(name: str) -> str:
    _, comma, mode = name.partition(",")
    return f"unpatched{comma}{mode}"


def gains(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Times faster with presets, for the summary line."""
    found: dict[str, float] = {}
    for comparison in comparisons:
        for name in comparison["rows"]:
            gain = times_faster(comparison["rows"], name)
            if name.partition(",")[0] in PRESETS and gain is not None:
                words = f"{comparison['case']} {name}".lower().replace(",", "")
                found[words.replace(" ", "_")] = gain
    return found


def table(comparison: Comparison) -> str:
    """A table with a line for each method, and a column for each figure that any method has."""
    rows: Mapping[str, Row] = comparison["rows"]

    def told(text: str, figure: str, unit: float = 1) -> Callable[[str], str]:
        def cell(name: str) -> str:
            value = rows[name].get(figure)
            if value is None:
                return ""
            return str(value) if isinstance(value, str) else text.format(value * unit)

        return cell

    def gain(figure: str) -> Callable[[str], str]:
        def cell(name: str) -> str:
            value = times_faster(rows, name, figure)
            return "" if value is None else f"{value:.2f}"

        return cell

    def quartiles(name: str) -> Iterator[float]:
        low, _, high = spread(rows[name]["seconds"])
        yield from (1000 * low, 1000 * high)

    columns: Mapping[str, Callable[[str], str]] = {
        "method": lambda name: name,
        "ms": lambda name: f"{1000 * median(rows[name]['seconds']):.2f}",
        "quartiles": lambda name: "{:.2f} to {:.2f}".format(*quartiles(name)),
        "times faster": gain("seconds"),
        "kernels, ms": told("{:.2f}", "gpu_seconds", 1000),
        "times faster in kernels": gain("gpu_seconds"),
        "error": told("{:.4f}", "error"),
        "peak MB": told("{:.0f}", "peak_bytes", 1e-6),
        "merged": told("", "merged"),
        **{each: told("{}", each) for each in ("launches", "graphs", "breaks", "recompiles")},
    }
    filled = {head: [cell(name) for name in rows] for head, cell in columns.items()}
    filled = {head: cells for head, cells in filled.items() if any(cells)}
    return grid([*filled], [*zip(*filled.values(), strict=True)])


def joined(parts: Sequence[str]) -> str:
    """Paragraphs as a page."""
    return "\n\n".join(part for part in parts if part) + "\n"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column aligned left and the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *padded[1:]]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *map(line, rows)])
