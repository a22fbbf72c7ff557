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

_LONG_SIDE = 1024
_WIDTH = 760
"""The least width of a page between its margins."""
_MARGIN = 20
_TITLE, _TEXT, _SMALL = 26, 17, 14
_BAR = 210
"""The length of the longest bar of a column."""


def merge_map(slots: np.ndarray, picture: np.ndarray | None = None, frame: int = 0) -> np.ndarray:
    """Draw every group of merged tokens in one colour, with its outline.

    Args:
        slots: ``[frames, height, width]`` int, the slot of each token.
        picture: ``[height, width, channels]`` float from 0 to 1, of any size. A group gets its
            mean colour, and unmerged tokens show the picture itself. Without a picture, groups
            have arbitrary colours, and unmerged tokens are dark.
        frame: which frame to draw, from 0. Its tokens may have merged with those of other frames.
    """
    merged = (np.bincount(slots.ravel()) > 1)[slots[frame]]
    slots = slots[frame]
    scale = int(np.clip(round(_LONG_SIDE / max(slots.shape)), 4, 64))
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


def steps(is_skipped: Sequence[bool], ran: str, skipped: str) -> np.ndarray:
    """Draw the steps of a run as a row of squares, with skipped ones in another colour.

    The texts ``ran`` and ``skipped`` say below what the two colours mean.
    """
    canvas, draw = _canvas(_WIDTH, 69)
    pitch = min(40.0, _WIDTH / len(is_skipped))
    gap = 4 if pitch > 12 else 1
    for index, is_short in enumerate(is_skipped):
        place = (pitch * index, 0, pitch * (index + 1) - gap, 40)
        draw.rectangle(place, FAINT if is_short else COOL)
    for left, colour, text in ((0, COOL, ran), (170, FAINT, skipped)):
        draw.rectangle((left, 54, left + 14, 68), colour)
        draw.text((left + 22, 61), text, MUTED, _font(_SMALL), "lm")
    return np.asarray(canvas)


def stacked(*pictures: np.ndarray) -> np.ndarray:
    """Pictures below each other."""
    width = max(picture.shape[1] for picture in pictures)
    height = sum(picture.shape[0] + _MARGIN for picture in pictures) - _MARGIN
    canvas, _ = _canvas(width, height)
    top = 0
    for picture in pictures:
        canvas.paste(Image.fromarray(picture), (0, top))
        top += picture.shape[0] + _MARGIN
    return np.asarray(canvas)


@dataclass(frozen=True)
class Column:
    """A column of :func:`bars`.

    Attributes:
        title: the text above it.
        values: the lengths of the bars, none negative.
        texts: the texts before the bars.
        line: the value at which to draw a line down the column, None for none.
    """

    title: str
    values: Sequence[float]
    texts: Sequence[str]
    line: float | None = None


def bars(names: Sequence[str], columns: Sequence[Column], is_lit: Sequence[bool]) -> np.ndarray:
    """Draw rows with a bar in every column; ``is_lit`` says which rows stand out."""
    row = int(np.clip(840 // len(names), 14, 28))
    size = min(16, row - 1)
    starts, width = [], max(_width(name, size) for name in names)
    for column in columns:
        starts.append(width + 2 * _MARGIN + max(_width(text, size) for text in column.texts) + 10)
        width = starts[-1] + _BAR
    tops = [30 + row * index for index in range(len(names))]
    canvas, draw = _canvas(width + 1, tops[-1] + row)
    for name, y, lit in zip(names, tops, is_lit, strict=True):
        draw.text((0, y + row / 2), name, INK if lit else MUTED, _font(size), "lm")
    for column, x in zip(columns, starts, strict=True):
        draw.text((x, 0), column.title, INK, _font(_TEXT))
        most = max(*column.values, column.line or 0) or 1
        for value, text, y, lit in zip(column.values, column.texts, tops, is_lit, strict=True):
            end = x + round(_BAR * value / most)
            draw.rectangle((x, y + 3, end, y + row - 4), WARM if lit else COOL)
            draw.text((x - 10, y + row / 2), text, INK if lit else MUTED, _font(size), "rm")
        if column.line is not None:
            place = x + round(_BAR * column.line / most)
            draw.line((place, tops[0], place, tops[-1] + row), INK, 2)
    return np.asarray(canvas)


def page(title: str, lines: Sequence[str], picture: np.ndarray | None = None) -> np.ndarray:
    """A page: a title, lines of text, and perhaps a picture below them.

    Lines that begin with "Hint" are highlighted.
    """
    height, width = (0, _WIDTH) if picture is None else picture.shape[:2]
    width = max(width, _WIDTH)
    wrapped = [_wrapped(line, width) for line in lines]
    top = _MARGIN + 48 + sum(26 * len(parts) + 8 for parts in wrapped)
    canvas, draw = _canvas(width + 2 * _MARGIN, top + height + _MARGIN)
    draw.text((_MARGIN, _MARGIN - 4), title, INK, _font(_TITLE))
    y = _MARGIN + 38
    for parts in wrapped:
        for part in parts:
            colour = INK if parts[0].startswith("Hint") else MUTED
            draw.text((_MARGIN, y), part, colour, _font(_TEXT))
            y += 26
        y += 8
    if picture is not None:
        canvas.paste(Image.fromarray(picture), (_MARGIN, top))
    return np.asarray(canvas)


def _palette(count: int) -> np.ndarray:
    """Colours that are easy to tell apart, ``[count, 3]`` float; the golden ratio spaces hues."""
    hue = (np.arange(count) * 0.618034 % 1)[:, None]
    light = (0.62 + 0.3 * (np.arange(count) * 0.754878 % 1))[:, None]
    wheel = np.clip(np.abs((hue * 6 + np.array([[0, 4, 2]])) % 6 - 3) - 1, 0, 1)
    return 255 * light * (1 - 0.55 * (1 - wheel))


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


@cache
def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _width(text: str, size: int) -> int:
    return int(_font(size).getlength(text)) + 1


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _width(longer, _TEXT) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
