"""Clusters by likeness to the mean, against k-means by brute force in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_strategies import features_of, groups, plan_of

from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import cluster as clusters_of
from tome_nodes.strategies.cluster import UNIT, cluster, k_means, lloyd_step, similarity_to_mean
from tome_nodes.strategies.plan import Grid

few_values = st.sampled_from([-(2**30), -1, 0, 1, 2, 2**30])
any_values = st.integers(-(2**30), 2**30)


def map_of(side, seed):
    """A smooth map with some noise: two samples of 16 channels."""
    coarse = torch.randn(2, 16, 5, 5, generator=torch.Generator().manual_seed(seed))
    smooth = F.interpolate(coarse, (side, side), mode="bilinear").flatten(2).mT
    return smooth + 0.5 + 0.1 * features_of(Grid(side, side), 2, 16, seed)


def sorted_values(features):
    return (similarity_to_mean(features) / UNIT).round().long().sort(dim=1).values


def squares(values, edges):
    parts = np.split(values, edges[1:-1])
    return sum(((part - part.mean()) ** 2).sum() for part in parts)


def brute_force_step(values, edges):
    """Assign each value to the nearest mean, of two the lower; in float64, value by value."""
    means = np.array([part.mean() for part in np.split(values, edges[1:-1])])
    nearest = np.abs(values[:, None] - means).argmin(1)
    return np.searchsorted(nearest, np.arange(len(edges)))


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
    row = st.one_of(st.tuples(*[values] * tokens) for values in (few_values, any_values))
    rows = data.draw(st.tuples(*[row] * samples))
    clusters = data.draw(st.integers(1, tokens))
    values = torch.tensor(rows).sort(dim=1).values
    edges = k_means(values, clusters)
    assert edges.shape == (len(rows), clusters + 1)
    assert (edges[:, 0] == 0).all() and (edges[:, -1] == values.shape[1]).all()
    assert (edges.diff(dim=1) > 0).all()
    for row, own in zip(values, edges, strict=True):
        assert torch.equal(k_means(row[None], clusters)[0], own)


@pytest.mark.parametrize("value", [0.0, 1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maps_without_differences_or_numbers_have_a_plan(value, dtype):
    features = torch.full((2, 35, 4), value, dtype=dtype)
    assert torch.isfinite(similarity_to_mean(features)).all()
    plan = cluster(features, 11)
    for sample in plan.slots():
        assert sample.unique().tolist() == list(range(11))
    assert torch.isfinite(plan.log_sizes).all()


def test_a_step_on_a_large_map_is_that_of_lloyd_in_float64():
    """A float32 sum over 65,536 tokens is coarser than the distances between them."""
    generator = torch.Generator().manual_seed(0)
    similarity = torch.rand(1, 65536, generator=generator).sort(dim=1).values
    values = (similarity / UNIT).round().long()
    edges = torch.arange(0, 65537, 4)[None]
    sums = F.pad(values.cumsum(1), (1, 0))
    step = lloyd_step(values, clusters_of.means_of(sums, edges))
    means = values.double().view(-1, 4).mean(1).numpy()
    expected = np.searchsorted(values[0].numpy(), (means[1:] + means[:-1]) / 2, side="right")
    assert step[0, 1:-1].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("side", "ratio"), [(8, 0.5), (12, 0.5), (16, 0.5), (12, 0.25), (12, 0.75)]
)
def test_the_sum_of_squares_is_near_the_least_and_below_that_of_lloyd_alone(side, ratio):
    """Of small maps, on average; Lloyd's algorithm goes on in float64 until no value moves."""
    clusters = side**2 - int(side**2 * ratio)
    to_best, to_lloyd = [], []
    for seed in range(8):
        values = sorted_values(map_of(side, seed))
        ours, starts = k_means(values, clusters), clusters_of.first_edges(values, clusters)
        exact = values.double().numpy() * UNIT
        for row, own, edges in zip(exact, ours.numpy(), starts.numpy(), strict=True):
            while (np.diff(moved := brute_force_step(row, edges)) > 0).all():
                if np.array_equal(moved, edges):
                    break
                edges = moved
            to_best.append(squares(row, own) / least_squares(row, clusters))
            to_lloyd.append(squares(row, own) / squares(row, edges))
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
