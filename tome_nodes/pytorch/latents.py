"""Find the latent and reference pictures among the arguments of a transformer of diffusers.

Some transformers get a latent ``[batch, channels, height, width]``, or a video
``[batch, channels, frames, height, width]``, and cut it into tokens. Others get the tokens of the
latent, ``[batch, tokens, channels]``, followed by those of the references. Another argument then
tells the sizes of these pictures: as numbers, or by the coordinates of each token.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..merging.layout import Grid
from ..merging.picture_search import Sides, changed

_known_places = WeakTensorKeyDictionary()
"""The sizes found in tensors of coordinates. To read these anew would make a GPU wait."""


@dataclass(frozen=True, eq=False)
class Latents:
    """The argument of a transformer that holds the latent, and perhaps references.

    Attributes:
        value: the argument: a tensor, or a list with one ``[channels, frames, height, width]`` for
            each sample.
        sides: frames, height and width of the latent, followed by those of each reference. They
            are in tokens if the argument holds tokens, and else in pixels of the latent.
        frames_first: whether the dimension of frames comes before that of channels.
    """

    value: Any
    sides: tuple[Sides, ...]
    frames_first: bool = False

    @property
    def one(self) -> Tensor:
        """The tensor, or the first one of the list."""
        first = self.value[0] if isinstance(self.value, list) else self.value
        assert isinstance(first, Tensor)
        return first

    @property
    def are_tokens(self) -> bool:
        """Whether the argument holds tokens."""
        return not isinstance(self.value, list) and self.value.ndim == 3

    def with_changed(self, references: bool) -> Any:
        """The argument with a changed latent, or with changed references instead."""
        if isinstance(self.value, list):
            return [changed(each[None])[0] for each in self.value]
        if not self.are_tokens:
            by_channel = self.value.transpose(1, 2) if self.frames_first else self.value
            after = changed(by_channel)
            return after.transpose(1, 2) if self.frames_first else after
        pieces = self._pictures()
        for index in range(1, len(pieces)) if references else (0,):
            picture = pieces[index].transpose(1, 2).unflatten(2, self.sides[index])
            pieces[index] = changed(picture).flatten(2).transpose(1, 2)
        return torch.cat(pieces, 1)

    def latent(self, grid: Grid, channels: int, side: int) -> Tensor:
        """The latent as ``[batch, channels, height, width]`` float32, or with frames if a video.

        It must not have :attr:`frames_first`.

        Args:
            grid: the grid of its tokens.
            channels: how many of the channels, or of the channels of each token, are the latent's.
                Further ones, for example, say where to paint. Not used for a list.
            side: if the argument holds tokens, the side of the square of pixels that a token holds,
                channel by channel.
        """
        if isinstance(self.value, list):
            return torch.stack(self.value).float()
        if not self.are_tokens:
            return self.value[:, :channels].float()
        tokens = self._pictures()[0][..., :channels].float()
        sides = grid.frames, grid.height, grid.width
        pixels = tokens.reshape(len(tokens), *sides, -1, side, side).permute(0, 4, 1, 2, 5, 3, 6)
        latent = pixels.reshape(len(tokens), -1, grid.frames, side * grid.height, side * grid.width)
        return latent[:, :, 0] if grid.frames == 1 else latent

    def with_latent(self, latent: Tensor, grid: Grid) -> Any:
        """The argument with another :meth:`latent` of the same shape."""
        latent = latent.to(self.one.dtype)
        if isinstance(self.value, list):
            return list(latent)
        if not self.are_tokens:
            return torch.cat([latent, self.value[:, latent.shape[1] :]], 1)
        side = latent.shape[-1] // grid.width
        high, wide = (grid.height, side), (grid.width, side)
        pixels = latent.reshape(*latent.shape[:2], grid.frames, *high, *wide)
        tokens = pixels.permute(0, 2, 3, 5, 1, 4, 6).reshape(len(latent), grid.tokens, -1)
        own, *references = self._pictures()
        return torch.cat([torch.cat([tokens, own[..., tokens.shape[2] :]], 2), *references], 1)

    def _pictures(self) -> list[Tensor]:
        """The tokens of the latent, followed by the tokens of each reference."""
        return list(self.value.split([math.prod(sides) for sides in self.sides], 1))


def latents_of(arguments: Mapping[str, Any], channels: int | None) -> Latents | None:
    """The latents among the arguments of a transformer, None if their form is unknown.

    Args:
        arguments: the arguments by name. The first one holds the latents.
        channels: the number of channels of the latent, None if unknown.
    """
    value = next(iter(arguments.values()), None)
    if isinstance(value, list):
        is_list = all(isinstance(each, Tensor) and each.ndim == 4 for each in value)
        alike = is_list and len({each.shape for each in value}) == 1
        return Latents(value, (_sides(value[0].shape[-3:]),)) if alike else None
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.ndim == 3:
        sides = _sides_of_tokens(value.shape[1], arguments)
        return Latents(value, tuple(sides)) if sides else None
    if value.ndim == 4:
        return Latents(value, ((1, value.shape[2], value.shape[3]),))
    if value.ndim == 5:
        frames_first = value.shape[1] != channels and value.shape[2] == channels
        frames = value.shape[1 if frames_first else 2]
        return Latents(value, ((frames, value.shape[3], value.shape[4]),), frames_first)
    return None


def _sides_of_tokens(tokens: int, arguments: Mapping[str, Any]) -> Sequence[Sides]:
    """The sizes of the pictures whose tokens follow each other; empty if nothing tells them."""
    frames, *picture = (arguments.get(name) for name in ("num_frames", "height", "width"))
    if all(isinstance(each, int) for each in picture):
        sides = _sides([frames or 1, *picture])
        if math.prod(sides) == tokens:
            return [sides]
    for value in list(arguments.values())[1:]:
        if isinstance(value, list | tuple):
            sizes = list(_triples(value))
            # The list may have the sizes of one sample, or repeat them for each.
            for repeats in (1, len(value)):
                own = sizes[: len(sizes) // max(1, repeats)]
                if own and sum(map(math.prod, own)) == tokens:
                    return own
        elif (
            isinstance(value, Tensor)
            and _are_places(value, tokens)
            and (found := _sides_of_places(value, tokens))
        ):
            return found
    return []


def _triples(value: Any) -> Iterator[Sides]:
    """All triples of frames, height and width in nested lists."""
    if isinstance(value, list | tuple):
        if len(value) == 3 and all(isinstance(each, int) for each in value):
            yield _sides(value)
        else:
            for each in value:
                yield from _triples(each)


def _are_places(value: Tensor, tokens: int) -> bool:
    """Whether a tensor may hold the coordinates of so many tokens, perhaps after those of text."""
    return value.ndim in (2, 3) and value.shape[-2] >= tokens and value.shape[-1] in (2, 3, 4)


def _sides_of_places(places: Tensor, tokens: int) -> tuple[Sides, ...]:
    """The sizes of the pictures whose tokens have the last of these coordinates.

    Empty unless the tokens of each picture stand row by row.

    Args:
        places: ``[tokens, coordinates]``, or ``[batch, tokens, coordinates]``, which may begin with
            the coordinates of text.
        tokens: the number of tokens of all pictures.
    """
    kept = _known_places.setdefault(places, {})
    if tokens not in kept:
        rows = places if places.ndim == 2 else places[0]
        kept[tokens] = tuple(_found_sides(rows[-tokens:].detach().double().cpu()))
    found: tuple[Sides, ...] = kept[tokens]
    return found


def _found_sides(places: Tensor) -> list[Sides]:
    sizes: list[Sides] = []
    start = 0
    while start < len(places):
        rest = places[start:] - places[start]
        width = _steps(rest)
        height = _steps(rest[::width][: len(rest) // width])
        rows = rest[: height * width].unflatten(0, (height, width))
        if height * width == 1 or not torch.equal(rows, rows[:, :1] + rows[:1]):
            return []
        sizes.append((1, height, width))
        start += height * width
    return sizes


def _steps(places: Tensor) -> int:
    """How many places, from the first on, are equally spaced along one coordinate."""
    if len(places) < 2 or int((places[1] != 0).sum()) != 1:
        return 1
    line = torch.arange(len(places), dtype=places.dtype)[:, None] * places[1]
    other = (places != line).any(1).nonzero()
    return int(other[0]) if len(other) else len(places)


def _sides(sizes: Sequence[Any]) -> Sides:
    frames, height, width = sizes
    return frames, height, width
