"""Plans against a float64 brute force, over shapes, dtypes and partitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tome_nodes.ops import TORCH, reference
from tome_nodes.strategies.plan import Plan

HEADS = (1, 2, 5)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


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


def plan_of(owners, ops=TORCH, device="cpu"):
    return Plan.from_owners(torch.tensor(owners, device=device), len(set(owners[0])), ops)


def surrounded(x):
    """A view equal to ``x`` with unusual strides, surrounded by NaN."""
    batch, tokens, channels = x.shape
    store = x.new_full((channels + 2, 2 * tokens + 1, batch + 1), torch.nan)
    view = store.permute(2, 1, 0)[1:, 1::2, 1:-1]
    return view.copy_(x)


def brute_force_merge(owners, x):
    """Mean of the tokens of each owner, owners in order; float64."""
    merged = []
    for row, tokens in zip(torch.tensor(owners), x.double(), strict=True):
        merged.append(torch.stack([tokens[row == owner].mean(0) for owner in row.unique()]))
    return torch.stack(merged)


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


def check_merge(plan, owners, channels, dtype):
    """Slots merge to their mean, and each of their tokens gets back that or its change."""
    device = plan.slot_of_token.device
    x = torch.randn(len(owners), len(owners[0]), channels, generator=seeded(1)).to(device, dtype)
    merged = plan.merge(surrounded(x))
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-2 * 2**-7}
    assert_close(merged.double().cpu(), brute_force_merge(owners, x.cpu()), **close)
    slots = torch.stack([row.unique(return_inverse=True)[1] for row in torch.tensor(owners)])
    own = torch.stack([means[at] for means, at in zip(merged, slots.to(device), strict=True)])
    assert torch.equal(plan.unmerge(surrounded(merged)), own)
    changed = plan.add_change(surrounded(x), surrounded(merged), 2 * merged)
    assert merged.dtype == changed.dtype == dtype
    assert_close(changed.double(), x.double() + own.double(), **close)
    return x, merged


@given(partitions(), st.integers(1, 5), st.sampled_from(DTYPES))
def test_slots_merge_to_their_mean_and_get_back_that_or_its_change(owners, channels, dtype):
    plan = plan_of(owners)
    x, merged = check_merge(plan, owners, channels, dtype)
    assert torch.equal(plan.add_change(x, merged, merged), x)


@given(partitions())
def test_devices_without_a_bag_kernel_get_the_same_means(owners):
    x = torch.randn(len(owners), len(owners[0]), 3, generator=seeded(2))
    plan = plan_of(owners)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_BAG_DEVICES", frozenset())
        merged = plan.merge(x)
    assert_close(merged.double(), brute_force_merge(owners, x), rtol=1e-6, atol=1e-6)


@given(partitions(), st.sampled_from(HEADS), st.integers(1, 17), st.sampled_from(DTYPES))
def test_each_head_of_a_key_is_as_long_as_its_tokens_are_on_average(owners, heads, channels, dtype):
    plan = plan_of(owners)
    x = torch.randn(*plan.slot_of_token.shape, heads * channels, generator=seeded(4)).to(dtype)
    means, keys = reference.merge_keys(x, plan.slot_of_token, plan.order, plan.offsets, heads)
    assert torch.equal(means, plan.merge(x)) and keys.dtype == dtype
    # Means and lengths are rounded before they are multiplied.
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-5}
    assert_close(keys.double(), brute_force_keys(owners, x, heads), **close)
    if heads == 1:
        own_means, own_keys = plan.merge_keys(x)
        assert torch.equal(own_means, means) and torch.equal(own_keys, keys)
