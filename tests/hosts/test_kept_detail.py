"""What *fast* keeps from step to step, beside nodes that change what is evaluated.

In a UNet that is detail, in a transformer the answers that others are forecast from.
"""

import copy

import comfy.model_management
import comfy.sd
import pytest
import torch
from common import relative_error
from host import merging, sample
from models.checkpoints import write_checkpoint
from models.comfyui import TINY, build
from models.comfyui import sample as sample_transformer

from tome_nodes.comfyui.attachment import KEY, attach

NOT_USED = {
    "sd15": "as other places of the picture are evaluated from step to step",
    "flux": "too few or differ too much to forecast the next",
    "z_image": "too few or differ too much to forecast the next",
}
"""What the log says if what was kept is of another place."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A UNet of the published width: the answers of a narrow one change too much between steps."""
    path = tmp_path_factory.mktemp("unet") / "sd15.ckpt"
    write_checkpoint(path, "sd15", levels=2, unet_only=True)
    return comfy.sd.load_diffusion_model(str(path))


@pytest.fixture
def model_of(models, wide):
    """A model by its kind."""
    return lambda kind: wide if kind == "sd15" else models(kind)


kinds = pytest.mark.parametrize("kind", ["flux", "z_image", "sd15"])


def evaluated(apply_model, args, **others):
    """What a wrapper is asked for, with other arguments."""
    return apply_model(args["input"], args["timestep"], **args["c"] | others)


def sampled(model, kind, wrapper=evaluated, **options):
    """A run of 8 steps, each evaluated by a wrapper as other nodes set it."""
    model = model.clone()
    model.set_model_unet_function_wrapper(wrapper)
    if kind == "sd15":
        return sample(model, (16, 16), channels=768, steps=8, **options)
    return sample_transformer(model, TINY[kind], TINY[kind].size(32, 32), steps=8, **options)


KEPT = merging(scope="stack", attn_tokens="k,v", refresh_steps=4, forecast=True)
"""As *fast*."""


class Tiles:
    """Evaluates the left and right half of a latent apart, moved on by ``offset`` in each step."""

    def __init__(self, offset):
        self.offset = offset
        self.levels = []

    def __call__(self, apply_model, args):
        level = float(args["timestep"].max())
        if level not in self.levels:
            self.levels.append(level)
        moved = self.offset * (len(self.levels) - 1)
        rolled = torch.roll(args["input"], -moved, -1)
        halves = [
            apply_model(half.contiguous(), args["timestep"], **args["c"])
            for half in rolled.chunk(2, -1)
        ]
        return torch.roll(torch.cat(halves, -1), moved, -1)


def change(model, kind, offset):
    """How much merging changes what is painted by tiles."""
    patched, unpatched = (
        sampled(each, kind, Tiles(offset)) for each in (attach(model, KEPT), model)
    )
    return relative_error(patched, unpatched)


@kinds
def test_detail_of_another_place_is_not_added(model_of, log_messages, kind):
    model = model_of(kind)
    still, moving = (change(model, kind, offset) for offset in (0, 6))
    assert moving < 2 * still
    assert [NOT_USED[kind] in line for line in log_messages()] == [False, True]


@kinds
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "heun"])
def test_detail_of_one_place_is_added(model_of, log_messages, kind, sampler):
    model = attach(model_of(kind), KEPT)
    sampled(model, kind, Tiles(0), sampler=sampler)
    (line,) = log_messages()
    assert line.startswith("[ToMe] merged" if kind == "sd15" else "[ToMe] forecast")
    assert NOT_USED[kind] not in line


