"""Which tokens of a sequence are picture, and in which rectangles."""

from dataclasses import dataclass

from .grid import Grid

LayoutKey = tuple[int, tuple[tuple[int, int, int], ...]]
"""A layout as plain numbers, since torch.compile lets no frozen dataclass out of what it traces."""


@dataclass(frozen=True)
class Span:
    """The tokens of one picture within a sequence: a grid, row by row, from ``start`` on."""

    start: int
    grid: Grid

    @property
    def stop(self) -> int:
        """The place behind its last token."""
        return self.start + self.grid.tokens


@dataclass(frozen=True)
class Layout:
    """The pictures in a sequence of tokens; what is in no span, such as text, never merges.

    A feature map of a UNet is one span that fills its sequence. A transformer's joint sequence has
    text beside a picture, and reference pictures as spans of their own.

    Attributes:
        length: tokens of the sequence.
        spans: in the order of the sequence, apart from each other.

    Raises:
        ValueError: the spans do not lie within the sequence one after another.
    """

    length: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        free = 0
        for span in self.spans:
            if span.start < free or span.stop > self.length:
                raise ValueError(
                    f"a picture of {span.grid.height}x{span.grid.width} tokens from {span.start} "
                    f"on does not fit into a sequence of {self.length} tokens that is free from "
                    f"{free} on"
                )
            free = span.stop

    @classmethod
    def filled_by(cls, grid: Grid) -> "Layout":
        """The layout of a sequence that is one picture."""
        return cls(grid.tokens, (Span(0, grid),))

    @property
    def is_filled(self) -> bool:
        """Whether one picture is all there is."""
        return len(self.spans) == 1 and self.spans[0].grid.tokens == self.length

    @property
    def key(self) -> LayoutKey:
        """The same as plain numbers."""
        return self.length, tuple(
            (span.start, span.grid.height, span.grid.width) for span in self.spans
        )

    @classmethod
    def of_key(cls, key: LayoutKey) -> "Layout":
        """The layout that has a key."""
        length, spans = key
        return cls(length, tuple(Span(start, Grid(*sides)) for start, *sides in spans))
