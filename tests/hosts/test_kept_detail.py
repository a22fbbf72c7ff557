"""The detail that *fast* keeps from step to step in a UNet, beside nodes that change what runs."""

import copy

import comfy.model_management
import pytest
import torch
from common import relative_error
from host import merging, sample

from tome_nodes.comfyui.attachment import KEY, attach

NOT_USED = "as other places of the picture are evaluated from step to step"

KEPT = merging(scope="stack", attn_tokens="k,v", refresh_steps=4)


@pytest.fixture
def merged(sd15_from_file):
    """A UNet of the published width: the answers of a narrow one change too much between steps."""
    return attach(sd15_from_file, KEPT)


def evaluated(apply_model, args, **others):
    """What a wrapper is asked for, with other arguments."""
    return apply_model(args["input"], args["timestep"], **args["c"] | others)


def sampled(model, wrapper=evaluated, **options):
    """A run of 8 steps, each evaluated by a wrapper as other nodes set it."""
    model = model.clone()
    model.set_model_unet_function_wrapper(wrapper)
    return sample(model, (8, 12), channels=768, steps=8, **options)


def tiles(offset):
    """Evaluates the left and right half of a latent apart, moved on by an offset in each step."""
    levels = []

    def evaluate(apply_model, args):
        level = float(args["timestep"].max())
        if level not in levels:
            levels.append(level)
        moved = offset * (len(levels) - 1)
        halves = [
            apply_model(half.contiguous(), args["timestep"], **args["c"])
            for half in torch.roll(args["input"], -moved, -1).chunk(2, -1)
        ]
        return torch.roll(torch.cat(halves, -1), moved, -1)

    return evaluate


def test_detail_of_another_place_is_not_added(sd15_from_file, merged, log_messages):
    still, moving = (
        relative_error(sampled(merged, tiles(offset)), sampled(sd15_from_file, tiles(offset)))
        for offset in (0, 6)
    )
    assert moving < 2 * still
    assert [NOT_USED in line for line in log_messages()] == [False, True]


@pytest.mark.parametrize("sampler", ["dpmpp_2m", "heun"])
def test_detail_of_one_place_is_added(merged, log_messages, sampler):
    sampled(merged, tiles(0), sampler=sampler)
    (line,) = log_messages()
    assert line.startswith("[ToMe] merged") and NOT_USED not in line


def test_a_node_may_change_the_answer_in_place_and_copy_the_options(merged):
    def copying(apply_model, args):
        options = copy.deepcopy(args["c"]["transformer_options"])
        return evaluated(apply_model, args, transformer_options=options)

    assert torch.equal(sampled(merged, copying), sampled(merged))
    expected = sampled(merged, lambda *given: evaluated(*given) * 1.5)
    assert torch.equal(sampled(merged, lambda *given: evaluated(*given).mul_(1.5)), expected)


def test_nothing_is_kept_while_gradients_are_computed(merged, log_messages, monkeypatch):
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

    sampled(merged, guided)
    assert len(sizes) == 8
    assert all(torch.isfinite(size) and size > 0 for size in sizes)
    assert "as gradients are computed" in log_messages()[-1]


def test_what_is_counted_in_a_step_is_counted_under_a_lock(merged):
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

    sampled(merged, watching)
    assert counted == [True] * 8
