"""Plans against a float64 brute force, over shapes, dtypes and partitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tome_nodes.merging.layout import Grid
from tome_nodes.merging.plan import FramesPlan, SlotPlan
from tome_nodes.ops import reference
from tome_nodes.strategies.pool import PoolPlan

HEADS = (1, 2, 5)


@st.composite
def partitions(draw):
    """The owner of each token; the same number of tokens stays in each sample."""
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    stay = draw(st.integers(1, tokens))
    rows = []
    for _ in range(batch):
        owners = draw(st.permutations(range(tokens)))[:stay]
        row = [
            token if token in owners else draw(st.sampled_from(owners)) for token in range(tokens)
        ]
        rows.append(row)
    return rows


def brute_force_merge(owners, x):
    """Mean of the tokens of each owner, owners in order; float64."""
    x = x.double()
    return torch.stack(
        [
            torch.stack(
                [
                    torch.stack([x[b, t] for t, o in enumerate(row) if o == owner]).mean(0)
                    for owner in sorted(set(row))
                ]
            )
            for b, row in enumerate(owners)
        ]
    )


def brute_force_keys(owners, x, heads):
    """Means stretched to the average length of their tokens, head by head, in float64."""
    pieces = []
    for head in x.double().chunk(heads, dim=2):
        means = brute_force_merge(owners, head)
        lengths = brute_force_merge(owners, head.norm(dim=2, keepdim=True))
        # A mean of exactly 0 has no direction to stretch.
        norms = means.norm(dim=2, keepdim=True).clamp_min(1e-6)
        pieces.append(means * lengths / norms)
    return torch.cat(pieces, 2)


@given(partitions(), st.integers(1, 5), st.sampled_from(["float32", "float16", "bfloat16"]))
def test_slots_merge_to_their_mean_and_get_back_that_or_its_change(owners, channels, dtype):
    dtype = getattr(torch, dtype)
    batch, tokens, stay = len(owners), len(owners[0]), len(set(owners[0]))
    x = torch.randn(batch, tokens, channels, generator=torch.Generator().manual_seed(1)).to(dtype)
    plan = SlotPlan.from_owners(torch.tensor(owners), stay)
    merged = plan.merge(x)
    expected = brute_force_merge(owners, x)
    assert merged.dtype == dtype
    assert_close(merged.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-2 * 2**-7)
    unmerged = plan.unmerge(merged)
    assert torch.equal(plan.add_change(x, merged, merged), x)
    changed = plan.add_change(x, merged, 2 * merged)
    for b, row in enumerate(owners):
        slots = {owner: slot for slot, owner in enumerate(sorted(set(row)))}
        for token, owner in enumerate(row):
            own = merged[b, slots[owner]]
            assert torch.equal(unmerged[b, token], own)
            assert_close(changed[b, token], x[b, token] + own)


@given(partitions())
def test_devices_without_a_bag_kernel_get_the_same_means(owners):
    x = torch.randn(len(owners), len(owners[0]), 3, generator=torch.Generator().manual_seed(2))
    plan = SlotPlan.from_owners(torch.tensor(owners), len(set(owners[0])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_BAG_DEVICES", frozenset())
        merged = plan.merge(x)
    assert_close(merged.double(), brute_force_merge(owners, x), rtol=1e-6, atol=1e-6)


@given(
    partitions(),
    st.sampled_from(HEADS),
    st.integers(1, 17),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_each_head_of_a_key_is_as_long_as_its_tokens_are_on_average(owners, heads, channels, dtype):
    generator = torch.Generator().manual_seed(4)
    plan = SlotPlan.from_owners(torch.tensor(owners), len(set(owners[0])))
    x = torch.randn(*plan.slot_of_token.shape, heads * channels, generator=generator).to(dtype)
    means, keys = reference.merge_keys(x, plan.slot_of_token, plan.order, plan.offsets, heads)
    assert torch.equal(means, plan.merge(x)) and keys.dtype == dtype
    # Means and lengths are rounded before they are multiplied.
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-5}
    assert_close(keys.double(), brute_force_keys(owners, x, heads), **close)
    if heads == 1:
        own_means, own_keys, values = plan.merge_inputs(x)
        assert torch.equal(own_means, means) and torch.equal(own_keys, keys)
        assert values is own_means


def test_merging_a_strided_view_equals_merging_its_copy():
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))
    plan = SlotPlan.from_owners(torch.tensor([[0, 0, 2, 2, 4], [1, 1, 2, 3, 3]]), 3)
    view = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert not view.is_contiguous()
    assert torch.equal(plan.merge(view), plan.merge(x))
    merged = plan.merge(x)
    assert torch.equal(plan.unmerge(merged.mT.contiguous().mT), plan.unmerge(merged))


def test_fits_only_its_own_batch_and_tokens():
    plan = SlotPlan.from_owners(torch.tensor([[0, 0, 2, 2]]), 2)
    assert plan.fits(torch.zeros(1, 4, 8))
    assert not plan.fits(torch.zeros(2, 4, 8))
    assert not plan.fits(torch.zeros(1, 5, 8))
    assert not plan.fits(torch.zeros(4, 8))


@settings(max_examples=50)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 5), st.sampled_from([1, 2, 4, 8]))
def test_grid_is_within_the_levels_a_unet_reaches_by_halving(height, width, level, max_downsample):
    latent = Grid(height, width)
    for _ in range(level):
        height, width = (height + 1) // 2, (width + 1) // 2
    grid = Grid(height, width)
    if 2**level <= max_downsample:
        assert grid.is_within(latent, max_downsample)
    elif min(latent.height, latent.width) > 2**level:
        assert not grid.is_within(latent, max_downsample)


def test_either_side_of_a_grid_can_put_it_outside():
    assert not Grid(1, 2).is_within(Grid(1, 5), 2)
    assert not Grid(2, 1).is_within(Grid(5, 1), 2)
    assert Grid(1, 3).is_within(Grid(1, 5), 2)


def test_slots_of_pooling_differ_in_size_only_where_cells_are_cut():
    cpu = torch.device("cpu")
    assert PoolPlan.of(2, Grid(4, 6), 2, 2, cpu).is_even()
    plan = PoolPlan.of(2, Grid(3, 5), 2, 2, cpu)
    assert not plan.is_even()
    assert_close(plan.log_sizes().exp(), torch.tensor([[4.0, 4, 2, 2, 2, 1]]).expand(2, -1))


def test_a_pooled_key_is_mostly_the_first_token_of_its_cell():
    x = torch.arange(16.0).view(1, 16, 1)
    plan = PoolPlan.of(1, Grid(4, 4), 2, 2, torch.device("cpu"))
    means, keys, values = plan.merge_inputs(x)
    assert torch.equal(means, plan.merge(x))
    expected = 0.75 * torch.tensor([0.0, 2, 8, 10]) + 0.25 * means.flatten()
    for merged in (keys, values):
        assert_close(merged.flatten(), expected)


@given(partitions(), st.integers(1, 3))
def test_frames_merge_as_the_same_slots_of_a_whole_video(owners, videos):
    frames = len(owners)
    each = SlotPlan.from_owners(torch.tensor(owners * videos), len(set(owners[0])))
    plan = FramesPlan(frames, each)
    whole = SlotPlan.from_slots(plan.slots(), plan.slot_count)
    assert plan.slots().shape == (videos, frames * len(owners[0]))
    generator = torch.Generator().manual_seed(0)
    x, after = (
        torch.randn(videos, count, 6, generator=generator)
        for count in (plan.slots().shape[1], plan.slot_count)
    )
    assert plan.fits(x) and not plan.fits(x[:, 1:])
    assert_close(plan.log_sizes(), whole.log_sizes())
    merged = plan.merge(x)
    assert_close(merged, whole.merge(x))
    assert_close(plan.merge_keys(x, 2), whole.merge_keys(x, 2))
    assert_close(plan.merge_values(x), whole.merge_values(x))
    for own, others in zip(plan.merge_inputs(x), whole.merge_inputs(x), strict=True):
        assert_close(own, others)
    assert_close(plan.unmerge(after), whole.unmerge(after))
    assert_close(plan.add_change(x, merged, after), whole.add_change(x, merged, after))
