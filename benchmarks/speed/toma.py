"""ToMA's method, written anew from what is published of it; none of this is ToMA's own code.

Lu, Zheng, Xia and Wang, "ToMA: Token Merge with Attention for Diffusion Models", ICML 2025, arXiv
2509.10918. Read of it: the abstract, notes on the paper (papernotes.org, ICML2025), the read-me and
the settings files of github.com/WenboLuu/ToMA.

These say: the tokens that stay, the destinations, are chosen by greedy facility location within
tiles of the picture; a matrix of attention of destinations to all tokens merges them, and its
pseudo-inverse unmerges them; attention and feed-forward network run on merged tokens; blocks and
steps share destinations and matrix.

Assumed, as nothing that was read says it: likeness is cosine. The matrix is a softmax over the
destinations of each token, of products scaled as in attention, its rows then divided by their sums.
The transpose of the softmax stands for the pseudo-inverse. Merged tokens have the positions of
their destinations, so all samples merge alike. What a block changes is added to all tokens. All
blocks merge, though a settings file for Flux names some that do not. Tiles have 8x8 tokens, as the
notes say for example; a settings file has 4x4. Destinations are chosen anew every 10 steps and the
matrix every 5, where that file has an interval of 3.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tome_nodes.merging.layout import Grid

TILE_SIDE = 8
"""The most tokens along the side of a tile."""

CHOSEN_EVERY = 10
"""How many steps use the same destinations."""

WEIGHED_EVERY = 5
"""How many steps use the same matrix."""


def chosen(similarity: Tensor, count: int) -> Tensor:
    """The destinations that greedy facility location chooses, in the order of tokens.

    Each choice adds most to the sum, over all tokens, of the likeness to the nearest destination;
    without any, a token is as unlike as can be.

    Args:
        similarity: ``[tiles, tokens, tokens]``, cosines.
        count: how many to choose, from 1 to ``tokens``.

    Returns:
        ``[tiles, count]`` int64.
    """
    nearest = similarity.new_full(similarity.shape[:2], -1.0)
    taken = torch.zeros_like(nearest, dtype=torch.bool)
    for _ in range(count):
        gains = (similarity - nearest[:, :, None]).clamp_min(0).sum(1)
        choice = gains.masked_fill(taken, -1.0).argmax(1, keepdim=True)
        taken.scatter_(1, choice, True)
        own = similarity.gather(2, choice[:, None].expand(-1, similarity.shape[1], -1))
        nearest = torch.maximum(nearest, own[:, :, 0])
    return taken.nonzero()[:, 1].view(len(taken), count)


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Mixtures of the tokens of a tile, which take their place.

    Attributes:
        grid: that of the tokens.
        tile: height and width of a tile, which divide those of the grid.
        destinations: ``[tiles, kept]`` int64, counted within the tile.
        weights: ``[tiles, kept, tokens]``, how much each destination holds of each token, which
            sums to 1 over the destinations.
    """

    grid: Grid
    tile: tuple[int, int]
    destinations: Tensor
    weights: Tensor

    def tokens(self) -> Tensor:
        """The token of each destination, ``[kept of all tiles]`` int64."""
        numbers = torch.arange(self.grid.tokens, device=self.destinations.device)
        numbers = cut(numbers[None, :, None], self.grid, self.tile)[0, :, :, 0]
        return numbers.gather(1, self.destinations).flatten()

    def merge(self, x: Tensor) -> Tensor:
        """``[batch, tokens, channels]`` to ``[batch, kept of all tiles, channels]``."""
        rows = self.weights / self.weights.sum(2, keepdim=True)
        return (rows.to(x.dtype) @ cut(x, self.grid, self.tile)).flatten(1, 2)

    def unmerge(self, y: Tensor) -> Tensor:
        """The other way."""
        by_tile = y.unflatten(1, self.destinations.shape)
        return joined(self.weights.to(y.dtype).mT @ by_tile, self.grid, self.tile)


