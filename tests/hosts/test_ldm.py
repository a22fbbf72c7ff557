"""The attach to the real modules and samplers of latent-diffusion, with random weights."""

import pytest
import torch
from common import (
    input_lengths,
    planned,
    relative_error,
    theirs_and_ours,
)
from models.ldm import TOKENS, call, inputs, make_model

import tome_nodes
from tome_nodes.python.ldm import LdmUNets

pytestmark = pytest.mark.newest_only

ROUNDING = 5e-5


def test_equal_to_tomesd():
    # It adds the switch that blocks of version 1 lack, and never removes it.
    options = {"ratio": 0.6, "max_downsample": 2, "merge_crossattn": True, "merge_mlp": True}
    theirs, ours = theirs_and_ours(make_model("sd2"), call, options)
    assert relative_error(ours, theirs) < ROUNDING


@pytest.mark.parametrize(
    ("family", "options", "lengths"),
    [
        # The first blocks of the upscaler attend to text instead of themselves.
        ("x4_upscaler", {}, [TOKENS // 2, 7]),
        # Those of version 1 cannot, and have no attribute for it.
        ("sd1", {"attn_tokens": "k,v"}, [TOKENS, TOKENS // 2]),
    ],
)
def test_text_as_context_of_self_attention_is_never_merged(family, options, lengths):
    model = make_model(family)
    block = model.model.diffusion_model.input_blocks[1][1].transformer_blocks[0]
    assert getattr(block, "disable_self_attn", False) == (family == "x4_upscaler")
    tome_nodes.apply_patch(model, **options)
    with input_lengths(block.attn1.to_q, block.attn1.to_k) as actual:
        call(model)
    assert actual == lengths


def test_every_handle_of_a_model_is_accepted():
    model = make_model()
    plain = call(model)
    unet = model.model.diffusion_model
    for handle in (model, model.model, unet, torch.compile(unet, backend="eager")):
        assert tome_nodes.apply_patch(handle) is handle
        assert relative_error(call(model), plain) > 1e-3
        tome_nodes.remove_patch(handle)
        assert torch.equal(call(model), plain)


def test_the_number_of_noise_levels_is_that_of_the_model(log_messages):
    model = make_model()
    for model.num_timesteps in 1000, 2000:
        assert log_messages() == []
        tome_nodes.apply_patch(model, start_percent=0.6)
        call(model)
    assert log_messages()[-1].startswith("[ToMe] merged 3/7 blocks")


@torch.no_grad()
def test_with_its_own_deep_features_a_shallow_call_is_the_whole_one():
    unet = make_model().model.diffusion_model
    sample, text = inputs()
    expected = unet(sample, torch.full((2,), 500), context=text)
    deep = LdmUNets().deep_blocks(unet)
    begun = deep.begin(None)
    unet(sample, torch.full((2,), 500), context=text)
    came = deep.came
    deep.end(begun)
    begun = deep.begin(came)
    assert torch.equal(unet(sample, torch.full((2,), 500), context=text), expected)
    deep.end(begun)
    # What a ControlNet adds to the skips of all blocks would not fit.
    assert LdmUNets().shallow_arguments((sample, 500), {"control": [came]}) is None


@torch.no_grad()
@pytest.mark.parametrize("is_first", [True, False])
def test_a_prompt_without_control_is_shallow_beside_one_with(is_first):
    """As in the guess mode of ControlNet, which calls the model for each."""
    unet, (latent, text) = make_model().model.diffusion_model, inputs()
    ran, whole = [], {True: [], False: []}
    unet.middle_block[0].in_layers[0].register_forward_hook(lambda *_: ran.append(None))
    tome_nodes.apply_patch(unet, 0.6, preset="fast")
    for timestep in range(951, 0, -50):
        answers = []
        for has_control in (is_first, not is_first):
            ran.clear()
            given = {"control": [torch.ones(1)]} if has_control else {}
            answers.append(unet(latent, torch.full((2,), timestep), context=text, **given))
            whole[has_control].append(bool(ran))
        latent = latent - 0.05 * sum(answers)
    assert all(whole[True])
    assert whole[False].count(False) == 20 - len(planned(20))
