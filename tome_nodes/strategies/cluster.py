"""Clusters of tokens that are equally like the mean token.

A much-copied summary of the paper describes merging like this: how much a token is like the mean of
all tokens is one number, and k-means groups the tokens by it. The paper itself matches tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import TORCH, Operations
from .plan import Grid, Plan
from .strategy import Strategy

UNIT = 2.0**-30
"""Similarities are rounded to multiples of this, as sums of integers are exact. The rounding of a
float32 sum is coarser than the distances between the tokens of a large map."""

# After this many rounds, the sum of squares is about 2 % above the least possible with half as many
# clusters as tokens, and about 5 % with a quarter as many.
_ROUNDS = 3

# The share of the first edges that are at quantiles. All others are at the widest gaps.
_QUANTILES = 0.25

# At most this share of the edges moves in a round: the edges that separate least.
_MOVABLE = 0.3


class ClusterStrategy(Strategy):
    """Merges the tokens of a cluster, wherever they are in the map."""

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan | None:
        merges = int(grid.tokens * ratio)
        return cluster(features, grid.tokens - merges, self.ops) if merges else None


@torch.no_grad()
def cluster(features: Tensor, slots: int, ops: Operations = TORCH) -> Plan:
    """Merge the tokens of a sample into ``slots`` clusters.

    Args:
        features: ``[batch, tokens, channels]``, compared in float32.
        slots: number of clusters, at most ``tokens``.
        ops: the operations that the plan uses.
    """
    similarity, order = similarity_to_mean(features).sort(dim=1, stable=True)
    edges = k_means((similarity / UNIT).round().long(), slots)
    clusters = torch.searchsorted(edges, _positions(order), right=True) - 1
    return Plan.from_slots(torch.empty_like(order).scatter_(1, order, clusters), slots, ops)


def similarity_to_mean(features: Tensor) -> Tensor:
    """The cosine of each token to the mean of its sample's tokens, ``[batch, tokens]`` float32."""
    mean = features.mean(1, keepdim=True, dtype=torch.float32)
    products = (features * mean).sum(2)
    lengths = torch.linalg.vector_norm(features, dim=2, dtype=torch.float32) * mean.norm(dim=2)
    return (products / lengths.clamp_min(1e-12)).nan_to_num().clamp(-1, 1)


def k_means(values: Tensor, clusters: int) -> Tensor:
    """Cut sorted values into clusters with a small sum of squared distances to their means.

    A round is a step of Lloyd's algorithm, which assigns every value to the nearest mean. The round
    also moves some edges from where they separate little to where they separate much. Lloyd's
    algorithm alone moves edges too little: where many values are alike, too many would remain.

    Args:
        values: ``[batch, tokens]`` int64 in ascending order, from -2**30 to 2**30.
        clusters: number of clusters, at most ``tokens``.

    Returns:
        The edges, ``[batch, clusters + 1]`` int64: where the clusters begin, and ``tokens``. No
        cluster is empty.
    """
    sums = F.pad(values.cumsum(1), (1, 0))
    edges = first_edges(values, clusters)
    for _ in range(_ROUNDS if clusters > 1 else 0):
        means = means_of(sums, edges)
        moved = lloyd_step(values, means)
        moved[:, 1:-1].masked_fill_(_is_weak(means, edges), values.shape[1])
        edges = _refilled(sums, moved.sort(dim=1).values)
    return edges


def first_edges(values: Tensor, clusters: int) -> Tensor:
    """Edges at quantiles and at the widest gaps; see :func:`k_means`."""
    tokens = values.shape[1]
    parts = max(1, int(clusters * _QUANTILES))
    quantiles = torch.arange(1, parts, device=values.device) * tokens // parts
    gaps = values.diff(dim=1).float().index_fill(1, quantiles - 1, torch.inf)
    return _with_ends(gaps.topk(clusters - 1).indices.sort(dim=1).values + 1, tokens)


def means_of(sums: Tensor, edges: Tensor) -> Tensor:
    """The means of clusters, ``[batch, clusters]`` int64, rounded down.

    Args:
        sums: ``[batch, tokens + 1]`` int64, the running sums of the values, which begin with 0.
        edges: ``[batch, clusters + 1]`` int64; no cluster is empty.
    """
    return sums.gather(1, edges).diff(dim=1) // edges.diff(dim=1)


def lloyd_step(values: Tensor, means: Tensor) -> Tensor:
    """The edges that assign every value to the nearest mean; some clusters may be empty."""
    middles = (means[:, 1:] + means[:, :-1]) // 2
    return _with_ends(torch.searchsorted(values, middles, right=True), values.shape[1])


def _is_weak(means: Tensor, edges: Tensor) -> Tensor:
    """Which inner edges separate least; of two neighbours, at most one.

    How much an edge separates is how much the sum of squares would grow without it.
    """
    weights = edges.diff(dim=1).reciprocal()
    growth = means.diff(dim=1).float().square() / (weights[:, 1:] + weights[:, :-1])
    count = 1 + int(_MOVABLE * (growth.shape[1] - 1))
    most = growth.topk(count, largest=False).values[:, -1:]
    around = F.pad(growth, (1, 1), value=torch.inf)
    return (growth < around[:, :-2]) & (growth <= around[:, 2:]) & (growth <= most)


def _refilled(sums: Tensor, edges: Tensor) -> Tensor:
    """Of edges at the same place, keep one and move the others to where they separate most.

    A cluster gets at most one of them, unless there are too few clusters. Arguments are as for
    :func:`means_of`, but clusters may be empty; edges are in ascending order.
    """
    positions = _positions(sums[:, 1:])
    after = torch.searchsorted(edges, positions, right=True)
    begin, end = edges.gather(1, after - 1), edges.gather(1, after)
    left, size = positions - begin, end - begin
    base = sums.gather(1, begin)
    mean = (sums.gather(1, end) - base) // size
    # How far the values to the left of a position are from the mean, in all.
    distance = (sums[:, :-1] - base - left * mean).float()
    is_edge = left == 0
    gain = (distance.square() * size / (left * (size - left))).masked_fill(is_edge, 0)
    most = torch.zeros_like(gain).scatter_reduce(1, after - 1, gain, "amax").gather(1, after - 1)
    rank = gain.masked_fill(gain < most, -1).masked_fill(is_edge, torch.inf)
    begins = rank.topk(edges.shape[1] - 1).indices.sort(dim=1).values
    return F.pad(begins, (0, 1), value=sums.shape[1] - 1)


def _with_ends(inner: Tensor, tokens: int) -> Tensor:
    return F.pad(F.pad(inner, (1, 0)), (0, 1), value=tokens)


def _positions(tokens: Tensor) -> Tensor:
    """The positions of tokens in their rows."""
    return torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
