"""Draw the pictures of reports from arrays.

Images are ``[height, width, 3]`` uint8. Texts are ASCII: PIL's own font has no other characters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

PAPER = (22, 24, 29)
FAINT = (44, 48, 57)
MUTED = (150, 156, 168)
INK = (238, 240, 244)
WARM = (246, 142, 60)
COOL = (72, 214, 190)
OTHER = (190, 160, 255)

# From 0 to 1: night blue, violet, red, orange, pale yellow.
_RAMP = np.array([(18, 22, 54), (84, 30, 120), (186, 54, 96), WARM, (252, 240, 170)])

_LONG_SIDE = 1024
_MARGIN = 20
_RING = 11
_TITLE, _TEXT, _SMALL = 26, 17, 14

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""


def colours_of(share: np.ndarray) -> np.ndarray:
    """Colours for numbers from 0 to 1: ``[...]`` float becomes ``[..., 3]`` float, 0 to 255."""
    place = np.clip(share, 0, 1) * (len(_RAMP) - 1)
    stops = np.arange(len(_RAMP))
    return np.stack([np.interp(place, stops, channel) for channel in _RAMP.T], axis=-1)


def merged_tokens(slots: np.ndarray) -> np.ndarray:
    """Which tokens share their slot with another: ``[...]`` int becomes ``[...]`` bool."""
    return (np.bincount(slots.ravel()) > 1)[slots]


def merge_map(
    slots: np.ndarray, picture: np.ndarray | None = None, merged: np.ndarray | None = None
) -> np.ndarray:
    """Draw each group of merged tokens in one colour, with its outline.

    Args:
        slots: ``[height, width]`` int, the slot of each token.
        picture: ``[height, width, channels]`` float from 0 to 1, of any size. Each group gets its
            mean colour, and unmerged tokens show the picture itself. Without a picture, groups
            have arbitrary colours, and unmerged tokens are dark.
        merged: ``[height, width]`` bool, which tokens share their slot with another. Needed only
            for a frame of a video, whose tokens may have merged with those of other frames.
    """
    scale = _scale(*slots.shape)
    if merged is None:
        merged = merged_tokens(slots)
    if picture is None:
        colours = np.where(merged[..., None], _palette(slots.max() + 1)[slots], FAINT)
        image = _enlarged(colours, scale)
    else:
        image = _fitted(picture, slots.shape, scale)
        tokens = image.reshape(slots.shape[0], scale, slots.shape[1], scale, 3).mean((1, 3))
        sums = [
            np.bincount(slots.ravel(), channel.ravel()) for channel in tokens.transpose(2, 0, 1)
        ]
        counts = np.maximum(np.bincount(slots.ravel()), 1)
        means = (np.stack(sums, axis=1) / counts[:, None])[slots]
        image = np.where(_enlarged(merged, scale)[..., None], _enlarged(means, scale), image)
    groups = _enlarged(np.where(merged, slots, -1), scale)
    outline = np.zeros(groups.shape, bool)
    outline[1:] |= groups[1:] != groups[:-1]
    outline[:, 1:] |= groups[:, 1:] != groups[:, :-1]
    return np.where(outline[..., None], 0.3 * image, image).round().astype(np.uint8)


def heat_map(share: np.ndarray, picture: np.ndarray | None = None) -> np.ndarray:
    """Draw how often each token merged.

    Args:
        share: ``[height, width]`` float: the share of the steps in which the token merged.
        picture: as for :func:`merge_map`; it shows through in grey.
    """
    scale = _scale(*share.shape)
    image = _enlarged(colours_of(share), scale)
    if picture is not None:
        grey = _fitted(picture, share.shape, scale).mean(2, keepdims=True)
        image = image * (0.65 + 0.35 * grey / 255)
    return image.round().astype(np.uint8)


def captioned(image: np.ndarray, title: str, lines: Sequence[str], key: bool = False) -> np.ndarray:
    """Put a title and lines of text above an image; ``key`` adds the key of a heat map below it."""
    height, width = image.shape[:2]
    texts = [_width(title, _TITLE), *(_width(line, _TEXT) for line in lines), 440 * key]
    total = max(width, *texts) + 2 * _MARGIN
    canvas, draw, top = _headed(total, height + (54 if key else _MARGIN), title, lines)
    canvas.paste(Image.fromarray(image), (_MARGIN, top))
    if key:
        _ramp_key(canvas, draw, (_MARGIN, top + height + 20), "in no step", "in every step")
    return np.asarray(canvas)


def card(title: str, lines: Sequence[str], forecast: Sequence[bool] = ()) -> np.ndarray:
    """A card of text to show instead of a picture; lines that begin with "Hint" are highlighted.

    Args:
        title: the text at the top.
        lines: the text below it.
        forecast: for each step of a run, whether it was forecast; drawn as a row of squares.
    """
    wrapped = [_wrapped(line, _TEXT, 720) for line in lines]
    y = 88 + (90 if forecast else 0)
    height = y + 8 + sum(26 * len(parts) + 10 for parts in wrapped)
    canvas, draw = _canvas(800, height + 20)
    draw.rectangle((0, 0, 8, height + 20), WARM)
    draw.text((40, 32), title, INK, _font(_TITLE))
    if forecast:
        pitch = min(40.0, 720 / len(forecast))
        gap = 4 if pitch > 12 else 1
        for index, is_forecast in enumerate(forecast):
            left = 40 + pitch * index
            place = (left, 88, left + pitch - gap, 128)
            draw.rectangle(place, FAINT if is_forecast else COOL)
        for left, colour, text in ((40, COOL, "the model ran"), (210, FAINT, "forecast")):
            draw.rectangle((left, 142, left + 14, 156), colour)
            draw.text((left + 22, 149), text, MUTED, _font(_SMALL), "lm")
    for parts in wrapped:
        for part in parts:
            draw.text((40, y), part, INK if parts[0].startswith("Hint") else MUTED, _font(_TEXT))
            y += 26
        y += 10
    return np.asarray(canvas)


def chart(
    names: Sequence[str],
    steps: Sequence[int],
    before: np.ndarray,
    after: np.ndarray,
    seconds: np.ndarray | None,
) -> np.ndarray:
    """Chart the tokens before and after merging, and the time, of each block in each step.

    Args:
        names: names of the blocks, one per row.
        steps: numbers of the steps, one per column.
        before: ``[blocks, steps]``, tokens that entered the block; NaN where it did not run.
        after: ``[blocks, steps]``, tokens that the block ran on.
        seconds: ``[blocks, steps]``, None if times could not be measured.
    """
    row = int(np.clip(840 // len(names), 14, 28))
    column = int(np.clip(160 // len(steps), 3, 32))
    size = min(16, row - 1)
    panel = max(column * len(steps), 160)
    sizes = [_sizes_in_words(*pair) for pair in zip(before, after, strict=True)]
    inks = [INK if " to " in size else MUTED for size in sizes]

    kept_x = _MARGIN + max(_width(name, size) for name in names) + 16
    sizes_x = kept_x + panel + 16
    time_x = sizes_x + max(_width(text, size) for text in [*sizes, "tokens"]) + 2 * _MARGIN
    bars_x = time_x + panel + 16
    top = 70
    bottom = top + row * len(names)
    width = time_x - _MARGIN if seconds is None else bars_x + 140
    canvas, draw = _canvas(width, bottom + 60)

    def column_of_texts(x: int, title: str, texts: Sequence[str]) -> None:
        draw.text((x, top - 48), title, INK, _font(_TEXT))
        for index, (text, ink) in enumerate(zip(texts, inks, strict=True)):
            draw.text((x, top + row * index + row // 2 - 1), text, ink, _font(size), "lm")

    def panel_of_cells(x: int, title: str, colours: np.ndarray) -> None:
        draw.text((x, top - 48), title, INK, _font(_TEXT))
        draw.text((x, top - 22), f"step {steps[0]}", MUTED, _font(_SMALL))
        if column * len(steps) > 100:
            end = x + column * len(steps)
            draw.text((end, top - 22), str(steps[-1]), MUTED, _font(_SMALL), "ra")
        cells = colours.round().astype(np.uint8).repeat(row, 0).repeat(column, 1)
        cells[row - 1 :: row] = PAPER
        if column > 5:
            cells[:, column - 1 :: column] = PAPER
        canvas.paste(Image.fromarray(cells), (x, top))

    column_of_texts(_MARGIN, "block", names)
    kept = np.divide(after, before, out=np.full(before.shape, np.nan), where=before > 0)
    panel_of_cells(kept_x, "tokens kept", _kept_colours(kept))
    column_of_texts(sizes_x, "tokens", sizes)
    _kept_key(draw, (kept_x, bottom + 24))
    if seconds is not None:
        most, ran = np.nanmax(seconds), ~np.isnan(seconds)
        means = np.where(ran, seconds, 0).sum(1) / np.maximum(ran.sum(1), 1)
        colours = np.where(ran[..., None], colours_of(np.nan_to_num(seconds) / most), PAPER)
        panel_of_cells(time_x, "time", colours)
        _ramp_key(canvas, draw, (time_x, bottom + 24), "0", f"{_milliseconds(most)} ms")
        draw.text((bars_x, top - 48), "mean, ms", INK, _font(_TEXT))
        for index, (mean, ink) in enumerate(zip(means, inks, strict=True)):
            y = top + row * index
            end = bars_x + round(70 * mean / means.max())
            draw.rectangle((bars_x, y + 3, end, y + row - 5), WARM if ink == INK else MUTED)
            draw.text((end + 8, y + row // 2 - 1), _milliseconds(mean), ink, _font(size), "lm")
    return np.asarray(canvas)


@dataclass(frozen=True)
class Point:
    """A point of :func:`front`.

    Attributes:
        name: the text next to it.
        speed: how many times as fast as the unpatched model.
        change: the change of the picture.
        colour: the colour of its dot.
        is_chosen: whether it gets a ring.
        is_rival: whether it is something that the user could take instead; drawn as a diamond.
    """

    name: str
    speed: float
    change: float
    colour: tuple[int, int, int] = COOL
    is_chosen: bool = False
    is_rival: bool = False


def front(
    title: str,
    lines: Sequence[str],
    points: Sequence[Point],
    speed: float | None = None,
    change: float | None = None,
) -> np.ndarray:
    """Plot settings: speed to the right, change of the picture upwards.

    Args:
        title: the title.
        lines: the text below it.
        points: the settings, and their rivals.
        speed: where to draw a vertical line, None for none.
        change: where to draw a horizontal line, None for none.
    """
    wrapped = [part for line in lines for part in _wrapped(line, _TEXT, 720)]
    canvas, draw, top = _headed(800, 434, title, wrapped)
    left, right, top = 80, 760, top + 24
    bottom = top + 340

    speeds = [1.0, *(point.speed for point in points), *([] if speed is None else [speed])]
    changes = [0.02, *(point.change for point in points), *([] if change is None else [change])]
    across, up = _ticks(min(speeds), max(speeds)), _ticks(0.0, max(changes))

    def place(of_speed: float, of_change: float) -> tuple[float, float]:
        x = left + (right - left) * (of_speed - across[0]) / (across[-1] - across[0])
        return x, bottom - (bottom - top) * (of_change - up[0]) / (up[-1] - up[0])

    for tick in across:
        x, _ = place(tick, 0)
        draw.line((x, top, x, bottom), FAINT)
        draw.text((x, bottom + 12), f"{tick:.3g}", MUTED, _font(_SMALL), "ma")
    for tick in up:
        _, y = place(1, tick)
        draw.line((left, y, right, y), FAINT)
        draw.text((left - 14, y), f"{tick:.3g}", MUTED, _font(_SMALL), "rm")
    draw.text((left, top - 24), "change", INK, _font(_SMALL))
    below = bottom + 44
    draw.text((right, below), "times as fast", INK, _font(_SMALL), "rm")
    if any(point.is_rival for point in points):
        _dot(draw, (left, below), OTHER, is_diamond=True)
        draw.text((left + 16, below), "what you could take instead", MUTED, _font(_SMALL), "lm")
    wishes: list[Box] = []
    if speed is not None:
        x, _ = place(speed, 0)
        wishes += [(x, top, x, bottom)]
    if change is not None:
        _, y = place(1, change)
        wishes += [(left, y, right, y)]
    for line in wishes:
        draw.line(line, INK, 2)
    is_unpatched = not any(point.is_chosen for point in points)
    unpatched = Point("unpatched", 1.0, 0.0, INK, is_unpatched)
    # Names are placed in this order and drawn in reverse: the chosen point gets the best place for
    # its name, and is drawn on top.
    shown = sorted([*points, unpatched], key=lambda point: (not point.is_chosen, point.is_rival))
    places = [place(point.speed, point.change) for point in shown]
    area = left, top - 12, right, bottom + 12
    boxes = _name_boxes([point.name for point in shown], places, wishes, area)
    for point, at, box in reversed([*zip(shown, places, boxes, strict=True)]):
        is_right, middle = box[0] > at[0], (box[1] + box[3]) / 2
        near, far = (box[0], box[2]) if is_right else (box[2], box[0])
        if middle != at[1]:
            draw.line((*at, near, middle), MUTED)
        ink, anchor = INK if point.is_chosen else MUTED, "rm" if is_right else "lm"
        draw.text((far, middle), point.name, ink, _font(_TEXT), anchor)
        _dot(draw, at, point.colour, point.is_rival)
        if point.is_chosen:
            draw.ellipse(_around(at, _RING), outline=INK, width=2)
    return np.asarray(canvas)


def _dot(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    colour: tuple[int, int, int],
    is_diamond: bool = False,
) -> None:
    x, y = at
    if is_diamond:
        draw.polygon((x - 8, y, x, y - 8, x + 8, y, x, y + 8), colour)
    else:
        draw.ellipse(_around(at, 6), colour)


def _around(at: tuple[float, float], radius: int) -> Box:
    x, y = at
    return x - radius, y - radius, x + radius, y + radius


def _name_boxes(
    names: Sequence[str],
    places: Sequence[tuple[float, float]],
    lines: Sequence[Box],
    area: Box,
) -> list[Box]:
    """Place the names of dots next to them, as near as there is room.

    Args:
        names: the names, in the order in which they are placed.
        places: the centres of their dots.
        lines: lines that the names must not cover. They do not cover dots or each other either.
        area: the area that the names must not leave.
    """
    dots = [_around(at, _RING) for at in places]
    boxes: list[Box] = []
    for name, at in zip(names, places, strict=True):
        near = _boxes_near(at, _width(name, _TEXT) + 4)
        free = (
            box
            for box in near
            if _is_within(box, area)
            and not any(_overlaps(box, other) for other in (*lines, *dots, *boxes))
        )
        boxes.append(next(free, near[0]))
    return boxes


def _boxes_near(at: tuple[float, float], width: int) -> list[Box]:
    """Possible places for a name next to a dot, the nearest first."""
    x, y = at
    high, gap = _TEXT + 4, _RING + 1
    return [
        (left, y + shift - high / 2, left + width, y + shift + high / 2)
        for shift in sorted(range(-12 * high, 13 * high, high), key=abs)
        for left in (x + gap, x - gap - width)
    ]


def _is_within(box: Box, area: Box) -> bool:
    return area[0] <= box[0] and area[1] <= box[1] and box[2] <= area[2] and box[3] <= area[3]


def _overlaps(box: Box, other: Box) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def _ticks(least: float, most: float) -> list[float]:
    """Evenly spaced round numbers, from ``least`` or below to above ``most``."""
    rough = (most - least) / 5 or 0.1
    unit = 10 ** np.floor(np.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = np.floor(least / step), np.floor(most / step) + 1
    return [float(step * index) for index in np.arange(first, last + 1)]


def _kept_colours(kept: np.ndarray) -> np.ndarray:
    """Colours for shares of tokens kept: dark if all were kept, brighter the more merged."""
    merged = np.nan_to_num(1 - kept)[..., None]
    bright = 0.1 + 0.9 * merged
    colours = np.where(merged > 0, (1 - bright) * FAINT + bright * COOL, FAINT)
    return np.where(np.isnan(kept)[..., None], PAPER, colours)


def _kept_key(draw: ImageDraw.ImageDraw, corner: tuple[int, int]) -> None:
    x, y = corner
    shares = np.array([1.0, 0.75, 0.5, 0.25])
    for share, colour in zip(shares, _kept_colours(shares).round().astype(int), strict=True):
        text = f"{share:.0%}"
        draw.rectangle((x, y, x + 14, y + 14), tuple(colour))
        draw.text((x + 20, y + 7), text, MUTED, _font(_SMALL), "lm")
        x += 34 + _width(text, _SMALL)


def _ramp_key(
    canvas: Image.Image,
    draw: ImageDraw.ImageDraw,
    corner: tuple[int, int],
    least: str,
    most: str,
) -> None:
    x, y = corner
    length = 130
    draw.text((x, y + 7), least, MUTED, _font(_SMALL), "lm")
    x += _width(least, _SMALL) + 8
    ramp = colours_of(np.linspace(0, 1, length)[None].repeat(14, 0)).round().astype(np.uint8)
    canvas.paste(Image.fromarray(ramp), (x, y))
    draw.text((x + length + 8, y + 7), most, MUTED, _font(_SMALL), "lm")


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def _sizes_in_words(before: np.ndarray, after: np.ndarray) -> str:
    """For example ``4096 to 2048``, or ``4096`` if nothing merged."""
    entered, merged = np.nanmax(before), after[after < before]
    if not merged.size:
        return f"{entered:.0f}"
    least, most = merged.min(), merged.max()
    return f"{entered:.0f} to {least:.0f}" + (f"-{most:.0f}" if most > least else "")


def _palette(count: int) -> np.ndarray:
    """Colours that are easy to tell apart, ``[count, 3]`` float; the golden ratio spaces hues."""
    hue = (np.arange(count) * 0.618034 % 1)[:, None]
    light = (0.62 + 0.3 * (np.arange(count) * 0.754878 % 1))[:, None]
    wheel = np.clip(np.abs((hue * 6 + np.array([[0, 4, 2]])) % 6 - 3) - 1, 0, 1)
    return 255 * light * (1 - 0.55 * (1 - wheel))


def _scale(height: int, width: int) -> int:
    """The side of a token in pixels."""
    return int(np.clip(round(_LONG_SIDE / max(height, width)), 4, 64))


def _enlarged(tokens: np.ndarray, scale: int) -> np.ndarray:
    return tokens.repeat(scale, 0).repeat(scale, 1)


def _fitted(picture: np.ndarray, tokens: tuple[int, ...], scale: int) -> np.ndarray:
    """A picture scaled to the size of a map of tokens, ``[height, width, 3]`` float, 0 to 255."""
    pixels = (np.clip(np.nan_to_num(picture), 0, 1) * 255).round().astype(np.uint8)
    image = Image.fromarray(pixels.squeeze(2) if picture.shape[2] == 1 else pixels)
    size = tokens[1] * scale, tokens[0] * scale
    return np.asarray(image.convert("RGB").resize(size, Image.Resampling.LANCZOS), float)


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    canvas = Image.new("RGB", (width, height), PAPER)
    return canvas, ImageDraw.Draw(canvas)


def _headed(
    width: int, height: int, title: str, lines: Sequence[str]
) -> tuple[Image.Image, ImageDraw.ImageDraw, int]:
    """A canvas with a title and lines of text, and the y below them, where ``height`` is free."""
    top = _MARGIN + 48 + 26 * len(lines)
    canvas, draw = _canvas(width, top + height)
    draw.text((_MARGIN, _MARGIN - 4), title, INK, _font(_TITLE))
    for index, line in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + 38 + 26 * index), line, MUTED, _font(_TEXT))
    return canvas, draw, top


@cache
def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _width(text: str, size: int) -> int:
    return int(_font(size).getlength(text)) + 1


def _wrapped(text: str, size: int, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
