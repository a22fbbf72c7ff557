"""The rectangle of tokens behind a flat sequence."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Height and width of a feature map, in tokens, which follow each other row by row."""

    height: int
    width: int

    @property
    def tokens(self) -> int:
        return self.height * self.width

    def cells(self, sy: int, sx: int) -> "Grid":
        """How many whole cells of ``sy`` by ``sx`` tokens fit, down and across."""
        return Grid(self.height // sy, self.width // sx)

    def is_within(self, latent: "Grid", max_downsample: int) -> bool:
        """Whether this feature map is at most ``max_downsample`` times smaller than ``latent``.

        A UNet halves a side by rounding up, so its map at downsampling d has ceil(side / d) tokens.
        """
        return (
            self.height >= -(-latent.height // max_downsample)
            and self.width >= -(-latent.width // max_downsample)
        )  # fmt: skip
