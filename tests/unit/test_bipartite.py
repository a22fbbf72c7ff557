"""Bipartite matching against a float64 brute force; the tests of hosts compare it with tomesd."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tome_nodes.merging.plan import Grid
from tome_nodes.ops import TORCH
from tome_nodes.ops.random_picks import pick_per_cell, step_key
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy
from tome_nodes.strategies.bipartite import BipartiteStrategy, match, split_tokens

grids = st.builds(Grid, st.integers(1, 9), st.integers(1, 9), st.just(1))
cell_sides = st.integers(1, 3)


def features_of(grid, batch=2, channels=6, seed=0):
    return torch.randn(batch, grid.tokens, channels, generator=torch.Generator().manual_seed(seed))


def plan_of(config, features, grid, step=0, ops=TORCH):
    strategy = make_strategy(config, ops)
    strategy.begin(torch.tensor(step_key(config.seed, step), device=features.device))
    return strategy.plan(features, grid, config.ratio)


def groups(plan, sample):
    """The partition of a sample's tokens, as a set of sets."""
    found = {}
    for token, slot in enumerate(plan.slots()[sample].tolist()):
        found.setdefault(slot, set()).add(token)
    return {frozenset(group) for group in found.values()}


def brute_force_groups(features, src, dst, merges):
    """The paper's grouping of one sample, in float64, pair by pair."""
    features = features.double()
    unit = features / features.norm(dim=1, keepdim=True)
    best = []
    for token, row in zip(src, (unit[src] @ unit[dst].mT).tolist(), strict=True):
        similarity, owner = max(zip(row, dst, strict=True))
        best.append((similarity, token, owner))
    best.sort(reverse=True)
    found = {token: {token} for token in (*src, *dst)}
    for _, token, owner in best[:merges]:
        found[owner] |= found.pop(token)
    return {frozenset(group) for group in found.values()}


def brute_force_windows(features, src, dst, merges):
    """The grouping of one sample in which each window, a row of tokens, merges so many."""
    inside = {*src.flatten().tolist(), *dst.flatten().tolist()}
    found = {frozenset([token]) for token in set(range(len(features))) - inside}
    for own_src, own_dst in zip(src.tolist(), dst.tolist(), strict=True):
        found |= brute_force_groups(features, own_src, own_dst, merges)
    return found


@given(grids, cell_sides, cell_sides, st.floats(0, 0.95), st.booleans(), st.integers(0, 99))
def test_plan_is_the_brute_force_grouping(grid, sx, sy, ratio, use_rand, seed):
    if sx * sy == 1:
        sx = 2
    config = ToMeConfig(ratio=ratio, sx=sx, sy=sy, use_rand=use_rand, seed=seed)
    features = features_of(grid, seed=seed)
    plan = plan_of(config, features, grid)
    cells = grid.cells(sy, sx)
    merges = min(int(grid.tokens * ratio), grid.tokens - cells.tokens)
    if not merges or not cells.tokens:
        assert plan is None
        return
    assert plan.slot_count == grid.tokens - merges
    picks = pick_per_cell(torch.tensor(step_key(seed, 0)), cells.height, cells.width, sy * sx)
    src, dst = split_tokens(grid, sy, sx, picks if use_rand else torch.zeros_like(picks))
    for sample in range(len(features)):
        expected = brute_force_groups(features[sample], src.tolist(), dst.tolist(), merges)
        assert groups(plan, sample) == expected


@given(grids, cell_sides, cell_sides, st.integers(0, 2**32))
def test_split_has_the_pick_of_each_whole_cell_as_dst_and_all_others_as_src(grid, sy, sx, key):
    cells = grid.cells(sy, sx)
    picks = pick_per_cell(torch.tensor(key & 0xFFFFFFFF), cells.height, cells.width, sy * sx)
    src, dst = split_tokens(grid, sy, sx, picks)
    assert sorted([*src.tolist(), *dst.tolist()]) == list(range(grid.tokens))
    corners = [
        row * sy * grid.width + column * sx
        for row in range(grid.height // sy)
        for column in range(grid.width // sx)
    ]
    assert dst.tolist() == [
        corner + pick // sx * grid.width + pick % sx
        for corner, pick in zip(corners, picks.tolist(), strict=True)
    ]


def test_large_maps_matched_in_pieces_have_the_same_plan(monkeypatch):
    from tome_nodes.strategies import bipartite

    grid = Grid(16, 16)
    features = features_of(grid)
    whole = plan_of(ToMeConfig(), features, grid)
    monkeypatch.setattr(bipartite, "_SCORES_AT_ONCE", 1000)
    assert torch.equal(plan_of(ToMeConfig(), features, grid).slots(), whole.slots())


def test_picks_depend_on_seed_step_and_grid_only():
    grid = Grid(16, 16)
    features = features_of(grid)

    def slots(features=features, step=0, **keys):
        return plan_of(ToMeConfig(**keys), features, grid, step).slots()

    torch.manual_seed(1)
    state = torch.get_rng_state()
    together = slots()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(slots(), together)
    assert torch.equal(torch.cat([slots(features[:1]), slots(features[1:])]), together)
    assert not torch.equal(slots(seed=1), together)
    assert not torch.equal(slots(step=1), together)


def test_picks_are_spread_evenly_over_cells_and_steps():
    cells, choices = Grid(64, 64), 4
    counts = torch.zeros(choices)
    together = torch.zeros(choices, choices)
    for step in range(50):
        picks = pick_per_cell(torch.tensor(step_key(7, step)), cells.height, cells.width, choices)
        counts += torch.bincount(picks, minlength=choices)
        pairs = picks[:-1] * choices + picks[1:]
        together += torch.bincount(pairs, minlength=choices**2).view(choices, choices)
    # Chi-square of 3 and 15 degrees of freedom exceeds these limits once in 10**6 draws.
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 31
    assert ((together - together.mean()) ** 2 / together.mean()).sum() < 56


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_features_still_give_a_partition(value):
    plan = plan_of(ToMeConfig(ratio=0.5), torch.full((1, 36, 4), value), Grid(6, 6))
    assert plan.slots().unique().tolist() == list(range(18))


def test_a_strategy_that_was_not_started_says_so():
    with pytest.raises(RuntimeError, match="begin must come before plan"):
        BipartiteStrategy(ToMeConfig(), TORCH).plan(torch.zeros(1, 16, 4), Grid(4, 4), 0.5)


def test_matching_carries_no_gradient():
    features = features_of(Grid(4, 4)).requires_grad_()
    src, dst = split_tokens(Grid(4, 4), 2, 2, torch.zeros(4, dtype=torch.int64))
    plan = match(features, src, dst, 8)
    plan.unmerge(plan.merge(features)).sum().backward()
    assert_close(features.grad, torch.ones_like(features))