@pytest.mark.parametrize("kind", ["flux", "z_image"])
def test_a_node_may_leave_out_the_negative_prompt_in_every_second_step(model_of, kind):
    """Its calls are then counted as those of the other prompt, so nothing is forecast."""

    def apart(skips):
        levels = set()

        def evaluate(apply_model, args):
            levels.add(float(args["timestep"].max()))
            assert args["cond_or_uncond"] == [1, 0]
            answers = []
            for each in (1,) if skips and len(levels) % 2 == 0 else (0, 1):
                noisy, level = args["input"][each : each + 1], args["timestep"][each : each + 1]
                given = {
                    name: value[each : each + 1] if torch.is_tensor(value) else value
                    for name, value in args["c"].items()
                }
                answers.append(apply_model(noisy, level, **given))
            return torch.cat([answers[0], answers[-1]])

        return evaluate

    model = model_of(kind)
    changes = [
        relative_error(
            sampled(attach(model, KEPT), kind, apart(skips)), sampled(model, kind, apart(skips))
        )
        for skips in (False, True)
    ]
    assert changes == [0, 0]


@kinds
def test_a_node_may_change_the_answer_in_place(model_of, kind):
    def enlarged(*arguments):
        return evaluated(*arguments) * 1.5

    def enlarged_in_place(*arguments):
        return evaluated(*arguments).mul_(1.5)

    model = attach(model_of(kind), KEPT)
    expected = sampled(model, kind, enlarged)
    assert torch.equal(sampled(model, kind, enlarged_in_place), expected)


@kinds
def test_a_copy_of_the_options_keeps_what_was_kept(model_of, kind):
    def copying(apply_model, args):
        options = copy.deepcopy(args["c"]["transformer_options"])
        return evaluated(apply_model, args, transformer_options=options)

    model = attach(model_of(kind), KEPT)
    assert torch.equal(sampled(model, kind, copying), sampled(model, kind))


# Flux changes tokens in place, so that it has no gradients.
@pytest.mark.parametrize("kind", ["z_image", "sd15"])
def test_nothing_is_kept_while_gradients_are_computed(model_of, kind, log_messages, monkeypatch):
    """As in nodes that guide a model by the gradient of its answer."""
    # Otherwise the host runs kernels that have no gradients.
    monkeypatch.setattr(comfy.model_management, "in_training", True, raising=False)
    sizes = []

    def guided(apply_model, args):
        with torch.enable_grad():
            noisy = args["input"].clone().requires_grad_()
            answer = apply_model(noisy, args["timestep"], **args["c"])
            (gradient,) = torch.autograd.grad(answer.square().mean(), noisy)
        sizes.append(gradient.norm())
        return answer.detach()

    sampled(attach(model_of(kind), KEPT), kind, guided)
    assert len(sizes) == 8
    assert all(torch.isfinite(size) and size > 0 for size in sizes)
    reason = "as gradients are computed" if kind == "sd15" else NOT_USED[kind]
    assert reason in log_messages()[-1]


@pytest.mark.parametrize("kind", ["flux", "z_image"])
def test_models_that_share_a_step_may_take_turns_in_any_order(model_of, kind):
    """As threads on several devices do, each with a deep clone of the model."""
    model, twin = model_of(kind), build(TINY[kind]).model

    class Shared(Tiles):
        def __init__(self, turns):
            super().__init__(0)
            self.turns = turns

        def __call__(self, apply_model, args):
            level = float(args["timestep"].max())
            if level not in self.levels:
                self.levels.append(level)
            halves, answers = args["input"].chunk(2, -1), {}
            for each in self.turns[len(self.levels) % 2]:
                evaluate = twin.apply_model if each else apply_model
                given = halves[each].contiguous(), args["timestep"]
                answers[each] = evaluate(*given, **args["c"])
            return torch.cat([answers[0], answers[1]], -1)

    patched = attach(model, KEPT)
    expected = sampled(patched, kind, Shared([(0, 1), (0, 1)]))
    assert torch.equal(sampled(patched, kind, Shared([(0, 1), (1, 0)])), expected)


def test_what_is_counted_in_a_step_is_counted_under_a_lock(model_of):
    """Else threads on several devices lose counts, and get the detail of each other's parts."""
    counted = []

    class Watched(dict):
        def get(self, name, default=None):
            if name == "context_window":
                counted.append(self[KEY]._lock.locked())
            return super().get(name, default)

    def watching(apply_model, args):
        options = Watched(args["c"]["transformer_options"])
        return evaluated(apply_model, args, transformer_options=options)

    sampled(attach(model_of("flux"), KEPT), "flux", watching)
    assert counted == [True] * 8
