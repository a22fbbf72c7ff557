"""Find a picture in a sequence of tokens by what changes when its pixels do.

All pixels of a latent are changed a little, and a few of them by much. Where no token has seen
another yet, the tokens that change are those of the picture, and those that change most hold the
few pixels. If these lie as they would in a picture whose tokens stand row by row, and frame by
frame, one after another, then there it is.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .layout import Grid, Span

Sides = tuple[int, int, int]
"""Frames, height and width of a latent in pixels."""

_PROBED = 16
"""How many pixels change by much. So many lie in the order of rows by chance in no other order."""

_LEAST_APART = 6
"""In how many tokens they must lie, so that their places tell anything."""

_MARGIN = 32
"""How far from the edges they are, in pixels, as far as there is room: models extend sides that are
no whole number of patches, perhaps by pixels of the other edge."""

_MUCH, _LITTLE = 16.0, 0.02
"""How far pixels are changed, in standard deviations of the latent."""

_STANDS_OUT = 1.5
"""How many times more a token with a probed pixel changes than any without."""

_NOISE = 1e-4
"""The share of the largest change below which there is none."""

_PATCHES = (1, 2, 4, 8, 14, 16, 32)
_PATCH_FRAMES = (1, 2, 4)

_FEATURES = 8
"""How many numbers stand for a token; one alone could stay the same by rounding."""


def probed_pixels(sides: Sides) -> list[Sides]:
    """The pixels that change by much, as frame, row and column: irregular, the same each time."""
    frames, height, width = sides
    pixels = []
    for index in range(1, _PROBED + 1):
        row, column = (
            margin + int(index * step % 1 * (side - 2 * margin))
            for side, step, margin in (
                (height, 0.7548776662, min(_MARGIN, height // 4)),
                (width, 0.5698402910, min(_MARGIN, width // 4)),
            )
        )
        pixels.append((int(index * 0.6180339887 % 1 * frames), row, column))
    return pixels


def changed(latent: Tensor) -> Tensor:
    """A latent with all pixels changed a little, and the probed ones by much.

    Args:
        latent: ``[batch, channels, height, width]``, with frames before the height if it is a
            video.
    """
    deep = latent if latent.ndim == 5 else latent[:, :, None]
    signs = torch.ones(deep.shape[1], dtype=deep.dtype, device=deep.device)
    # A model may take the mean over channels away.
    signs[1::2] = -1
    change = signs.view(1, -1, 1, 1, 1).expand(deep.shape).clone() * _LITTLE
    for frame, row, column in probed_pixels((deep.shape[2], deep.shape[3], deep.shape[4])):
        change[:, :, frame, row, column] = signs * _MUCH
    return latent + (change * deep.float().std().clamp_min(1e-3)).reshape(latent.shape).to(
        latent.dtype
    )


def fingerprints(x: Tensor) -> Tensor:
    """A few numbers that stand for each token: ``[..., channels]`` to ``[..., features]``."""
    channels = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=torch.float32)
    features = torch.arange(1, _FEATURES + 1, device=x.device, dtype=torch.float32)
    # Small enough that sums of large tokens fit into half precision.
    weights = torch.outer(channels.sqrt() * channels, features).sin() / 64
    return x @ weights.to(x.dtype)


def changes(before: Tensor, after: Tensor) -> Tensor:
    """How much tokens change, from their fingerprints: ``[..., features]`` to ``[...]`` float32."""
    change = (after.float() - before.float()).abs().sum(-1).cpu()
    # In half precision, tokens that change by much may overflow.
    most = change[change.isfinite()].max() if change.isfinite().any() else change.new_ones(())
    return change.where(change.isfinite(), 10 * most)


def is_changed(changes: Tensor) -> Tensor:
    """Which tokens change at all, ``[batch, tokens]`` bool."""
    return changes > _NOISE * changes.amax()


def span_of(changes: Tensor, sides: Sides, others_follow: bool = False) -> Span | None:
    """The first span of tokens that change, if it is a picture whose tokens stand row by row.

    Args:
        changes: how much each token changes with the picture, ``[batch, tokens]``.
        sides: of the picture, in pixels.
        others_follow: whether tokens of other pictures may change right behind it.
    """
    changing = is_changed(changes).all(0)
    if not changing.any():
        return None
    start = int(changing.nonzero()[0])
    for grid, places in _grids(sides):
        stop, number = start + grid.tokens, len(places)
        if number < _LEAST_APART or not changing[start:stop].all() or stop > len(changing):
            continue
        if not others_follow and changing[stop : stop + 1].any():
            continue
        most = changes[:, start:stop].sort(1, descending=True)
        is_there = most.indices[:, :number].sort(1).values == torch.tensor(places)
        stand_out = most.values[:, number - 1 : number] > _STANDS_OUT * most.values[:, number:]
        if is_there.all() and stand_out.all():
            return Span(start, grid)
    return None


def most_changed(changes: Tensor, sides: Sides, grid: Grid, batch: int) -> list[int]:
    """The tokens of all samples that hold a probed pixel, if they are of this grid; else none.

    Args:
        changes: how much each token changes, in any shape; none may change at all.
        sides: of the picture, in pixels.
        grid: of its tokens.
        batch: number of samples.
    """
    number = next((len(places) for each, places in _grids(sides) if each == grid), 0)
    most = changes.flatten().topk(min(number * batch, changes.numel()))
    return sorted(most.indices[most.values > 0].tolist())


def _grids(sides: Sides) -> Iterator[tuple[Grid, list[int]]]:
    """Possible grids of a picture's tokens, and the tokens with a probed pixel, in order."""
    pixels = probed_pixels(sides)
    seen = set()
    for deep in _PATCH_FRAMES:
        for patch in _PATCHES:
            frames, height, width = (
                -(-side // each) for side, each in zip(sides, (deep, patch, patch), strict=True)
            )
            grid = Grid(height, width, frames)
            if grid not in seen:
                seen.add(grid)
                yield (
                    grid,
                    sorted(
                        {
                            (frame // deep * height + row // patch) * width + column // patch
                            for frame, row, column in pixels
                        }
                    ),
                )
