"""Pictures of what merged: arrays in, images out.

An image is ``[height, width, 3]`` uint8. The fonts that come with PIL know ASCII only.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

PAPER = (22, 24, 29)
FAINT = (44, 48, 57)
MUTED = (150, 156, 168)
INK = (238, 240, 244)

# From nothing to everything: night blue, violet, red, orange, pale yellow.
_RAMP = np.array([(18, 22, 54), (84, 30, 120), (186, 54, 96), (246, 142, 60), (252, 240, 170)])

_LONG_SIDE = 1024
_MARGIN = 20


def colours_of(share: np.ndarray) -> np.ndarray:
    """Colours for numbers from 0 to 1: ``[...]`` float to ``[..., 3]`` float, 0 to 255."""
    place = np.clip(share, 0, 1) * (len(_RAMP) - 1)
    stops = np.arange(len(_RAMP))
    return np.stack([np.interp(place, stops, channel) for channel in _RAMP.T], axis=-1)


def merge_map(slots: np.ndarray, picture: np.ndarray | None = None) -> np.ndarray:
    """Each group of merged tokens in one colour, with its outline.

    Args:
        slots: ``[height, width]`` int, the slot of each token.
        picture: ``[height, width, 3]`` float from 0 to 1, of any size. Groups then have the mean
            of its colours, and tokens that merged with no other show it as it is. Without it,
            groups are told apart by colours of no meaning, and other tokens are dark.
    """
    scale = _scale(*slots.shape)
    sizes = np.bincount(slots.ravel())
    merged = (sizes > 1)[slots]
    if picture is None:
        image = _enlarged(np.where(merged[..., None], _palette(len(sizes))[slots], FAINT), scale)
    else:
        image = _fitted(picture, slots.shape, scale)
        tokens = image.reshape(slots.shape[0], scale, slots.shape[1], scale, 3).mean((1, 3))
        sums = [
            np.bincount(slots.ravel(), channel.ravel()) for channel in np.moveaxis(tokens, 2, 0)
        ]
        means = (np.stack(sums, axis=1) / np.maximum(sizes, 1)[:, None])[slots]
        image = np.where(_enlarged(merged, scale)[..., None], _enlarged(means, scale), image)
    return _with_outlines(image, slots, merged, scale).round().astype(np.uint8)


def heat_map(share: np.ndarray, picture: np.ndarray | None = None) -> np.ndarray:
    """How often each place was merged.

    Args:
        share: ``[height, width]`` float from 0, never, to 1, in every step.
        picture: as for :func:`merge_map`; it shines through in grey.
    """
    scale = _scale(*share.shape)
    image = _enlarged(colours_of(share), scale)
    if picture is not None:
        grey = _fitted(picture, share.shape, scale).mean(2, keepdims=True)
        image = 0.7 * image + 0.3 * grey
    return image.round().astype(np.uint8)


def captioned(
    image: np.ndarray, title: str, lines: Sequence[str], scale: bool = False
) -> np.ndarray:
    """An image with a title and lines of text above it; with ``scale``, the key of a heat map."""
    height, width = image.shape[:2]
    top = _MARGIN + 34 + 24 * len(lines) + 14
    bottom = 58 if scale else _MARGIN
    least = max(_width(title, 24), *(_width(line, 16) for line in lines), 420 if scale else 0)
    total = max(width, int(least) + 1) + 2 * _MARGIN
    canvas, draw = _canvas(total, top + height + bottom)
    draw.text((_MARGIN, _MARGIN), title, INK, _font(24))
    for index, line in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + 36 + 24 * index), line, MUTED, _font(16))
    canvas.paste(Image.fromarray(image), ((total - width) // 2, top))
    if scale:
        _draw_key(canvas, draw, (_MARGIN, top + height + 20), 240, "in no step", "in every step")
    return np.asarray(canvas)


def message(title: str, lines: Sequence[str]) -> np.ndarray:
    """A card of text, where there is nothing else to show."""
    texts = [part for line in lines for part in _wrapped(line, 18, 720)]
    canvas, draw = _canvas(800, 110 + 28 * len(texts))
    draw.text((40, 36), title, INK, _font(26))
    for index, text in enumerate(texts):
        draw.text((40, 80 + 28 * index), text, MUTED, _font(18))
    return np.asarray(canvas)


def chart(
    names: Sequence[str],
    steps: Sequence[int],
    before: np.ndarray,
    after: np.ndarray,
    seconds: np.ndarray | None,
) -> np.ndarray:
    """What each block did in each step: tokens before and after, and the time it took.

    Args:
        names: of the blocks, one a row.
        steps: numbers of the steps, one a column.
        before: ``[blocks, steps]``, tokens that entered; NaN where a block did not run.
        after: the same, tokens that it ran on.
        seconds: the same, None where they could not be measured.
    """
    row = int(np.clip(840 // max(1, len(names)), 13, 28))
    column = int(np.clip(320 // max(1, len(steps)), 3, 44))
    font = min(16, row - 1)
    labels = int(max(_width(name, font) for name in names)) + 12
    panel = column * len(steps)
    sizes = [_sizes_in_words(*pair) for pair in zip(before, after, strict=True)]
    notes = int(max(_width("tokens", 16), *(_width(size, font) for size in sizes))) + 2 * _MARGIN
    left = _MARGIN + labels
    second = left + max(panel, 150) + notes
    width = second + (0 if seconds is None else max(panel, 150) + 220)
    top, bottom = 74, 76
    canvas, draw = _canvas(width + _MARGIN, top + row * len(names) + bottom)

    kept = np.divide(after, before, out=np.full(before.shape, np.nan), where=before > 0)
    _draw_panel(draw, (left, top), kept_colours(kept), row, column, "tokens kept", steps)
    draw.text((left + max(panel, 150) + 12, top - 46), "tokens", INK, _font(16))
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        y = top + row * index + row // 2
        draw.text((_MARGIN, y), name, INK if " to " in size else MUTED, _font(font), "lm")
        place = left + max(panel, 150) + 12, y
        draw.text(place, size, INK if " to " in size else MUTED, _font(font), "lm")
    key_y = top + row * len(names) + 34
    _draw_kept_key(draw, (left, key_y))

    if seconds is not None:
        most = np.nanmax(seconds)
        colours = colours_of(seconds / most)
        colours[np.isnan(seconds)] = PAPER
        _draw_panel(draw, (second, top), colours, row, column, "time", steps)
        bars = second + max(panel, 150) + 16
        draw.text((bars, top - 46), "mean, ms", INK, _font(16))
        means = np.nanmean(seconds, axis=1)
        for index, mean in enumerate(means):
            y = top + row * index
            length = round(110 * mean / means.max())
            merged = " to " in sizes[index]
            draw.rectangle(
                (bars, y + 3, bars + length, y + row - 4), (246, 142, 60) if merged else MUTED
            )
            text = f"{1000 * mean:.3g}"
            draw.text((bars + length + 8, y + row // 2), text, INK, _font(font), "lm")
        _draw_key(canvas, draw, (second, key_y), 110, "0", f"{1000 * most:.3g} ms")
    return np.asarray(canvas)


def kept_colours(kept: np.ndarray) -> np.ndarray:
    """Colours for the share of tokens kept: dark where all are, brighter the more merged."""
    merged = np.nan_to_num(1 - kept)[..., None]
    dim, bright = np.array(FAINT, float), np.array((72, 214, 190), float)
    colours = np.where(merged > 0, dim + (bright - dim) * (0.25 + 0.75 * merged), dim)
    return np.where(np.isnan(kept)[..., None], PAPER, colours)


def _draw_panel(draw, corner, colours, row, column, title, steps) -> None:
    left, top = corner
    draw.text((left, top - 46), title, INK, _font(16))
    gap = 1 if column > 5 else 0
    for y, line in enumerate(colours.round().astype(int)):
        for x, colour in enumerate(line):
            at = left + column * x, top + row * y
            end = at[0] + column - 1 - gap, at[1] + row - 2
            draw.rectangle((*at, *end), tuple(colour))
    first = f"step {steps[0]}"
    draw.text((left, top - 22), first, MUTED, _font(14))
    last_x = left + column * len(steps)
    if len(steps) > 1 and last_x - left > _width(first, 14) + _width(str(steps[-1]), 14) + 10:
        draw.text((last_x, top - 22), str(steps[-1]), MUTED, _font(14), "ra")


def _draw_kept_key(draw, corner) -> None:
    x, y = corner
    for share, text in ((1.0, "all"), (0.75, "75 %"), (0.5, "50 %"), (0.25, "25 %")):
        (colour,) = kept_colours(np.array([share])).round().astype(int)
        draw.rectangle((x, y, x + 14, y + 14), tuple(colour))
        draw.text((x + 20, y + 7), text, MUTED, _font(14), "lm")
        x += 34 + int(_width(text, 14))


def _draw_key(canvas, draw, corner, length: int, least: str, most: str) -> None:
    x, y = corner
    draw.text((x, y + 7), least, MUTED, _font(14), "lm")
    x += int(_width(least, 14)) + 10
    ramp = colours_of(np.linspace(0, 1, length)[None].repeat(14, 0)).round().astype(np.uint8)
    canvas.paste(Image.fromarray(ramp), (x, y))
    draw.text((x + length + 10, y + 7), most, MUTED, _font(14), "lm")


def _sizes_in_words(before: np.ndarray, after: np.ndarray) -> str:
    ran = ~np.isnan(before)
    if not ran.any():
        return "-"
    entered, merged = before[ran].max(), after[ran & (after < before)]
    if not merged.size:
        return f"{entered:.0f}"
    least, most = merged.min(), merged.max()
    return f"{entered:.0f} to {least:.0f}" + (f"-{most:.0f}" if most > least else "")


def _with_outlines(
    image: np.ndarray, slots: np.ndarray, merged: np.ndarray, scale: int
) -> np.ndarray:
    """Darken the pixels along the border of a group."""
    thickness = 1 if scale < 14 else 2
    outline = np.zeros(image.shape[:2], bool)
    for axis in (0, 1):
        ahead = [slice(None), slice(None)]
        behind = [slice(None), slice(None)]
        ahead[axis], behind[axis] = slice(1, None), slice(None, -1)
        ahead, behind = tuple(ahead), tuple(behind)
        border = (slots[ahead] != slots[behind]) & (merged[ahead] | merged[behind])
        pixels = _enlarged(border, scale)
        for offset in range(thickness):
            line = (np.arange(pixels.shape[axis]) % scale) == offset
            shifted = np.zeros_like(outline)
            target = [slice(None), slice(None)]
            target[axis] = slice(scale, None)
            shape = (-1, 1) if axis == 0 else (1, -1)
            shifted[tuple(target)] = pixels & line.reshape(shape)
            outline |= shifted
    return np.where(outline[..., None], 0.25 * image, image)


def _palette(count: int) -> np.ndarray:
    """Colours that are told apart, ``[count, 3]`` float: hues in the golden ratio."""
    hue = (np.arange(count) * 0.618034 % 1)[:, None]
    light = (0.62 + 0.3 * (np.arange(count) * 0.754878 % 1))[:, None]
    wheel = np.clip(np.abs((hue * 6 + np.array([[0, 4, 2]])) % 6 - 3) - 1, 0, 1)
    return 255 * light * (1 - 0.55 * (1 - wheel))


def _scale(height: int, width: int) -> int:
    """How many pixels wide to show a token."""
    return int(np.clip(round(_LONG_SIDE / max(height, width)), 3, 64))


def _enlarged(tokens: np.ndarray, scale: int) -> np.ndarray:
    return tokens.repeat(scale, 0).repeat(scale, 1)


def _fitted(picture: np.ndarray, tokens: tuple[int, int], scale: int) -> np.ndarray:
    """A picture in the size of a map, 0 to 255."""
    size = tokens[1] * scale, tokens[0] * scale
    image = Image.fromarray((np.clip(picture, 0, 1) * 255).round().astype(np.uint8))
    return np.asarray(image.convert("RGB").resize(size, Image.Resampling.LANCZOS), float)


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    canvas = Image.new("RGB", (int(width), int(height)), PAPER)
    return canvas, ImageDraw.Draw(canvas)


@cache
def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _width(text: str, size: int) -> float:
    return _font(size).getlength(text)


def _wrapped(text: str, size: int, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
