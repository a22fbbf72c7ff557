"""The first page's plot: how much pictures change, by the work that is left. Standard library only.

It is an SVG without a background, in colours that can be read on a light page and on a dark one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from benchmarks.fidelity.shares import Point, Rows, points

_WIDTH, _WIDE, _HIGH = 700, 285, 180
_LEFT, _TOP, _ACROSS, _DOWN = 34, 58, 71, 72
_INK, _FAINT = "#76808d", "#76808d55"


@dataclass(frozen=True)
class Series:
    """Rows that are drawn alike.

    Attributes:
        title: how the legend calls them.
        rows: a pattern of their names.
        colour: of their points.
        mark: a character whose shape is that of the points.
        is_line: whether a line joins them.
    """

    title: str
    rows: str
    colour: str
    mark: str
    is_line: bool = False


SERIES = (
    Series("fast", r"fast [\d.]+", "#f0761f", "●", is_line=True),
    Series("balanced", r"balanced [\d.]+", "#f0761f", "○", is_line=True),
    Series("fewer steps", r"\d+ steps", "#3d8bfd", "■", is_line=True),
    Series("DeepCache", r"DeepCache \d+", "#a371f7", "▲", is_line=True),
    Series("EasyCache", r"EasyCache [\d.]+", "#2da160", "▼", is_line=True),
    Series("tomesd", r"tomesd .*", "#e5484d", "◆"),
    Series("ToDo", r"ToDo .*", "#b8860b", "✚"),
)
"""What is shown, as the legend has it."""


def plot(panels: Sequence[tuple[str, Rows]]) -> str:
    """An SVG of panels, two in a row, each with its title and the rows that it shows."""
    high = _TOP + -(-len(panels) // 2) * (_HIGH + _DOWN) - 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {high}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{_INK}">',
        *_legend(),
    ]
    for index, (title, rows) in enumerate(panels):
        down, across = divmod(index, 2)
        x, y = _LEFT + across * (_WIDE + _ACROSS), _TOP + down * (_HIGH + _DOWN)
        parts += [f'<g transform="translate({x} {y})">', *_panel(title, rows), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    x = float(_LEFT)
    for series in SERIES:
        yield _mark(series, x, 14)
        yield _text(series.title, x + 10, 18, anchor="start")
        x += 42 + 6.8 * len(series.title)


def _panel(title: str, rows: Rows) -> Iterator[str]:
    shown = {series: [*_sorted(series, rows)] for series in SERIES}
    errors = [error for _, error in chain.from_iterable(shown.values())]
    least, most = math.log(min(errors) / 1.4), math.log(max(errors) * 1.4)

    def place(point: Point) -> Point:
        time, error = point
        return time * _WIDE, _HIGH * (most - math.log(error)) / (most - least)

    yield _text(title, _WIDE / 2, -10, weight="600")
    yield f'<path d="M0 0V{_HIGH}H{_WIDE}" fill="none" stroke="{_INK}"/>'
    for share, label in ((0.25, "¼"), (0.5, "½"), (0.75, "¾"), (1.0, "all")):
        yield f'<path d="M{share * _WIDE:g} 0V{_HIGH}" stroke="{_FAINT}"/>'
        yield _text(label, share * _WIDE, _HIGH + 16)
    yield _text("← less work", 0, _HIGH + 34, anchor="start")
    yield _text("← changes the picture less", -12, _HIGH, anchor="start", turn=-90)
    for series, found in shown.items():
        places = [place(point) for point in found]
        if series.is_line and len(places) > 1:
            line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            yield f'<path d="M{line}" fill="none" stroke="{series.colour}" stroke-width="1.5"/>'
        yield from (_mark(series, *each) for each in places)


def _sorted(series: Series, rows: Rows) -> Iterator[Point]:
    """The points of the rows of a series, by the work that is left."""
    yield from sorted(
        point for name, point in points(rows).items() if re.fullmatch(series.rows, name)
    )


_SHAPES = {
    "●": '<circle r="5"',
    "○": '<circle r="4.5" fill-opacity="0" stroke-width="2"',
    "■": '<rect x="-3.5" y="-3.5" width="7" height="7"',
    "▲": '<path d="M0 -6L5.5 4H-5.5Z"',
    "▼": '<path d="M0 6L5.5 -4H-5.5Z"',
    "◆": '<path d="M0 -6.5L6 0L0 6.5L-6 0Z"',
    "✚": '<path d="M-2 -6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z"',
}


def _mark(series: Series, x: float, y: float) -> str:
    colour = f'fill="{series.colour}" stroke="{series.colour}"'
    return f'{_SHAPES[series.mark]} {colour} transform="translate({x:.1f} {y:.1f})"/>'


def _text(
    text: str, x: float, y: float, *, anchor: str = "middle", weight: str = "", turn: int = 0
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    place = f'transform="translate({x:g} {y:g}) rotate({turn})"' if turn else f'x="{x:g}" y="{y:g}"'
    return f'<text {place} text-anchor="{anchor}"{bold}>{text}</text>'
