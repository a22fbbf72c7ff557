"""ToMA's method of the benchmarks against its definition, by brute force in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.speed.toma import TomaStrategy, chosen, toma_config
from tome_nodes.merging.layout import Grid
from tome_nodes.ops import TORCH

GRID = Grid(10, 16)
TILE = (5, 8)


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make(features, grid=GRID, ratio=0.5):
    strategy = TomaStrategy(toma_config(ratio), TORCH)
    strategy.begin(torch.tensor(1))
    return strategy.plan(features, grid, ratio)


def likeness(tokens, others):
    """The sum over tokens of one more than the cosine to the nearest of the others."""
    total = 0.0
    for token in tokens:
        cosines = [token @ other / (token.norm() * other.norm()) for other in others]
        total += 1 + max(map(float, cosines), default=-1.0)
    return total


@given(count=st.integers(1, 7), channels=st.integers(1, 3), seed=st.integers(0, 50))
def test_each_destination_adds_most_likeness(count, channels, seed):
    tokens = random(2, 7, channels, seed=seed)
    unit = torch.nn.functional.normalize(tokens, dim=2)
    similarity = unit @ unit.mT
    before = chosen(similarity, count - 1) if count > 1 else torch.empty(2, 0, dtype=torch.int64)
    for own, earlier, now in zip(tokens, before, chosen(similarity, count), strict=True):
        assert now.tolist() == sorted(set(now.tolist()))
        (choice,) = set(now.tolist()) - set(earlier.tolist())
        sums = {
            index: likeness(own, own[[*earlier.tolist(), index]])
            for index in range(7)
            if index not in earlier
        }
        assert sums[choice] == pytest.approx(max(sums.values()), abs=1e-9)


def tile_of(token):
    row, column = divmod(token, GRID.width)
    return row // TILE[0], column // TILE[1]


def test_the_matrices_are_softmax_attention_within_tiles():
    features = random(2, GRID.tokens, 6)
    plan = make(features)
    assert plan.slot_count == GRID.tokens // 2
    identity = torch.eye(GRID.tokens, dtype=torch.float64).expand(2, -1, -1)
    merging = plan.merge(identity)
    unmerging = plan.unmerge(torch.eye(plan.slot_count, dtype=torch.float64).expand(2, -1, -1))
    places = plan.tokens()
    for sample, kept in enumerate(places.tolist()):
        expected = torch.zeros(plan.slot_count, GRID.tokens, dtype=torch.float64)
        for token in range(GRID.tokens):
            own = [slot for slot, place in enumerate(kept) if tile_of(place) == tile_of(token)]
            assert len(own) == TILE[0] * TILE[1] // 2
            products = [features[sample, kept[slot]] @ features[sample, token] for slot in own]
            powers = [math.exp(float(each) / 6**0.5) for each in products]
            for slot, power in zip(own, powers, strict=True):
                expected[slot, token] = power / sum(powers)
        assert torch.allclose(unmerging[sample], expected.T, atol=1e-6)
        rows = expected / expected.sum(1, keepdim=True)
        assert torch.allclose(merging[sample], rows, atol=1e-6)
        assert torch.equal(plan.slots()[sample], expected.argmax(0))
        sizes = plan.log_sizes()[sample].double().exp()
        assert torch.allclose(sizes, expected.sum(1), rtol=1e-5)
    assert torch.allclose(merging.sum(2), torch.ones(2, plan.slot_count, dtype=torch.float64))


@pytest.mark.parametrize("grid", [GRID, Grid(6, 8, frames=3), Grid(11, 8)])
def test_identical_tokens_merge_and_unmerge_without_loss(grid):
    features = random(2, 1, 5).expand(-1, grid.tokens, -1)
    plan = make(features, grid)
    assert plan.fits(features)
    merged = plan.merge(features)
    assert merged.shape == (2, plan.slot_count, 5)
    assert plan.slot_count == grid.tokens // 2
    assert torch.allclose(plan.unmerge(merged), features, atol=1e-6)


def test_what_cannot_be_cut_into_tiles_does_not_merge():
    assert make(random(1, 11 * 13, 4), Grid(11, 13)) is None
    assert make(random(1, GRID.tokens, 4), ratio=0.0) is None


def plans_of_run(strategy, steps, seed):
    """The plans of a run that asks for one every five steps, each of other features."""
    plans = []
    for step in range(steps):
        # As for a positive and a negative prompt.
        for _ in range(2):
            strategy.begin(torch.tensor(100 + step))
        if step % 5 == 0:
            plans.append(strategy.plan(random(1, GRID.tokens, 6, seed=seed + step), GRID, 0.5))
    return plans


def test_destinations_stay_for_ten_steps_and_the_matrix_does_not():
    first, second, third = plans_of_run(TomaStrategy(toma_config(0.5), TORCH), 11, 0)
    assert torch.equal(first.tokens(), second.tokens())
    assert not torch.equal(first.weights, second.weights)
    assert not torch.equal(second.tokens(), third.tokens())


@pytest.mark.parametrize("steps", [2, 6, 11])
def test_another_run_does_not_depend_on_the_one_before(steps):
    used, fresh = (TomaStrategy(toma_config(0.5), TORCH) for _ in range(2))
    plans_of_run(used, steps, 50)
    both = [plans_of_run(each, 11, 0) for each in (used, fresh)]
    for own, expected in zip(*both, strict=True):
        assert torch.equal(own.tokens(), expected.tokens())
        assert torch.equal(own.weights, expected.weights)
