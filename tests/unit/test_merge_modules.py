"""What comes out of merged tokens, on a plan small enough to follow."""

import torch
from torch.testing import assert_close

from tome_nodes.merging.plan import SlotPlan

PLAN = SlotPlan.from_owners(torch.tensor([[0, 0, 2, 2], [0, 1, 1, 0]]), 2)
X = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))


def test_tokens_that_nothing_changes_become_the_means_of_their_slots():
    first, second, third, fourth = X.unbind(1)
    pairs = [(first + second) / 2, (third + fourth) / 2]
    crossed = [(first + fourth) / 2, (second + third) / 2]
    expected = [
        [pairs[0][0], pairs[0][0], pairs[1][0], pairs[1][0]],
        [crossed[0][1], crossed[1][1], crossed[1][1], crossed[0][1]],
    ]
    actual = PLAN.unmerge(PLAN.merge(X))
    assert_close(actual, torch.stack([torch.stack(tokens) for tokens in expected]))


def test_without_a_change_every_token_stays_as_it_was():
    merged = PLAN.merge(X)
    assert torch.equal(PLAN.add_change(X, merged, merged), X)


def test_the_change_of_a_slot_is_added_to_each_of_its_tokens():
    change = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]).expand(2, 2, 3)
    expected = X + torch.tensor([[1.0, 1, 2, 2], [3, 4, 4, 3]])[..., None]
    merged = PLAN.merge(X)
    assert_close(PLAN.add_change(X, merged, merged + change), expected)
