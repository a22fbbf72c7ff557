"""What merges in a run and what detail it keeps over steps, on a model of linear layers."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tome_nodes.merging.plan import Grid
from tome_nodes.patching.blocks import Observer, Stack, deepest_level
from tome_nodes.patching.detail_cache import FADING, Details
from tome_nodes.patching.evaluation import Run
from tome_nodes.patching.merge_modules import UNetRecord
from tome_nodes.patching.schedule import Moment, step_index
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy

GRID = Grid(4, 4)
NOW = Moment(0, 0.0, 0, None, is_active=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn1, self.attn2 = nn.Identity(), None
        self.ff = nn.Linear(3, 3)

    def forward(self, x):
        return x + self.ff(x)


X = torch.randn(2, GRID.tokens, 3, generator=torch.Generator().manual_seed(0)).double()


class ToyRecord(UNetRecord):
    def stacks(self, model):
        return [Stack("blocks", model, tuple(model))]


TOY = ToyRecord(
    layers=lambda model: (),
    is_stack=lambda module: False,
    attends_to_text=lambda block: True,
    needs_all_tokens=lambda *args: False,
    masks=(),
    shapes=lambda: ((len(X), 3, GRID.height, GRID.width), None),
)


class Merging(Observer):
    """A model that merges half of its tokens, with what is reported of its evaluations."""

    def __init__(self, **settings):
        self.results, self.model = [], nn.Sequential(Block(), Block()).double()
        config = ToMeConfig(ratio=0.5, min_tokens=1, **settings)
        self.run = Run(config, TOY, self.model, make_strategy, self)

    def evaluated(self, result):
        self.results.append(result)

    @torch.no_grad()
    def __call__(self, moment=NOW, obstacle=None):
        with self.run.evaluation(moment, GRID, X.device, X.dtype, obstacle):
            return self.model(X)

    def has_overrides(self):
        return any("forward" in vars(module) for module in self.model.modules())


@pytest.fixture
def evaluate():
    return Merging(merge_attn=False, merge_mlp=True)


def test_the_outcome_of_each_block_is_reported(evaluate):
    evaluate()
    evaluate(replace(NOW, is_active=False))
    evaluate(obstacle="it may not")
    first, inactive, hindered = evaluate.results
    merged = [(block.block, block.before, block.after) for block in first.merged]
    assert merged == [("blocks.0", 16, 8), ("blocks.1", 16, 8)]
    assert inactive.merged == hindered.merged == []
    assert "covers no step" in inactive.reason and not inactive.is_active
    assert hindered.reason == "it may not" and hindered.is_active
    assert not evaluate.has_overrides()


def refreshed(moments, **settings):
    """The model's change without merging, and of each evaluation its change and its result."""
    evaluate = Merging(scope="stack", **settings)
    with torch.no_grad():
        plain = evaluate.model(X) - X
    changes = [evaluate(moment) - X for moment in moments]
    return plain, list(zip(changes, evaluate.results, strict=True))


def assert_has_detail(evaluation, plain, share):
    """The differences from the mean of each slot are a share of those without merging."""
    change, result = evaluation
    expected = plain.clone()
    for sample, of_sample in enumerate(result.merged[0].plan.slots()):
        for slot in of_sample.unique():
            mean = plain[sample, of_sample == slot].mean(0)
            own = expected[sample, of_sample == slot]
            expected[sample, of_sample == slot] = mean + share * (own - mean)
    torch.testing.assert_close(change, expected)


def steps_of(count, part="all"):
    return [
        replace(NOW, step=step, picks=step, part=part, steps_left=count - 1 - step)
        for step in range(count)
    ]


