"""Which tokens of a sequence are pictures or videos, and their sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Grid(NamedTuple):
    """The size of a feature map in tokens. Tokens are in order of frame, row and column.

    Attributes:
        height: tokens down.
        width: tokens across.
        frames: number of frames, 1 for a picture.
    """

    height: int
    width: int
    frames: int = 1

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def parts(self) -> "tuple[Grid, ...]":
        """The grids that merge separately: of a video, the first frame and all others.

        The VAEs of video models encode a single frame into the first latent frame, and several
        frames into each of the others.
        """
        if self.frames == 1:
            return (self,)
        return Grid(self.height, self.width), Grid(self.height, self.width, self.frames - 1)

    def cells(self, sy: int, sx: int) -> "Grid":
        """How many whole cells of ``sy`` by ``sx`` tokens fit, down and across."""
        return Grid(self.height // sy, self.width // sx)

    def is_within(self, latent: "Grid", max_downsample: int) -> bool:
        """Whether this feature map is at most ``max_downsample`` times smaller than ``latent``."""
        least = latent.downsampled(max_downsample)
        return self.height >= least.height and self.width >= least.width

    def downsampled(self, times: int) -> "Grid":
        """The grid of a UNet's feature map that is ``times`` smaller; each halving rounds up."""
        return Grid(-(-self.height // times), -(-self.width // times))


@dataclass(frozen=True)
class Picture:
    """A picture or video in the sequence of a transformer, found from the model's inputs.

    Attributes:
        grid: the grid of its tokens.
        padding: the number of padding tokens after it, which never merge.
    """

    grid: Grid
    padding: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens, including the padding."""
        return self.grid.tokens + self.padding


class Span(NamedTuple):
    """The tokens of one picture or video within a sequence, from ``start`` on."""

    start: int
    grid: Grid

    @property
    def stop(self) -> int:
        """The index after its last token."""
        return self.start + self.grid.tokens


@dataclass(frozen=True)
class Layout:
    """Where the pictures are in a sequence of tokens. Other tokens, such as text, never merge.

    A feature map of a UNet is one span that fills its sequence. A transformer's joint sequence
    holds text and a picture, and perhaps reference pictures as further spans.

    Attributes:
        length: number of tokens in the sequence.
        spans: the pictures, in the order of the sequence, without overlap.

    Raises:
        ValueError: the spans overlap, are out of order or do not fit into the sequence.
    """

    length: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        free = 0
        for span in self.spans:
            if span.start < free or span.stop > self.length:
                raise ValueError(
                    f"a picture of {span.grid.tokens} tokens from {span.start} on does not fit "
                    f"into a sequence of {self.length} tokens that is free from {free} on"
                )
            free = span.stop

    @classmethod
    def filled_by(cls, grid: Grid) -> "Layout":
        """The layout of a sequence that is one picture or video."""
        return cls(grid.tokens, (Span(0, grid),))

    @classmethod
    def of_pictures(cls, length: int, pictures: Sequence[Picture], at_end: bool) -> "Layout | None":
        """The layout of a sequence that starts or ends with some pictures, one after another.

        None if they do not fit into ``length`` tokens.
        """
        start = length - sum(picture.tokens for picture in pictures) if at_end else 0
        spans = []
        for picture in pictures:
            spans.append(Span(start, picture.grid))
            start += picture.tokens
        if spans[0].start < 0 or start > length:
            return None
        return cls(length, tuple(spans))
