"""Pictures side by side, with titles over them."""

from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

_MARGIN = 12
_PAPER, _INK, _MUTED = "#16181d", "#eef0f4", "#969ca8"


def sheet(
    columns: Mapping[str, Sequence[Image.Image]], titles: Mapping[str, Sequence[str]]
) -> Image.Image:
    """One column of pictures for each name, under its title and further lines of text.

    All pictures have one size, and all columns have equally many.
    """
    pictures = next(iter(columns.values()))
    wide, high = pictures[0].size
    top = 10 + 21 * max(map(len, titles.values()))
    size = _MARGIN + len(columns) * (wide + _MARGIN), top + len(pictures) * (high + _MARGIN)
    drawn = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(drawn)
    large, small = ImageFont.load_default(18), ImageFont.load_default(16)
    for column, (name, pictures) in enumerate(columns.items()):
        x = _MARGIN + column * (wide + _MARGIN)
        title, *texts = titles[name]
        draw.text((x, 5), title, _INK, large)
        for line, text in enumerate(texts):
            draw.text((x, 27 + 21 * line), text, _MUTED, small)
        for row, picture in enumerate(pictures):
            drawn.paste(picture, (x, top + row * (high + _MARGIN)))
    return drawn
