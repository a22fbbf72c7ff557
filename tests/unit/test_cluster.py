"""Clusters by likeness to the mean, against k-means by brute force in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_strategies import features_of, groups, plan_of

from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies.cluster import UNIT, cluster, similarity_to_mean
from tome_nodes.strategies.plan import Grid


def map_of(side, seed):
    """A smooth map with some noise: two samples of 16 channels."""
    coarse = torch.randn(2, 16, 5, 5, generator=torch.Generator().manual_seed(seed))
    smooth = F.interpolate(coarse, (side, side), mode="bilinear").flatten(2).mT
    return smooth + 0.5 + 0.1 * features_of(Grid(side, side), 2, 16, seed)


def sorted_values(features):
    return (similarity_to_mean(features) / UNIT).round().long().sort(dim=1).values


def edges_of(plan):
    """Where the clusters of each sample begin among its tokens in order, and their number."""
    sizes = [np.bincount(slots) for slots in plan.slots().numpy()]
    return [np.append(0, np.cumsum(each)) for each in sizes]


def squares(values, edges):
    """The sum of squared distances to the means of clusters."""
    sums, squared = (np.append(0, np.cumsum(values**power))[edges] for power in (1, 2))
    return (np.diff(squared) - np.diff(sums) ** 2 / np.diff(edges)).sum()


def brute_force_step(values, edges):
    """Where clusters begin if each value moves to the nearest mean, of two the lower; in float64.

    Clusters that would be empty are left out.
    """
    means = np.diff(np.append(0, np.cumsum(values))[edges]) / np.diff(edges)
    begins = np.searchsorted(values, (means[1:] + means[:-1]) / 2, side="right")
    return np.unique([0, *begins, len(values)])


def lloyd(values, clusters):
    """Lloyd's algorithm from quantiles, until no value moves or a cluster would be empty."""
    edges = np.arange(clusters + 1) * len(values) // clusters
    while len(moved := brute_force_step(values, edges)) == len(edges):
        if np.array_equal(moved, edges):
            break
        edges = moved
    return edges


def least_squares(values, clusters):
    """The least sum of squares of so many clusters, by dynamic programming in float64."""
    sums, squared = (np.append(0, np.cumsum(values**power)) for power in (1, 2))
    index = np.arange(len(sums))
    sizes = index - index[:, None]
    costs = np.where(
        sizes > 0,
        squared - squared[:, None] - (sums - sums[:, None]) ** 2 / np.maximum(sizes, 1),
        np.inf,
    )
    least = np.where(index == 0, 0, np.inf)
    for _ in range(clusters):
        least = (least[:, None] + costs).min(0)
    return least[-1]


@given(st.data(), st.integers(1, 3), st.integers(1, 40))
def test_no_cluster_is_ever_empty(data, samples, tokens):
    number = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-1, 1, width=32))
    rows = data.draw(st.lists(st.tuples(number, number), min_size=tokens, max_size=tokens))
    features = torch.tensor(rows).repeat(samples, 1, 1)
    features[1:] = features[1:].roll(1, 2)
    clusters = data.draw(st.integers(1, tokens))
    slots = cluster(features, clusters).slots()
    for row, own in zip(features, slots, strict=True):
        assert own.unique().tolist() == [*range(clusters)]
        assert torch.equal(cluster(row[None], clusters).slots()[0], own)


@pytest.mark.parametrize("value", [0.0, 1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maps_without_differences_or_numbers_have_a_plan(value, dtype):
    features = torch.full((2, 35, 4), value, dtype=dtype)
    assert torch.isfinite(similarity_to_mean(features)).all()
    plan = cluster(features, 11)
    for sample in plan.slots():
        assert sample.unique().tolist() == list(range(11))
    assert torch.isfinite(plan.log_sizes).all()


def test_hardly_a_token_of_a_large_map_is_nearer_to_another_cluster_in_float64():
    """A float32 sum over 65,536 tokens is coarser than the distances between them."""
    features = map_of(256, 0)[:1]
    (values,) = sorted_values(features).double().numpy() * UNIT
    (own,) = edges_of(cluster(features, 16384))
    assert squares(values, own) < 1.01 * squares(values, brute_force_step(values, own))


@pytest.mark.parametrize(
    ("side", "ratio"), [(8, 0.5), (12, 0.5), (16, 0.5), (12, 0.25), (12, 0.75)]
)
def test_the_sum_of_squares_is_near_the_least_and_below_that_of_lloyd_alone(side, ratio):
    """Of small maps, on average."""
    clusters = side**2 - int(side**2 * ratio)
    to_best, to_lloyd = [], []
    for seed in range(8):
        features = map_of(side, seed)
        exact = sorted_values(features).double().numpy() * UNIT
        for row, own in zip(exact, edges_of(cluster(features, clusters)), strict=True):
            to_best.append(squares(row, own) / least_squares(row, clusters))
            to_lloyd.append(squares(row, own) / squares(row, lloyd(row, clusters)))
    assert min(to_best) > 1 - 1e-6
    assert np.mean(to_best) <= 1.05
    assert max(to_lloyd) < 1


def test_clusters_are_intervals_of_the_cosine_to_the_mean():
    features = map_of(9, 0)
    plan = plan_of(ToMeConfig(strategy="cluster", ratio=0.5), features, Grid(9, 9))
    assert plan.slot_count == 81 - 40
    assert plan_of(ToMeConfig(strategy="cluster", ratio=0.01), features, Grid(9, 9)) is None
    exact = features.double()
    mean = exact.mean(1, keepdim=True)
    cosines = (exact * mean).sum(2) / exact.norm(dim=2) / mean.norm(dim=2)
    for slots, row in zip(plan.slots(), cosines, strict=True):
        in_order = slots[row.argsort()]
        assert in_order.tolist() == in_order.sort().values.tolist()


def test_each_sample_has_clusters_of_its_own_wherever_its_tokens_are():
    features = map_of(8, 1)
    both = cluster(features, 30)
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    other = cluster(features[1:, shuffled], 30)
    moved = {frozenset(shuffled[[*group]].tolist()) for group in groups(other, 0)}
    assert groups(both, 0) != groups(both, 1) == moved
    video = Grid(4, 4, 4)
    assert groups(plan_of(ToMeConfig(strategy="cluster"), features, video), 0) == groups(
        cluster(features, 64 - int(64 * 0.6)), 0
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_compared_in_full(dtype):
    """Rounded to half precision, most similarities would be equal."""
    features = map_of(16, 2).to(dtype)
    exact = features.double()
    expected = F.cosine_similarity(exact, exact.mean(1, keepdim=True), dim=2)
    torch.testing.assert_close(similarity_to_mean(features).double(), expected, rtol=0, atol=1e-6)
    assert groups(cluster(features, 128), 0) == groups(cluster(features.float(), 128), 0)
