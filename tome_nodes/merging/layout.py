"""The size of a picture or video in tokens."""

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

    def cells(self, sy: int, sx: int) -> "Grid":
        """How many whole cells of ``sy`` by ``sx`` tokens fit, down and across."""
        return Grid(self.height // sy, self.width // sx)

    def is_within(self, latent: "Grid", max_downsample: int) -> bool:
        """Whether this feature map is at most ``max_downsample`` times smaller than ``latent``."""
        least = latent.downsampled(max_downsample)
        return self.height >= least.height and self.width >= least.width

    def downsampled(self, times: int) -> "Grid":
        """The grid of a UNet's feature map that is ``times`` smaller; each halving rounds up."""
        return Grid(-(-self.height // times), -(-self.width // times), self.frames)
