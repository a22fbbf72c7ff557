"""The operations in plain torch that merge keys, against float64 brute force."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from test_plan import brute_force_merge, partitions
from torch.testing import assert_close

from tome_nodes.merging.plan import SlotPlan
from tome_nodes.ops import reference

HEADS = (1, 2, 5)


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
