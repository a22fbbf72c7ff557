"""The strategies against brute force; the tests of hosts compare the paper's with tomesd."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch.testing import assert_close

from tome_nodes.ops import TORCH
from tome_nodes.ops.random_picks import pick_per_cell, step_key
from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.settings.policy import EVEN, Growth, Policy
from tome_nodes.strategies import bipartite, make_strategy, strategy_class
from tome_nodes.strategies.bipartite import split_tokens
from tome_nodes.strategies.cells import frames_of_cell
from tome_nodes.strategies.plan import Grid
from tome_nodes.strategies.window import match_windows, pieces_of, split_windows

grids = st.builds(Grid, st.integers(1, 9), st.integers(1, 9), st.just(1))
cell_sides = st.integers(1, 3)
sides = st.sampled_from([1, 2, 3, 8])
videos = st.builds(Grid, st.integers(2, 9), st.integers(2, 9), st.integers(2, 9))


def features_of(grid, batch=2, channels=6, seed=0):
    return torch.randn(batch, grid.tokens, channels, generator=torch.Generator().manual_seed(seed))


def plan_of(config, features, grid, step=0, ops=TORCH):
    strategy = make_strategy(config, ops)
    strategy.begin(torch.tensor(step_key(config.seed, step), device=features.device))
    return strategy.plan(features, grid, config.ratio)


def groups(plan, sample):
    slots = plan.slots()[sample]
    return {frozenset((slots == slot).nonzero().flatten().tolist()) for slot in slots.unique()}


def brute_force_groups(features, src, dst, merges):
    """The paper's grouping of one sample, in float64, pair by pair."""
    features = features.double()
    unit = features / features.norm(dim=1, keepdim=True)
    best = []
    for token, row in zip(src, (unit[src] @ unit[dst].mT).tolist(), strict=True):
        similarity, owner = max(zip(row, dst, strict=True))
        best.append((similarity, token, owner))
    best.sort(reverse=True)
    merged = {token: {token} for token in (*src, *dst)}
    for _, token, owner in best[:merges]:
        merged[owner] |= merged.pop(token)
    return {frozenset(group) for group in merged.values()}


def brute_force_windows(features, src, dst, merges):
    """The grouping of one sample where every window, a row of tokens, merges so many."""
    inside = {*src.flatten().tolist(), *dst.flatten().tolist()}
    merged = {frozenset([token]) for token in set(range(len(features))) - inside}
    for window in zip(src.tolist(), dst.tolist(), strict=True):
        merged |= brute_force_groups(features, *window, merges)
    return merged


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
    grid = Grid(16, 16)
    features = features_of(grid)
    whole = plan_of(ToMeConfig(), features, grid)
    monkeypatch.setattr(bipartite, "_SCORES_AT_ONCE", 1000)
    assert torch.equal(plan_of(ToMeConfig(), features, grid).slots(), whole.slots())


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


@given(
    st.sampled_from([*OPTIONS["strategy"].choices]),
    st.one_of(grids, videos),
    st.tuples(sides, sides),
    st.sampled_from([0.05, 0.5, 0.75, 0.95]),
    st.integers(1, 3),
)
def test_every_strategy_makes_a_partition_and_merges_means(strategy, grid, cell, ratio, batch):
    sx, sy = cell
    if sx * sy == 1:
        sx = 2
    features = features_of(grid, batch)
    config = ToMeConfig(strategy=strategy, ratio=ratio, sx=sx, sy=sy)
    plan, foretold = (
        plan_of(config, features, grid),
        make_strategy(config, TORCH).slots(grid, ratio),
    )
    assert foretold == (grid.tokens if plan is None else plan.slot_count)
    if plan is None:
        return
    # Unmerging the numbers of the slots gives each token's slot, for any kind of plan.
    numbers = torch.arange(plan.slot_count).float().expand(batch, -1)[..., None]
    slots = plan.unmerge(numbers)[..., 0].long()
    assert plan.slot_count < grid.tokens
    for sample in slots:
        assert sample.unique().tolist() == list(range(plan.slot_count))
    belongs = F.one_hot(slots).mT.double()
    means = belongs @ features.double() / belongs.sum(2, keepdim=True)
    assert_close(plan.merge(features).double(), means, rtol=1e-5, atol=1e-5)


@given(grids, sides, sides, st.integers(0, 99), st.floats(0, 1))
def test_a_window_matches_as_the_paper_does_within_it(grid, sx, sy, seed, share):
    if sx * sy == 1:
        sx = 2
    features = features_of(grid, seed=seed)
    picks = torch.zeros(grid.cells(sy, sx).tokens, dtype=torch.int64)
    if not len(picks):
        return
    src, dst = split_windows(grid, sy, sx, picks)
    quota = max(1, int(share * src.shape[1]))
    plan = match_windows(features, pieces_of(features, src, dst), quota)
    assert plan.slot_count == grid.tokens - len(src) * quota
    for sample, values in enumerate(features):
        assert groups(plan, sample) == brute_force_windows(values, src, dst, quota)


