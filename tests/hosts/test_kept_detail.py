"""What *fast* keeps from step to step, beside nodes that change what is evaluated."""

import copy

import pytest
import torch
from common import relative_error
from host import merging, sample
from models.comfyui import TINY
from models.comfyui import sample as sample_transformer

from tome_nodes.comfyui.attachment import attach

MOVES = "as other places of the picture are evaluated from step to step"


@pytest.fixture
def model_of(models, load):
    """A tiny model by its kind."""
    return lambda kind: load("sd15", levels=2) if kind == "sd15" else models(kind)


kinds = pytest.mark.parametrize("kind", ["flux", "z_image", "sd15"])


def sampled(model, kind, **options):
    if kind == "sd15":
        return sample(model, (16, 16), steps=8, **options)
    return sample_transformer(model, TINY[kind], TINY[kind].size(32, 32), steps=8, **options)


def wrapped(model, wrapper):
    other = model.clone()
    other.set_model_unet_function_wrapper(wrapper)
    return other


def kept(**options):
    """Settings that keep detail of one step in four."""
    return merging(**{"scope": "stack", "attn_tokens": "k,v", "refresh_steps": 4} | options)


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


def change(model, kind, offset, config):
    """How much merging changes what is painted by tiles."""
    patched, unpatched = (
        sampled(wrapped(each, Tiles(offset)), kind) for each in (attach(model, config), model)
    )
    return relative_error(patched, unpatched)


@kinds
def test_detail_of_another_place_is_not_added(model_of, log_messages, kind):
    model = model_of(kind)
    still, moving = (change(model, kind, offset, kept()) for offset in (0, 6))
    assert moving < 2 * still
    assert sum(MOVES in line for line in log_messages()) == 1


@kinds
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "heun"])
def test_detail_of_one_place_is_added(model_of, log_messages, kind, sampler):
    model = attach(model_of(kind), kept())
    sampled(wrapped(model, Tiles(0)), kind, sampler=sampler)
    (line,) = log_messages()
    assert "stack scope" in line
    assert MOVES not in line


@kinds
def test_a_node_may_change_the_answer_in_place(model_of, kind):
    def doubled(apply_model, args):
        answer = apply_model(args["input"], args["timestep"], **args["c"])
        return answer * 1.5

    def doubled_in_place(apply_model, args):
        return apply_model(args["input"], args["timestep"], **args["c"]).mul_(1.5)

    model = attach(model_of(kind), kept())
    expected = sampled(wrapped(model, doubled), kind)
    assert torch.equal(sampled(wrapped(model, doubled_in_place), kind), expected)


@kinds
def test_a_copy_of_the_options_keeps_what_was_kept(model_of, kind):
    def copying(apply_model, args):
        options = args["c"]["transformer_options"]
        given = args["c"] | {"transformer_options": copy.deepcopy(options)}
        return apply_model(args["input"], args["timestep"], **given)

    model = attach(model_of(kind), kept())
    assert torch.equal(sampled(wrapped(model, copying), kind), sampled(model, kind))
