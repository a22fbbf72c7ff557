"""What merges in a run, on a model of linear layers."""

import pytest
import torch
from torch import nn
from torch.nn import Linear

from tome_nodes.merging.evaluation import Evaluation, Observer
from tome_nodes.merging.model import deepest_level
from tome_nodes.merging.model_run import ModelRun
from tome_nodes.merging.schedule import step_index
from tome_nodes.merging.stack import Stack
from tome_nodes.merging.unet import UNetFamily
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy
from tome_nodes.strategies.plan import Grid

GRID = Grid(4, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn1, self.attn2 = nn.Identity(), None
        self.ff = Linear(3, 3)

    def forward(self, x):
        return x + self.ff(x)


X = torch.randn(2, GRID.tokens, 3, generator=torch.Generator().manual_seed(0)).double()


class ToyRecord(UNetFamily):
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
    """A model that merges half of its tokens, with its evaluations."""

    def __init__(self, **settings):
        self.evaluations, self.model = [], nn.Sequential(Block(), Block()).double()
        config = ToMeConfig(ratio=0.5, min_tokens=1, **settings)
        self.run = ModelRun(config, TOY, self.model, make_strategy, self)

    def note(self, evaluation):
        self.evaluations.append(evaluation)

    @torch.no_grad()
    def __call__(self):
        return self.run.evaluate(
            lambda: self.model(X), Evaluation(0, 0.0, 0, GRID, X.device, X.dtype)
        )

    def has_overrides(self):
        return any("forward" in vars(module) for module in self.model.modules())


@pytest.fixture
def evaluate():
    return Merging(merge_attn=False, merge_mlp=True)


def test_stacks_change_all_tokens_of_a_slot_alike():
    evaluate = Merging(scope="stack")
    with torch.no_grad():
        plain = evaluate.model(X) - X
    change = evaluate() - X
    (evaluation,) = evaluate.evaluations
    expected = plain.clone()
    for sample, of_sample in enumerate(evaluation.merged[0].plan.slots()):
        for slot in of_sample.unique():
            expected[sample, of_sample == slot] = plain[sample, of_sample == slot].mean(0)
    torch.testing.assert_close(change, expected)


def test_overrides_follow_what_other_code_changes_between_evaluations(evaluate):
    model = evaluate.model
    evaluate()
    lengths = []

    class Replaced(Linear):
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
    assert all(len(each.merged) == 2 for each in evaluate.evaluations)


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
