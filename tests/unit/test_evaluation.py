"""Which plans and what detail a run keeps from step to step, on a model of linear layers."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tome_nodes.merging.layout import Grid
from tome_nodes.patching.blocks import Reasons, Stack
from tome_nodes.patching.detail_cache import FADING, Details
from tome_nodes.patching.evaluation import Run
from tome_nodes.patching.merge_modules import UNetRecord
from tome_nodes.patching.outcome import Observer
from tome_nodes.patching.schedule import Moment
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy

GRID = Grid(4, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn1, self.attn2 = nn.Identity(), None
        self.ff = nn.Linear(3, 3)

    def forward(self, x):
        return x + self.ff(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def toy(batch=1):
    """The record of a model whose blocks have no attention, for tokens of a batch."""
    return UNetRecord(
        stacks=lambda model: [Stack("blocks", model.blocks, tuple(model.blocks))],
        reasons=Reasons("changed", "masked", "replaced"),
        attends_to_text=lambda block: True,
        needs_all_tokens=lambda *args: False,
        masks=(),
        shapes=lambda: ((batch, 3, GRID.height, GRID.width), None),
    )


class Noted(Observer):
    def __init__(self):
        self.results = []

    def evaluated(self, result):
        self.results.append(result)


def test_the_outcome_of_each_block_is_reported():
    noted, model = Noted(), Model()
    config = ToMeConfig(ratio=0.5, merge_attn=False, merge_mlp=True, min_tokens=1)
    run = Run(config, toy(), model, make_strategy, noted)
    x = torch.randn(1, GRID.tokens, 3)
    with torch.no_grad():
        for active, obstacle in ((True, None), (False, None), (True, "it may not")):
            moment = Moment(0, 0.0, 0, None, active)
            with run.evaluation(moment, GRID, x.device, x.dtype, obstacle):
                model(x)
    first, inactive, hindered = noted.results
    assert [(o.block, o.before, o.after, o.plans_made) for o in first.merged] == [
        ("blocks.0", 16, 8, 1),
        ("blocks.1", 16, 8, 1),
    ]
    assert inactive.merged == hindered.merged == []
    assert "covers no step" in inactive.reason and not inactive.is_active
    assert hindered.reason == "it may not" and hindered.is_active
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_evaluation_that_raises_is_not_reported_and_leaves_nothing():
    noted, model = Noted(), Model()
    config = ToMeConfig(ratio=0.5, merge_attn=False, merge_mlp=True, min_tokens=1)
    run = Run(config, toy(), model, make_strategy, noted)
    x = torch.zeros(1, GRID.tokens, 3)
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        run.evaluation(Moment(0, 0.0, 0, None, True), GRID, x.device, x.dtype),
    ):
        raise RuntimeError("on purpose")
    assert noted.results == []
    assert not any("forward" in vars(module) for module in model.modules())


def refreshed(moments, **settings):
    """The model's change without merging, and of each evaluation its change and its result."""
    noted, model = Noted(), Model().double()
    config = ToMeConfig(scope="stack", min_tokens=1, **settings)
    run = Run(config, toy(2), model, make_strategy, noted)
    x = torch.randn(2, GRID.tokens, 3, generator=torch.Generator().manual_seed(0)).double()
    changes = []
    with torch.no_grad():
        plain = model(x) - x
        for moment in moments:
            with run.evaluation(moment, GRID, x.device, x.dtype):
                changes.append(model(x) - x)
    return plain, list(zip(changes, noted.results, strict=True))


def with_fewer_details(change, plan, share):
    """A change whose differences from the mean of each slot are a share of what they were."""
    slots, expected = plan.slots(), change.clone()
    for sample, of_sample in enumerate(slots):
        for slot in of_sample.unique():
            mean = change[sample, of_sample == slot].mean(0)
            own = expected[sample, of_sample == slot]
            expected[sample, of_sample == slot] = mean + share * (own - mean)
    return expected


def steps_of(count, part="all"):
    return [
        Moment(step, 0.0, step, part, is_active=True, steps_left=count - 1 - step)
        for step in range(count)
    ]


