"""Pictures in a sequence: each merges within itself, and everything else stays."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_plan import brute_force_merge
from torch.testing import assert_close

from tome_nodes.merging.layout import Grid, Layout, Picture, Span
from tome_nodes.merging.plan import SlotPlan, plan_of_sequence

GRID = Grid(2, 3)


@st.composite
def layouts(draw):
    """Up to three pictures with text before, between and after them."""
    spans, place = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 3))):
        span = Span(place, Grid(draw(st.integers(1, 3)), draw(st.integers(1, 4))))
        spans.append(span)
        place = span.stop + draw(st.integers(0, 3))
    return Layout(place, tuple(spans))


def half(features, grid):
    """A plan of a picture with half of its tokens; None for one token."""
    if grid.tokens < 2:
        return None
    slots = grid.tokens // 2
    return SlotPlan.from_slots((torch.arange(grid.tokens) % slots).expand(len(features), -1), slots)


@given(layouts(), st.integers(1, 2))
def test_pictures_merge_and_everything_else_is_kept(layout, batch):
    x = torch.randn(batch, layout.length, 4, generator=torch.Generator().manual_seed(0))
    plan = plan_of_sequence(layout, x, half)
    merging = [span for span in layout.spans if span.grid.tokens > 1]
    if not merging:
        assert plan is None
        return
    kept = layout.length - sum(span.grid.tokens for span in merging)
    slots = [span.grid.tokens // 2 for span in merging]
    assert plan.slot_count == kept + sum(slots)
    assert plan.fits(x) and not plan.fits(x[:, 1:])
    assert [each.unique().tolist() for each in plan.slots()] == [
        list(range(plan.slot_count))
    ] * batch
    owners = plan.slots().tolist()
    merged = plan.merge(x)
    assert_close(merged.double(), brute_force_merge(owners, x), rtol=1e-5, atol=1e-6)
    unmerged = plan.unmerge(merged)
    in_picture = torch.zeros(layout.length, dtype=torch.bool)
    for span in merging:
        in_picture[span.start : span.stop] = True
    assert torch.equal(unmerged[:, ~in_picture], x[:, ~in_picture])
    sizes = torch.stack([torch.bincount(each) for each in plan.slots()])
    assert_close(plan.log_sizes().exp(), sizes.float())
    means, keys = plan.merge_inputs(x)
    assert torch.equal(means, merged) and torch.equal(keys, plan.merge_keys(x, 1))
    keys = plan.merge_keys(x, heads=2)
    lengths = brute_force_merge(owners, x.unflatten(2, (2, -1)).norm(dim=3))
    assert_close(keys.unflatten(2, (2, -1)).norm(dim=3).double(), lengths, rtol=1e-4, atol=1e-4)


def test_a_sequence_that_is_one_picture_has_the_plan_of_the_picture():
    x = torch.randn(1, 6, 2)
    assert isinstance(plan_of_sequence(Layout.filled_by(GRID), x, half), SlotPlan)


@pytest.mark.parametrize(
    ("length", "starts"), [(11, (0, 6)), (12, (0, 5)), (12, (-1, 6)), (5, (0,)), (20, (8, 0))]
)
def test_pictures_that_overlap_or_stick_out_are_refused(length, starts):
    with pytest.raises(ValueError, match=r"a picture of 6 tokens from -?\d+ on does not fit"):
        Layout(length, tuple(Span(start, GRID) for start in starts))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(2, 9))
def test_the_first_frame_of_a_video_merges_separately(height, width, frames):
    first, others = Grid(height, width, frames).parts
    assert first == Grid(height, width)
    assert others == Grid(height, width, frames - 1)


@pytest.mark.parametrize("at_end", [False, True])
def test_pictures_are_at_one_end_of_a_sequence(at_end):
    pictures = [Picture(Grid(2, 3), padding=2), Picture(Grid(1, 2, 4))]
    layout = Layout.of_pictures(20, pictures, at_end)
    start = 4 if at_end else 0
    assert layout.spans == (Span(start, Grid(2, 3)), Span(start + 8, Grid(1, 2, 4)))
    assert Layout.of_pictures(15, pictures, at_end) is None
    assert Layout.of_pictures(16, pictures, at_end).length == 16
