"""Two models in one sampling run, as ComfyUI's Dual Model CFG Guider has them."""

import comfy.samplers
import pytest
import torch
from common import Shuffle, relative_error
from host import keys_only, merging, needs
from models.comfyui import TINY, build, conditioning

from tome_nodes.comfyui.attachment import attach

nodes = pytest.importorskip("comfy_extras.nodes_custom_sampler")


def sampled(positive, negative, kinds=("flux", "z_image"), steps=2):
    """What a guider samples with two models."""
    needs("Dual Model CFG Guider", hasattr(nodes, "Guider_DualModel"))
    tinies = [TINY[kind] for kind in kinds]
    guider = nodes.Guider_DualModel(positive, negative)
    guider.set_conds(*(conditioning(tiny, seed) for tiny, seed in zip(tinies, (5, 6), strict=True)))
    guider.set_cfg(4.0)
    latent = torch.zeros(1, tinies[0].channels, *tinies[0].size(8, 10))
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
    sigmas = torch.linspace(1, 0, steps + 1)
    return guider.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas)


@pytest.mark.parametrize("kinds", [("flux", "z_image"), ("z_image", "flux"), ("flux", "sd3")])
def test_each_merges_as_a_model_of_its_own_kind(models, log_messages, kinds):
    positive, negative = map(models, kinds)
    expected = sampled(positive, negative, kinds)
    shuffled = sampled(attach(positive, keys_only(), Shuffle), negative, kinds)
    assert relative_error(shuffled, expected) < 1e-5
    lines = [f"[ToMe] merged {TINY[kind].blocks}/{TINY[kind].blocks} blocks (" for kind in kinds]
    assert [line[: len(start)] for line, start in zip(log_messages(), lines, strict=True)] == lines


def test_one_that_cannot_merge_runs_unmerged_and_says_so(models, log_messages):
    positive, negative = models("flux"), build(TINY["z_image"])
    network = negative.model.diffusion_model
    network.__class__ = type("Unheard", (type(network),), {})
    expected = sampled(positive, negative)
    shuffled = sampled(attach(positive, keys_only(), Shuffle), negative)
    assert relative_error(shuffled, expected) < 1e-5
    warning, line = log_messages()
    assert warning.startswith(
        "[ToMe] a second model of this run stays unmerged: tokens do not merge in a Unheard, "
    )
    assert line.startswith("[ToMe] merged ")


def test_a_patch_on_the_negative_model_alone_is_not_silent(models, log_messages):
    positive, negative = models("flux"), models("z_image")
    expected = sampled(positive, negative)
    assert torch.equal(sampled(positive, attach(negative, merging())), expected)
    (warning,) = log_messages()
    assert warning.startswith("[ToMe] the settings of ToMe Patch Model on Lumina2 are not used")
    assert "negative" in warning