@given(st.integers(2, 160), sides, sides)
@example(24, 8, 1)
def test_windows_cover_most_of_a_map(height, sy, sx):
    grid = Grid(height, 64)
    cells = grid.cells(sy, sx)
    if not cells.tokens:
        return
    src, dst = split_windows(grid, sy, sx, torch.zeros(cells.tokens, dtype=torch.int64))
    tokens = torch.cat([src.flatten(), dst.flatten()])
    assert len(tokens.unique()) == len(tokens)
    assert src.shape[1] + dst.shape[1] <= 16 * 16
    covered = len(tokens) / (cells.tokens * sy * sx)
    assert covered >= (7 / 8) ** 2
    if height % 16 == 0 and 8 % sy == 8 % sx == 0:
        assert covered == 1


@pytest.mark.parametrize("strategy", ["bipartite", "window"])
def test_what_stands_still_merges_over_frames(strategy):
    """Cells of four frames by two tokens have two places; a token stays at one of them."""
    grid = Grid(6, 8, 4)
    still = torch.randn(1, grid.height * grid.width, 16, generator=torch.Generator().manual_seed(0))
    features = still.repeat(1, grid.frames, 1)
    plan = plan_of(ToMeConfig(strategy=strategy, ratio=0.375), features, grid)
    assert plan.slot_count == 0.625 * grid.tokens
    slots = plan.slots()[0].view(grid.frames, -1)
    places = torch.arange(slots.shape[1]).expand_as(slots)
    for slot in slots.unique():
        assert len(places[slots == slot].unique()) == 1


@pytest.mark.parametrize(
    ("frames", "length"),
    [(2, 2), (3, 3), (4, 4), (5, 5), (6, 3), (7, 3), (8, 4), (15, 5), (20, 4), (24, 4), (30, 5)],
)
def test_as_few_frames_as_possible_are_outside_cells(frames, length):
    assert frames_of_cell(frames) == length
    wide = ToMeConfig(strategy="window", sx=4)
    assert strategy_class(wide).ratio_cap(wide, frames) == 1 - 1 / (2 * length)
    assert strategy_class(wide).ratio_cap(wide) == 0.875


ratios = st.integers(0, 95).map(lambda percent: percent / 100)
tokens = st.integers(1, 512 * 512)
growths = st.builds(Growth, st.floats(0.1, 1.0), st.sampled_from([32 * 32, 64 * 64]))


@given(ratios, tokens, growths)
def test_a_larger_map_merges_more_and_a_small_one_the_ratio(ratio, tokens, growth):
    share = growth.share(ratio, tokens)
    assert ratio <= share <= growth.share(ratio, 2 * tokens) <= 1
    assert share <= growth.share(min(0.95, ratio + 0.01), tokens)
    # Without jumps, so that a picture a few pixels wider is not another one.
    assert growth.share(ratio, tokens + 1) - share < 0.02
    assert growth.share(0.0, tokens) == 0
    if tokens <= growth.tokens:
        assert share == ratio
    assert EVEN.share(ratio, tokens) == ratio


@pytest.mark.parametrize(
    ("ratio", "side", "cell"),
    [(0.6, 64, (2, 4)), (0.9, 64, (4, 4)), (0.6, 128, (2, 4)), (0.75, 128, (4, 4))],
)
def test_cells_are_as_large_as_the_share_of_a_map_needs(ratio, side, cell):
    policy = Policy(larger_cells=((4, 4), (4, 8), (8, 8)))
    config = ToMeConfig(strategy="window", ratio=ratio, sx=4, policy=policy)
    grid = Grid(side, side)
    share = Growth(0.76, 64 * 64).share(ratio, grid.tokens)
    cells = make_strategy(config, TORCH).cells_of(grid, share)
    assert (cells.sy, cells.sx) == cell
    growing = replace(config, ratio=share)
    plan = plan_of(growing, features_of(grid, batch=1, channels=4), grid)
    assert plan.slot_count == pytest.approx(grid.tokens * (1 - share), rel=0.02)
    fixed = ToMeConfig(strategy="window", ratio=ratio, sx=4)
    assert plan_of(fixed, features_of(grid, 1, 4), grid).slot_count == pytest.approx(
        grid.tokens * (1 - min(ratio, 0.875)), rel=0.02
    )