def tile_plan(x: Tensor, grid: Grid, before: TilePlan | None, ratio: float) -> TilePlan:
    """The plan for ``[batch, tokens, channels]``, with the destinations of one before, if any."""
    tile = _tile_side(grid.height), _tile_side(grid.width)
    # In each token the channels of all samples.
    features = x.transpose(0, 1).flatten(1)[None]
    (tokens,) = cut(features, grid, tile).float()
    if before is None:
        unit = F.normalize(tokens, dim=2)
        count = max(1, round(tokens.shape[1] * (1 - ratio)))
        destinations = chosen(unit @ unit.mT, count)
    else:
        destinations = before.destinations
    return TilePlan(grid, tile, destinations, _weights(tokens, destinations))


MakePlan = Callable[[Tensor, Grid, TilePlan | None], TilePlan]
"""Makes a plan as :func:`tile_plan`, with its ratio."""


class MergedBlocks:
    """The blocks of a Flux in a run, on merged tokens of its picture.

    A host's patch calls :meth:`begin` before each evaluation and :meth:`plan` in each block.

    Attributes:
        grid: of the picture's tokens in the current evaluation.
    """

    grid: Grid

    def __init__(self, make_plan: MakePlan):
        self._make_plan = make_plan
        self._plans: dict[Hashable, TilePlan] = {}
        self._current: TilePlan | None = None

    def begin(self, step: int, grid: Grid, part: Hashable = ()) -> None:
        """Note that an evaluation begins.

        Args:
            step: that of the run, from 0.
            grid: of the picture's tokens.
            part: what tells evaluations of one step apart.
        """
        self._step, self.grid, self._place = step, grid, (part, grid)
        is_kept = step % WEIGHED_EVERY > 0
        self._current = self._plans.get(self._place) if is_kept else None

    @torch.no_grad()
    def plan(self, x: Tensor) -> TilePlan:
        """The plan of all blocks, given what enters one, ``[batch, tokens, channels]``."""
        if self._current is None:
            is_kept = self._step % CHOSEN_EVERY > 0
            before = self._plans.get(self._place) if is_kept else None
            self._current = self._make_plan(x, self.grid, before)
            self._plans[self._place] = self._current
        return self._current


def positions_of(plan: TilePlan, positions: Tensor, along: int) -> Tensor:
    """The positions of text and of what is left of the picture behind it.

    Args:
        plan: of the picture.
        positions: of text and picture, one after another in the dimension ``along``.
        along: which dimension that is.
    """
    text = positions.shape[along] - plan.grid.tokens
    kept = torch.arange(text, device=positions.device)
    return positions.index_select(along, torch.cat([kept, plan.tokens() + text]))


def _weights(tokens: Tensor, destinations: Tensor) -> Tensor:
    """``[tiles, kept, tokens]``: of each token, the softmax over the destinations."""
    index = destinations[..., None].expand(-1, -1, tokens.shape[2])
    products = tokens.gather(1, index) @ tokens.mT
    return (products * tokens.shape[2] ** -0.5).softmax(1)


def cut(x: Tensor, grid: Grid, tile: tuple[int, int]) -> Tensor:
    """``[batch, tokens, channels]`` by tile: ``[batch, tiles, tokens of a tile, channels]``."""
    high, wide = tile
    x = x.unflatten(1, (-1, high, grid.width // wide, wide))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def joined(x: Tensor, grid: Grid, tile: tuple[int, int]) -> Tensor:
    """The inverse of :func:`cut`."""
    high, wide = tile
    x = x.unflatten(1, (-1, grid.width // wide)).unflatten(3, (high, wide))
    return x.transpose(2, 3).flatten(1, 4)


def _tile_side(length: int) -> int:
    """The longest side of equal tiles along so many tokens."""
    return max(side for side in range(1, TILE_SIDE + 1) if length % side == 0)
