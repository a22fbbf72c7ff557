"""The other strategies, each compared with a straightforward version of its definition."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from test_bipartite import brute_force_windows, features_of, grids, groups, plan_of
from torch.testing import assert_close

from tome_nodes.merging.plan import Grid
from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.strategies import strategy_class
from tome_nodes.strategies.cells import frames_of_cell
from tome_nodes.strategies.window import match_windows, split_windows

cell_sides = st.sampled_from([1, 2, 3, 8])
videos = st.builds(Grid, st.integers(2, 9), st.integers(2, 9), st.integers(2, 9))


@given(
    st.sampled_from([*OPTIONS["strategy"].choices]),
    st.one_of(grids, videos),
    st.tuples(cell_sides, cell_sides),
    st.sampled_from([0.05, 0.5, 0.75, 0.95]),
    st.integers(1, 3),
)
def test_every_strategy_makes_a_partition_and_merges_means(strategy, grid, cell, ratio, batch):
    sx, sy = cell
    if sx * sy == 1:
        sx = 2
    features = features_of(grid, batch)
    config = ToMeConfig(strategy=strategy, ratio=ratio, sx=sx, sy=sy)
    plan = plan_of(config, features, grid)
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


@given(grids, cell_sides, cell_sides, st.integers(0, 99), st.floats(0, 1))
def test_a_window_matches_as_the_paper_does_within_it(grid, sx, sy, seed, share):
    if sx * sy == 1:
        sx = 2
    features = features_of(grid, seed=seed)
    picks = torch.zeros(grid.cells(sy, sx).tokens, dtype=torch.int64)
    if not len(picks):
        return
    src, dst = split_windows(grid, sy, sx, picks)
    quota = max(1, int(share * src.shape[1]))
    plan = match_windows(features, src, dst, quota)
    assert plan.slot_count == grid.tokens - len(src) * quota
    for sample, values in enumerate(features):
        assert groups(plan, sample) == brute_force_windows(values, src, dst, quota)


@given(st.integers(2, 160), cell_sides, cell_sides)
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


@pytest.mark.parametrize(("sy", "sx"), [(2, 2), (2, 4), (8, 8)])
def test_windows_of_a_usual_map_are_16_by_16_tokens(sy, sx):
    grid = Grid(64, 64)
    cells = 256 // (sy * sx)
    src, dst = split_windows(grid, sy, sx, torch.zeros(16 * cells, dtype=torch.int64))
    assert src.shape == (16, 256 - cells) and dst.shape == (16, cells)
    first = sorted([*src[0].tolist(), *dst[0].tolist()])
    assert first == [row * 64 + column for row in range(16) for column in range(16)]


def test_window_and_global_matching_merge_the_same_number():
    grid = Grid(64, 64)
    features = features_of(grid, channels=8)
    for ratio in (0.25, 0.5, 0.75):
        window = plan_of(ToMeConfig(strategy="window", ratio=ratio), features, grid)
        paper = plan_of(ToMeConfig(strategy="bipartite", ratio=ratio), features, grid)
        assert window.slot_count == paper.slot_count


@pytest.mark.parametrize("strategy", ["bipartite", "window"])
@pytest.mark.parametrize(("sx", "cap"), [(2, 0.75), (4, 0.875)])
def test_one_token_of_each_cell_always_stays(strategy, sx, cap):
    config = ToMeConfig(strategy=strategy, ratio=0.95, sx=sx)
    assert strategy_class(config).ratio_cap(config) == cap
    plan = plan_of(config, features_of(Grid(8, 8)), Grid(8, 8))
    assert 1 - plan.slot_count / 64 == cap


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
