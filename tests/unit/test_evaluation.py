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


X = torch.randn(1, GRID.tokens, 3, generator=torch.Generator().manual_seed(0))


class Merging:
    """A model whose linear layers merge, with what is reported of its evaluations."""

    def __init__(self):
        noted, self.model = Noted(), Model()
        config = ToMeConfig(ratio=0.5, merge_attn=False, merge_mlp=True, min_tokens=1)
        self.run = Run(config, toy(), self.model, make_strategy, noted)
        self.results = noted.results

    @torch.no_grad()
    def __call__(self, is_active=True, obstacle=None):
        moment = Moment(0, 0.0, 0, None, is_active)
        with self.run.evaluation(moment, GRID, X.device, X.dtype, obstacle):
            return self.model(X)

    def has_overrides(self):
        return any("forward" in vars(module) for module in self.model.modules())


def test_the_outcome_of_each_block_is_reported():
    evaluate = Merging()
    for is_active, obstacle in ((True, None), (False, None), (True, "it may not")):
        evaluate(is_active, obstacle)
    first, inactive, hindered = evaluate.results
    assert [(o.block, o.before, o.after, o.plans_made) for o in first.merged] == [
        ("blocks.0", 16, 8, 1),
        ("blocks.1", 16, 8, 1),
    ]
    assert inactive.merged == hindered.merged == []
    assert "covers no step" in inactive.reason and not inactive.is_active
    assert hindered.reason == "it may not" and hindered.is_active
    assert not evaluate.has_overrides()


def test_an_evaluation_that_raises_is_not_reported_and_leaves_nothing():
    evaluate = Merging()

    def raises(*_):
        raise RuntimeError("on purpose")

    evaluate.model.register_forward_hook(raises)
    with pytest.raises(RuntimeError, match="on purpose"):
        evaluate()
    assert evaluate.results == []
    assert not evaluate.has_overrides()


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


@pytest.mark.parametrize(
    ("steps", "refresh_steps", "what_else", "merged"),
    [
        # A host that does not know the last step counts from the first.
        (5, 2, {"steps_left": None}, [True, True, False, True, False]),
        # The first step always merges.
        (1, 1, {}, [True]),
        # A run that begins with a picture begins on all tokens.
        (6, 4, {"from_noise": False}, [False, True, True, True, False, True]),
    ],
)
def test_which_steps_merge(steps, refresh_steps, what_else, merged):
    moments = [replace(moment, **what_else) for moment in steps_of(steps)]
    _, evaluations = refreshed(moments, ratio=0.5, refresh_steps=refresh_steps)
    assert [bool(result.merged) for _, result in evaluations] == merged


def test_each_part_keeps_its_own_detail_and_only_some_do():
    runs = [steps_of(5, part) for part in range(20)]
    moments = [run[step] for step in range(5) for run in runs]
    plain, evaluations = refreshed(moments, ratio=0.5, refresh_steps=2)
    shares = [FADING] * 16 + [0] * 4
    for (change, result), share in zip(evaluations[2 * 20 : 3 * 20], shares, strict=True):
        plan = result.merged[0].plan
        torch.testing.assert_close(change, with_fewer_details(plain, plan, share))


@pytest.mark.parametrize(("way", "index"), [(1, 1), (-1, 2)])
def test_a_step_behind_a_full_one_has_its_detail_also_where_steps_are_counted_down(way, index):
    """Two steps of the six are full, the last but one and the first."""
    moments = [replace(moment, from_noise=False) for moment in steps_of(6)[::way]]
    plain, evaluations = refreshed(moments, ratio=0.5, refresh_steps=4)
    change, result = evaluations[index]
    expected = with_fewer_details(plain, result.merged[0].plan, FADING)
    torch.testing.assert_close(change, expected)


def test_parts_of_the_step_before_are_kept_and_older_ones_dropped():
    details = Details(ToMeConfig(scope="stack", refresh_steps=4))
    moments = [Moment(step, 0.0, step, part, True) for step, part in enumerate("aaba")]
    first, second, _, last = (details.at(moment, torch.device("cpu")) for moment in moments)
    assert first is second and last is not first


def test_overrides_follow_what_other_code_changes_between_evaluations():
    evaluate = Merging()
    model = evaluate.model
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
    assert not evaluate.has_overrides()
    assert all(len(result.merged) == 2 for result in evaluate.results)
