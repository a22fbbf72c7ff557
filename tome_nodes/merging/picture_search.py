"""Find a picture in a sequence of tokens: change its pixels, and see which tokens change.

All pixels of a latent are changed a little, and a few *probed* pixels are changed a lot. As
long as no token sees another, only the picture's tokens change, and those that hold probed pixels
change most. If these are where they would be in a picture laid out row by row and frame by frame,
the picture is found.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .layout import Grid, Span

Sides = tuple[int, int, int]
"""Frames, height and width of a latent in pixels."""

_PROBED = 16
"""The number of probed pixels: enough that no other order of the tokens fits them by chance."""

_FEWEST_PLACES = 6
"""The fewest tokens that must hold all probed pixels; fewer do not reveal the order of tokens."""

_MARGIN = 32
"""The distance of probed pixels from the edges, in pixels, where there is room. Models pad sides
that are not a whole number of patches, perhaps with pixels of the opposite edge."""

_MUCH, _LITTLE = 16.0, 0.02
"""The change of probed and of other pixels, in standard deviations of the latent."""

_STANDS_OUT = 1.5
"""How many times as much a token with a probed pixel must change as any token without one."""

_NOISE = 1e-4
"""A token has changed if its change is more than this share of the largest."""

_PATCHES = (1, 2, 4, 8, 14, 16, 32)
"""The sides of a token that are tried, in pixels of the latent."""

_PATCH_FRAMES = (1, 2, 4)
"""The numbers of frames of a token that are tried."""

_FEATURES = 8
"""The numbers in a token's fingerprint; a single one could stay the same by rounding."""


def probed_pixels(sides: Sides) -> list[Sides]:
    """The probed pixels as frame, row and column: irregular, but the same each time."""
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
    """A latent with all pixels changed a little, and the probed ones a lot.

    Args:
        latent: ``[batch, channels, height, width]``, with frames before the height if it is a
            video.
    """
    deep = latent if latent.ndim == 5 else latent[:, :, None]
    signs = torch.ones(deep.shape[1], dtype=deep.dtype, device=deep.device)
    # Some models subtract the mean over channels, so channels change in opposite directions.
    signs[1::2] = -1
    change = signs.view(1, -1, 1, 1, 1).expand(deep.shape).clone() * _LITTLE
    for frame, row, column in probed_pixels((deep.shape[2], deep.shape[3], deep.shape[4])):
        change[:, :, frame, row, column] = signs * _MUCH
    return latent + (change * deep.float().std().clamp_min(1e-3)).reshape(latent.shape).to(
        latent.dtype
    )


def fingerprints(x: Tensor) -> Tensor:
    """A few numbers that identify each token: ``[..., channels]`` to ``[..., features]``."""
    channels = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=torch.float32)
    features = torch.arange(1, _FEATURES + 1, device=x.device, dtype=torch.float32)
    # Small enough that sums of large tokens fit into half precision.
    weights = torch.outer(channels.sqrt() * channels, features).sin() / 64
    return x @ weights.to(x.dtype)


def changes(before: Tensor, after: Tensor) -> Tensor:
    """How much tokens change, from their fingerprints: ``[..., features]`` to ``[...]`` float32."""
    change = (after.float() - before.float()).abs().sum(-1).cpu()
    # In half precision, large changes may overflow.
    most = change[change.isfinite()].max() if change.isfinite().any() else change.new_ones(())
    return change.where(change.isfinite(), 10 * most)


def is_changed(changes: Tensor) -> Tensor:
    """Which tokens change at all, ``[batch, tokens]`` bool."""
    return changes > _NOISE * changes.amax()


def span_of(changes: Tensor, sides: Sides, others_follow: bool = False) -> Span | None:
    """The span of the first tokens that change, if they are a picture laid out row by row.

    Args:
        changes: how much each token changes with the picture, ``[batch, tokens]``.
        sides: the sides of the picture.
        others_follow: whether another picture that changes may follow directly.
    """
    changing = is_changed(changes).all(0)
    if not changing.any():
        return None
    start = int(changing.nonzero()[0])
    for grid, places in _grids(sides):
        stop, number = start + grid.tokens, len(places)
        if number < _FEWEST_PLACES or not changing[start:stop].all() or stop > len(changing):
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
    """The tokens, of all samples, that hold a probed pixel, judging by their changes.

    Empty if no token changes, or if the picture cannot have this grid.

    Args:
        changes: how much each token changes, in any shape.
        sides: the sides of the picture.
        grid: the grid of its tokens.
        batch: number of samples.
    """
    number = next((len(places) for each, places in _grids(sides) if each == grid), 0)
    most = changes.flatten().topk(min(number * batch, changes.numel()))
    return sorted(most.indices[most.values > 0].tolist())


def _grids(sides: Sides) -> Iterator[tuple[Grid, list[int]]]:
    """Possible grids of a picture's tokens, each with its tokens that hold a probed pixel."""
    pixels = probed_pixels(sides)
    seen = set()
    for deep in _PATCH_FRAMES:
        for patch in _PATCHES:
            frames, height, width = (
                -(-side // each) for side, each in zip(sides, (deep, patch, patch), strict=True)
            )
            grid = Grid(height, width, frames)
            if grid in seen:
                continue
            seen.add(grid)
            places = {
                (frame // deep * height + row // patch) * width + column // patch
                for frame, row, column in pixels
            }
            yield grid, sorted(places)
