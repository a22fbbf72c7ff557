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
their destinations. What a block changes is added to all tokens. All blocks merge, though a settings
file for Flux names some that do not. Tiles have 8x8 tokens, as the notes say for example; a
settings file has 4x4. Destinations are chosen anew every 10 steps and the matrix every 5, where
that file has an interval of 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tome_nodes.merging.layout import Grid
from tome_nodes.merging.plan import Plan
from tome_nodes.ops import Operations
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies.strategy import Strategy

TILE_SIDE = 8
"""The most tokens along the side of a tile."""

CHOSEN_EVERY = 10
"""How many merged steps use the same destinations."""


def toma_config(ratio: float) -> ToMeConfig:
    """The settings with which :class:`TomaStrategy` merges as ToMA does."""
    return ToMeConfig(
        ratio=ratio, scope="block", reuse_steps=5, proportional_attn=False, min_tokens=1
    )


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
class TilePlan(Plan):
    """A plan whose slots are mixtures of the tokens of a tile.

    Attributes:
        grid: that of the tokens.
        tile: height and width of a tile, which divide those of the grid.
        destinations: ``[batch, tiles, kept]`` int64, counted within the tile.
        weights: ``[batch, tiles, kept, tokens]``, how much each destination holds of each token,
            which sums to 1 over the destinations.
    """

    grid: Grid
    tile: tuple[int, int]
    destinations: Tensor
    weights: Tensor

    @property
    def slot_count(self) -> int:  # type: ignore[override]
        return self.destinations[0].numel()

    def slots(self) -> Tensor:
        """The slot that holds most of each token."""
        tiles = torch.arange(self.weights.shape[1], device=self.weights.device)[:, None]
        slots = self.weights.argmax(2) + tiles * self.weights.shape[2]
        return joined(slots[..., None], self.grid, self.tile)[..., 0]

    def tokens(self) -> Tensor:
        numbers = torch.arange(self.grid.tokens, device=self.destinations.device)
        numbers = cut(numbers[None, :, None], self.grid, self.tile)[..., 0]
        numbers = numbers.expand(len(self.destinations), -1, -1)
        return numbers.gather(2, self.destinations).flatten(1)

    def log_sizes(self) -> Tensor:
        return self.weights.float().sum(3).log().flatten(1)

    def fits(self, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[:2] == (len(self.weights), self.grid.tokens)

    def merge(self, x: Tensor) -> Tensor:
        rows = self.weights / self.weights.sum(3, keepdim=True)
        return (rows.to(x.dtype) @ cut(x, self.grid, self.tile)).flatten(1, 2)

    def unmerge(self, y: Tensor) -> Tensor:
        by_tile = y.unflatten(1, self.destinations.shape[1:])
        return joined(self.weights.to(y.dtype).mT @ by_tile, self.grid, self.tile)


class TomaStrategy(Strategy):
    """Makes the plans of ToMA's method; with :func:`toma_config`, every fifth step."""

    uses_cells = False

    def __init__(self, config: ToMeConfig, ops: Operations):
        super().__init__(config, ops)
        self._steps: list[int] = []
        self._kept: dict[tuple[Grid, float], tuple[int, Tensor]] = {}

    def begin(self, key: Tensor) -> None:
        """Count the steps, each of which has another key; a key of before begins another run."""
        step = int(key)
        if step in self._steps[:-1]:
            self._steps.clear()
            self._kept.clear()
        if step not in self._steps:
            self._steps.append(step)

    @torch.no_grad()
    def plans(self, features: Tensor, grid: Grid, ratios: Sequence[float]) -> list[Plan | None]:
        tile = _tile_side(grid.height), _tile_side(grid.width)
        tokens = cut(features, grid, tile).float()
        return [self._plan(tokens, grid, tile, ratio) for ratio in ratios]

    def _plan(
        self, tokens: Tensor, grid: Grid, tile: tuple[int, int], ratio: float
    ) -> TilePlan | None:
        """The plan of one ratio for ``[batch, tiles, tokens, channels]``."""
        count = max(1, round(tokens.shape[2] * (1 - ratio)))
        if count == tokens.shape[2]:
            return None
        period, destinations = self._kept.get((grid, ratio), (-1, None))
        now = (len(self._steps) - 1) // CHOSEN_EVERY
        if destinations is None or period != now or len(destinations) != len(tokens):
            unit = F.normalize(tokens.flatten(0, 1), dim=2)
            destinations = chosen(unit @ unit.mT, count).unflatten(0, tokens.shape[:2])
            self._kept[grid, ratio] = now, destinations
        return TilePlan(grid, tile, destinations, _weights(tokens, destinations))


def _weights(tokens: Tensor, destinations: Tensor) -> Tensor:
    """``[batch, tiles, kept, tokens]``: of each token, the softmax over the destinations."""
    index = destinations[..., None].expand(-1, -1, -1, tokens.shape[3])
    products = tokens.gather(2, index) @ tokens.mT
    return (products * tokens.shape[3] ** -0.5).softmax(2)


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
