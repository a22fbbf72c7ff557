"""The page of the table of forecasts, and its last line."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from benchmarks.forecasts.cells import ASIDE, FORECAST, MOST, NONE, NOTHING, SEEDS, Cell, Graph
from benchmarks.forecasts.subjects import TRAINED_FLOW
from benchmarks.speed.figures import grid, joined

Rows = Sequence[tuple[Graph, Cell]]

_WORST = 25
"""How many of the worst cells are shown."""

_INTRODUCTION = f"""\
Each cell is a graph of ComfyUI's nodes without ours, with ours, and without ours in as many steps
as ours evaluated, or the next fewer. The number is the change of the result by ours over the
largest that is allowed: {MOST} times the change by fewer steps, or {NOTHING}. Samplers that add
noise have the mean of {len(SEEDS)} seeds. Where nothing was forecast, the result equals the
graph without ours bit for bit, and the log says why. [FIDELITY](../FIDELITY.md) says more."""


def summary(rows: Rows) -> str:
    """The last line, with the worst cell."""
    verdicts = Counter(cell.verdict for _, cell in rows)
    counts = {"cells": len(rows), **{name: verdicts[name] for name in (FORECAST, ASIDE, NONE)}}
    over = sum(cell.ratio > 1 for _, cell in rows)
    words = " ".join(f"{name.replace(' ', '_')}={count}" for name, count in counts.items())
    graph, worst = max(rows, key=lambda row: row[1].ratio)
    return f"summary: {words} over={over} worst={worst.ratio:.2f} ({graph.in_words()})"


def markdown(taken: Mapping[str, Any], summary: str, rows: Rows) -> str:
    """The page.

    Args:
        taken: where the figures come from.
        summary: the last line.
        rows: all graphs and cells.
    """
    exact = [(graph, cell) for graph, cell in rows if graph.on != TRAINED_FLOW]
    worst = sorted(rows, key=lambda row: -row[1].ratio)[:_WORST]
    return joined(
        [
            "# Forecasts against fewer steps: `python3 dev.py bench --forecasts`",
            f"`{taken['command']}`, ComfyUI {taken['host']}, {taken['machine']['description']}, "
            f"{taken['date']}.",
            _INTRODUCTION,
            f"`{summary}`",
            "## By situation",
            _by("situation", exact, lambda graph: graph.situation),
            "## By sampler",
            _by("sampler", exact, lambda graph: graph.sampler),
            "## By the other values",
            _by("steps", exact, lambda graph: graph.steps),
            _by("guidance", exact, lambda graph: f"{graph.guidance:g}"),
            _by("negative prompt", exact, lambda graph: "a prompt" if graph.negative else "none"),
            _by("scheduler", exact, lambda graph: graph.scheduler),
            _by("shift", exact, lambda graph: f"{graph.shift:g}"),
            "## The worst cells",
            _cells(worst),
            f"## On the {TRAINED_FLOW}",
            _cells([row for row in rows if row[0].on == TRAINED_FLOW]),
            "## Why nothing was forecast",
            _whys(rows, ASIDE),
            "## What cannot run without ours either",
            _whys(rows, NONE),
        ]
    )


def _by(name: str, rows: Rows, value: Callable[[Graph], Hashable]) -> str:
    """A table with a line for each value."""
    lines = []
    for row in dict.fromkeys(value(graph) for graph, _ in rows):
        own = [(graph, cell) for graph, cell in rows if value(graph) == row]
        verdicts = Counter(cell.verdict for _, cell in own)
        graph, worst = max(own, key=lambda row: row[1].ratio)
        counts = [str(verdicts[verdict]) for verdict in (FORECAST, ASIDE, NONE)]
        where = graph.in_words() if verdicts[FORECAST] else ""
        lines.append([str(row), *counts, f"{worst.ratio:.2f}" if where else "", where])
    return grid([name, FORECAST, ASIDE, NONE, "worst", "where"], lines)


def _whys(rows: Rows, verdict: str) -> str:
    """A table with a line for each reason of a verdict."""
    counts = Counter(cell.why for _, cell in rows if cell.verdict == verdict)
    return grid(["cells", "reason"], [[str(count), why] for why, count in counts.most_common()])


def _cells(rows: Rows) -> str:
    """A table with a line for each cell."""
    lines = [
        [
            graph.in_words(),
            f"{cell.ours} of {cell.evaluated}",
            f"{cell.change:.4f}",
            f"{cell.change_by_fewer:.4f} in {cell.fewer}" if cell.verdict == FORECAST else cell.why,
            f"{cell.ratio:.2f}",
        ]
        for graph, cell in rows
    ]
    return grid(["graph", "steps evaluated", "change", "by fewer steps", "over the limit"], lines)
