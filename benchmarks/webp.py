"""Save pictures small enough for a repository."""

from io import BytesIO
from pathlib import Path

from PIL import Image

MOST_BYTES = 150_000
"""The largest file; a larger picture loses quality first, then size."""


def save(picture: Image.Image, path: Path) -> None:
    """Write a picture as WebP of at most :data:`MOST_BYTES`."""
    picture = picture.convert("RGB")
    while True:
        for quality in (90, 80, 70, 60):
            stream = BytesIO()
            picture.save(stream, "WEBP", quality=quality, method=6)
            if len(stream.getvalue()) <= MOST_BYTES:
                path.write_bytes(stream.getvalue())
                return
        width, height = (round(side * 0.85) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)


def save_figure(figure: object, path: Path, dpi: int) -> None:
    """The same for a figure of Matplotlib, at so many dots per inch."""
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=dpi)  # type: ignore[attr-defined]
    save(Image.open(stream), path)
