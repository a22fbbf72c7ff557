"""The rows, columns and frames of a flat sequence of tokens."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Size of a feature map in tokens, which are in order of frame, row and column.

    Attributes:
        height: tokens down.
        width: tokens across.
        frames: 1 for a picture.
    """

    height: int
    width: int
    frames: int = 1

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def parts(self) -> "tuple[Grid, ...]":
        """The grids whose tokens may merge with each other: a video's first frame is separate.

        The VAEs of video models make the first latent frame from one frame, and each of the others
        from several.
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
        """The feature map of a UNet that is ``times`` smaller; each halving rounds up."""
        return Grid(-(-self.height // times), -(-self.width // times))