def test_steps_between_those_on_all_tokens_keep_their_detail():
    plain, evaluations = refreshed(steps_of(7), refresh_steps=3)
    shares = [0, 0, 1, FADING, FADING**2, 1, FADING]
    for step, (evaluation, share) in enumerate(zip(evaluations, shares, strict=True)):
        change, result = evaluation
        if step in (2, 5):
            assert torch.equal(change, plain) and not result.merged and not result.is_active
            assert "refresh_steps" in result.reason
        else:
            assert (result.merged[0].before, result.merged[0].after) == (16, 8)
            assert_has_detail(evaluation, plain, share)


@pytest.mark.parametrize("settings", [{}, {"refresh_steps": 0}, {"refresh_steps": 9}], ids=str)
def test_without_a_step_on_all_tokens_there_is_no_detail(settings):
    plain, evaluations = refreshed(steps_of(20)[:2], **settings)
    for evaluation in evaluations:
        assert_has_detail(evaluation, plain, 0)


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
    _, evaluations = refreshed(moments, refresh_steps=refresh_steps)
    assert [bool(result.merged) for _, result in evaluations] == merged


def test_each_part_keeps_its_own_detail_and_only_some_do():
    runs = [steps_of(5, part) for part in range(20)]
    moments = [run[step] for step in range(5) for run in runs]
    plain, evaluations = refreshed(moments, refresh_steps=2)
    shares = [FADING] * 16 + [0] * 4
    for evaluation, share in zip(evaluations[2 * 20 : 3 * 20], shares, strict=True):
        assert_has_detail(evaluation, plain, share)


@pytest.mark.parametrize(("way", "index"), [(1, 1), (-1, 2)])
def test_a_step_behind_a_full_one_has_its_detail_also_where_steps_are_counted_down(way, index):
    """Two steps of the six are full, the last but one and the first."""
    moments = [replace(moment, from_noise=False) for moment in steps_of(6)[::way]]
    plain, evaluations = refreshed(moments, refresh_steps=4)
    assert_has_detail(evaluations[index], plain, FADING)


def test_parts_of_the_step_before_are_kept_and_older_ones_dropped():
    details = Details(ToMeConfig(scope="stack", refresh_steps=4))
    moments = [replace(NOW, step=step, part=part) for step, part in enumerate("aaba")]
    first, second, _, last = (details.at(moment, torch.device("cpu")) for moment in moments)
    assert first is second and last is not first


def test_overrides_follow_what_other_code_changes_between_evaluations(evaluate):
    model = evaluate.model
    evaluate()
    lengths = []

    class Replaced(nn.Linear):
        def forward(self, x):
            lengths.append(x.shape[1])
            return super().forward(x)

    model[0].ff = Replaced(3, 3).double()
    evaluate()
    assert lengths == [8]
    own = model[1].forward
    model[1].forward = lambda x: own(x) + 1
    assert torch.equal(evaluate(), evaluate())
    merged = evaluate()
    del model[1].forward
    torch.testing.assert_close(evaluate() + 1, merged)
    assert not evaluate.has_overrides()
    assert all(len(result.merged) == 2 for result in evaluate.results)


@pytest.mark.parametrize(
    ("schedule", "evaluated", "steps"),
    [
        # A sampler that goes back up on its own repeats the steps.
        ([10.0, 5.0, 2.0, 0.0], [10.0, 5.0, 2.0, 7.0, 5.0, 2.0], [0, 1, 2, 0, 1, 2]),
        ([5.0], [5.0, 3.0], [0, 0]),
        ([5.0, 5.0, 0.0], [5.0, 5.0, 2.0], [0, 0, 1]),
    ],
)
def test_steps_of_schedules_that_rise(schedule, evaluated, steps):
    passed = [0]
    for sigma in evaluated:
        passed.append(step_index(schedule, sigma, passed[-1]))
    assert passed[1:] == steps


def test_of_levels_with_as_many_blocks_the_shallowest_is_enough():
    stable_diffusion_1 = {1: 2, 2: 2, 4: 2, 8: 1}
    assert deepest_level(ToMeConfig(scope="stack"), stable_diffusion_1) == 1
