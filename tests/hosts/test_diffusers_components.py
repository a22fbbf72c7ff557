"""Patched models as components of other pipelines of diffusers, which ask for their classes."""

import diffusers
import pytest
import torch
from common import attributes, relative_error
from models.pipelines import Case, flux, flux_with_vae, picture, sd15, sd15_controlnet, sdxl

import tome_nodes

pytestmark = pytest.mark.newest_only

UNET = {"max_downsample": "auto", "forecast": True, "ratio": 0.6}
TRANSFORMER = {"preset": "balanced", "ratio": 0.6}


def from_a_picture(case, kind):
    """A pipeline of another kind with the components of a case, and the arguments of its call."""
    given = {name: value for name, value in case.arguments.items() if "embeds" in name}
    pipeline = kind.from_pipe(case.pipeline)
    return Case(pipeline, **given, image=picture(), strength=1.0)


@pytest.mark.parametrize(
    ("make", "kind", "options", "steps", "words"),
    [
        (sd15, "StableDiffusionImg2ImgPipeline", UNET, 8, ("merged ", "shallow ")),
        (sd15, "AutoPipelineForImage2Image", UNET, 8, ("merged ", "shallow ")),
        (sdxl, "StableDiffusionXLImg2ImgPipeline", UNET, 8, ("merged ", "shallow ")),
        (flux_with_vae, "FluxImg2ImgPipeline", TRANSFORMER, 4, ("forecast ",)),
    ],
)
def test_another_pipeline_takes_over_a_patched_model(
    make, kind, options, steps, words, log_messages
):
    first = make()
    plain = from_a_picture(first, getattr(diffusers, kind))(steps)
    before = attributes(first.network)
    for number in range(2):
        tome_nodes.apply_patch(first.pipeline, **options)
        second = from_a_picture(first, getattr(diffusers, kind))
        assert second.network is first.network
        assert relative_error(second(steps), plain) > 1e-3
        assert all(word in log_messages()[-1] for word in words)
        tome_nodes.remove_patch((first, second)[number].pipeline)
        assert attributes(first.network) == before
        assert torch.equal(second(steps), plain)


OTHERS = {
    "inpainting": diffusers.StableDiffusionInpaintPipeline.from_pipe,
    "PAG": diffusers.StableDiffusionPAGPipeline.from_pipe,
    "ControlNet": lambda pipe: diffusers.StableDiffusionControlNetPipeline.from_pipe(
        pipe, controlnet=sd15_controlnet().pipeline.controlnet
    ),
}


@pytest.mark.parametrize("way", OTHERS)
def test_pipelines_of_other_tasks_take_over_a_patched_unet(way):
    case = sd15()
    tome_nodes.apply_patch(case.pipeline)
    assert OTHERS[way](case.pipeline).unet is case.network


@pytest.mark.parametrize(
    ("make", "kind", "options"),
    [
        (sd15, diffusers.UNet2DConditionModel, UNET),
        (flux, diffusers.FluxTransformer2DModel, TRANSFORMER),
    ],
)
def test_the_class_stays_and_a_patched_pipeline_is_saved_as_a_plain_one(
    make, kind, options, tmp_path
):
    case = make()
    plain = case()
    tome_nodes.apply_patch(case.pipeline, **options)
    assert type(case.network) is kind
    case.pipeline.save_pretrained(tmp_path)
    missing = {name: None for name, part in case.pipeline.components.items() if part is None}
    saved = type(case.pipeline).from_pretrained(tmp_path, **missing)
    assert type(getattr(saved, case.part)) is kind
    assert relative_error(Case(saved, **case.arguments)(), plain) < 5e-5