def test_steps_between_those_on_all_tokens_keep_their_detail():
    plain, evaluations = refreshed(steps_of(7), ratio=0.5, refresh_steps=3)
    shares = [0, 0, 1, FADING, FADING**2, 1, FADING]
    for step, ((change, result), share) in enumerate(zip(evaluations, shares, strict=True)):
        if step in (2, 5):
            assert torch.equal(change, plain) and not result.merged and not result.is_active
            assert "refresh_steps" in result.reason
        else:
            plan = result.merged[0].plan
            assert (result.merged[0].before, plan.slot_count) == (16, 8)
            torch.testing.assert_close(change, with_fewer_details(plain, plan, share))


@pytest.mark.parametrize("settings", [{}, {"refresh_steps": 0}, {"refresh_steps": 9}], ids=str)
def test_without_a_step_on_all_tokens_there_is_no_detail(settings):
    plain, evaluations = refreshed(steps_of(20)[:2], ratio=0.5, **settings)
    for change, result in evaluations:
        plan = result.merged[0].plan
        torch.testing.assert_close(change, with_fewer_details(plain, plan, 0))


def test_a_host_that_does_not_know_the_last_step_counts_from_the_first():
    moments = [replace(moment, steps_left=None) for moment in steps_of(5)]
    _, evaluations = refreshed(moments, ratio=0.5, refresh_steps=2)
    assert [bool(result.merged) for _, result in evaluations] == [True, True, False, True, False]


def test_the_first_step_always_merges():
    _, evaluations = refreshed(steps_of(1), ratio=0.5, refresh_steps=1)
    assert evaluations[0][1].merged


def test_a_run_that_begins_with_a_picture_begins_on_all_tokens():
    moments = [replace(moment, from_noise=False) for moment in steps_of(6)]
    plain, evaluations = refreshed(moments, ratio=0.5, refresh_steps=4)
    merged = [bool(result.merged) for _, result in evaluations]
    assert merged == [False, True, True, True, False, True]
    change, result = evaluations[1]
    expected = with_fewer_details(plain, result.merged[0].plan, FADING)
    torch.testing.assert_close(change, expected)


def test_each_part_keeps_its_own_detail_and_only_some_do():
    runs = [steps_of(5, part) for part in range(20)]
    moments = [run[step] for step in range(5) for run in runs]
    plain, evaluations = refreshed(moments, ratio=0.5, refresh_steps=2)
    shares = [FADING] * 16 + [0] * 4
    for (change, result), share in zip(evaluations[2 * 20 : 3 * 20], shares, strict=True):
        plan = result.merged[0].plan
        torch.testing.assert_close(change, with_fewer_details(plain, plan, share))


def test_detail_does_not_grow_where_steps_are_counted_down():
    moments = [replace(moment, from_noise=False) for moment in steps_of(6)[::-1]]
    plain, evaluations = refreshed(moments, ratio=0.5, refresh_steps=4)
    # Two steps of the six are full, the last but one and the first; one step lies between.
    change, result = evaluations[2]
    expected = with_fewer_details(plain, result.merged[0].plan, FADING)
    torch.testing.assert_close(change, expected)


def test_parts_of_the_step_before_are_kept_and_older_ones_dropped():
    details = Details(ToMeConfig(scope="stack", refresh_steps=4))
    moments = [Moment(step, 0.0, step, part, True) for step, part in enumerate("aaba")]
    first, second, _, last = (details.at(moment, torch.device("cpu")) for moment in moments)
    assert first is second and last is not first


def test_overrides_follow_what_other_code_changes_between_evaluations():
    noted, model = Noted(), Model()
    config = ToMeConfig(ratio=0.5, merge_attn=False, merge_mlp=True, min_tokens=1)
    run = Run(config, toy(), model, make_strategy, noted)
    x = torch.randn(1, GRID.tokens, 3)

    def evaluate():
        with (
            torch.no_grad(),
            run.evaluation(Moment(0, 0.0, 0, None, True), GRID, x.device, x.dtype),
        ):
            return model(x)

    evaluate()
    lengths = []

    class Replaced(nn.Linear):
        def forward(self, x):
            lengths.append(x.shape[1])
            return super().forward(x)

    model.blocks[0].ff = Replaced(3, 3)
    evaluate()
    assert lengths == [8]
    own = model.blocks[1].forward
    model.blocks[1].forward = lambda x: own(x) + 1
    assert torch.equal(evaluate(), evaluate())
    merged = evaluate()
    del model.blocks[1].forward
    torch.testing.assert_close(evaluate() + 1, merged)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(len(result.merged) == 2 for result in noted.results)
