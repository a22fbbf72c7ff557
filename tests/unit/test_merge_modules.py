"""What runs on merged tokens, on modules small enough to follow."""

import torch
from torch.testing import assert_close

from tome_nodes.merging.plan import SlotPlan
from tome_nodes.patching.merge_modules import block_on_merged, module_on_merged

PLAN = SlotPlan.from_owners(torch.tensor([[0, 0, 2, 2], [0, 1, 1, 0]]), 2)
X = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))


def test_a_module_that_changes_nothing_leaves_the_means():
    first, second, third, fourth = X.unbind(1)
    pairs = [(first + second) / 2, (third + fourth) / 2]
    crossed = [(first + fourth) / 2, (second + third) / 2]
    expected = [
        [pairs[0][0], pairs[0][0], pairs[1][0], pairs[1][0]],
        [crossed[0][1], crossed[1][1], crossed[1][1], crossed[0][1]],
    ]
    actual = module_on_merged(lambda m: m, PLAN, X)
    assert_close(actual, torch.stack([torch.stack(tokens) for tokens in expected]))


def test_a_block_that_changes_nothing_leaves_every_token_as_it_was():
    assert torch.equal(block_on_merged(lambda m: m, PLAN, X), X)


def test_the_change_of_a_block_is_added_to_every_token_of_a_slot():
    change = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]).expand(2, 2, 3)
    expected = X + torch.tensor([[1.0, 1, 2, 2], [3, 4, 4, 3]])[..., None]
    assert_close(block_on_merged(lambda m: m + change, PLAN, X), expected)
