"""ToMA's method of the benchmarks against its definition, by brute force in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.speed.toma import MergedBlocks, chosen, positions_of, tile_plan
from tome_nodes.merging.layout import Grid

GRID = Grid(10, 16)
TILE = (5, 8)


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make(features, grid=GRID, before=None, ratio=0.5):
    return tile_plan(features, grid, before, ratio)


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
    """All samples merge alike, so the products are of the channels of all of them."""
    features = random(2, GRID.tokens, 3)
    plan = make(features)
    joint = features.transpose(0, 1).flatten(1)
    identity = torch.eye(GRID.tokens, dtype=torch.float64)[None]
    merging = plan.merge(identity)[0]
    kept = plan.tokens().tolist()
    unmerging = plan.unmerge(torch.eye(len(kept), dtype=torch.float64)[None])[0]
    assert len(kept) == len(set(kept)) == GRID.tokens // 2
    expected = torch.zeros(len(kept), GRID.tokens, dtype=torch.float64)
    for token in range(GRID.tokens):
        own = [slot for slot, place in enumerate(kept) if tile_of(place) == tile_of(token)]
        assert len(own) == TILE[0] * TILE[1] // 2
        powers = [math.exp(float(joint[kept[slot]] @ joint[token]) / 6**0.5) for slot in own]
        for slot, power in zip(own, powers, strict=True):
            expected[slot, token] = power / sum(powers)
    assert torch.allclose(unmerging, expected.T, atol=1e-6)
    assert torch.allclose(merging, expected / expected.sum(1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("grid", [GRID, Grid(11, 8), Grid(11, 13)])
def test_identical_tokens_merge_and_unmerge_without_loss(grid):
    features = random(2, 1, 5).expand(-1, grid.tokens, -1)
    plan = make(features, grid)
    merged = plan.merge(features)
    # What cannot be cut into tiles does not merge.
    assert merged.shape == (2, grid.tokens // (2 if grid.width % 2 == 0 else 1), 5)
    assert torch.allclose(plan.unmerge(merged), features, atol=1e-6)


def test_positions_are_those_of_text_and_destinations():
    plan = make(random(1, GRID.tokens, 4))
    positions = torch.arange(7 + GRID.tokens).view(1, 1, -1, 1)
    expected = [*range(7), *(plan.tokens() + 7).tolist()]
    assert positions_of(plan, positions, 2).flatten().tolist() == expected


def plans_of_run(blocks, steps, seed):
    """The plans of a run, by step; those of a positive and a negative prompt are alike."""
    plans = []
    for step in range(steps):
        both = []
        for part in ("positive", "negative"):
            blocks.begin(step, GRID, part)
            features = random(1, GRID.tokens, 6, seed=seed + step)
            both.append(blocks.plan(features))
            assert blocks.plan(features) is both[-1]
        assert torch.equal(both[0].weights, both[1].weights)
        plans.append(both[0])
    return plans


def test_destinations_stay_for_ten_steps_and_the_matrix_for_five():
    plans = plans_of_run(MergedBlocks(make), 11, 0)
    changed = [step for step in range(1, 11) if plans[step] is not plans[step - 1]]
    assert changed == [5, 10]
    first, second, third = plans[0], plans[5], plans[10]
    assert torch.equal(first.tokens(), second.tokens())
    assert not torch.equal(first.weights, second.weights)
    assert not torch.equal(second.tokens(), third.tokens())


@pytest.mark.parametrize("steps", [2, 6, 11])
def test_another_run_does_not_depend_on_the_one_before(steps):
    used, fresh = MergedBlocks(make), MergedBlocks(make)
    plans_of_run(used, steps, 50)
    both = [plans_of_run(each, 11, 0) for each in (used, fresh)]
    for own, expected in zip(*both, strict=True):
        assert torch.equal(own.tokens(), expected.tokens())
        assert torch.equal(own.weights, expected.weights)
