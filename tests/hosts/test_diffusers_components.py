"""Patched models as components of other pipelines of diffusers, which ask for their classes."""

import copy
import pickle
import re

import diffusers
import pytest
import torch
from common import attributes, relative_error
from models.pipelines import (
    Around,
    Case,
    flux,
    flux_with_vae,
    picture,
    sd15,
    sd15_controlnet,
    sdxl,
    wan,
)

import tome_nodes
from tome_nodes import reasons

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


class RunsBlocksItself(Around):
    """It has what the model has, but never calls it."""

    def forward(self, *args, **kwargs):
        return type(self.inner).forward(self.inner, *args, **kwargs)


def wrap(case):
    for name in ("unet", "transformer", "transformer_2"):
        inner = getattr(case.pipeline, name, None)
        if inner is not None:
            setattr(case.pipeline, name, RunsBlocksItself(inner))


def passed_by(options):
    what = "merged" if options is UNET else "was forecast"
    return f"[ToMe] nothing {what}: {reasons.NOT_CALLED}"


KINDS = [(sd15, UNET), (sdxl, UNET), (flux, TRANSFORMER), (wan, TRANSFORMER)]


@pytest.mark.parametrize(("make", "options"), KINDS)
def test_a_patch_that_other_code_passes_by_says_so_once(make, options, log_messages):
    case = make()
    plain = case(4)
    tome_nodes.apply_patch(case.pipeline, **options)
    wrap(case)
    for _ in range(2):
        assert torch.equal(case(4), plain)
    assert log_messages() == [passed_by(options)]


@pytest.mark.parametrize(("make", "options"), [(sd15, UNET), (flux, TRANSFORMER)])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_that_other_code_passes_by_says_so(make, options, copied, log_messages):
    case = make()
    tome_nodes.apply_patch(case.pipeline, **options)
    case.pipeline = copied(case.pipeline)
    wrap(case)
    case(2)
    assert log_messages() == [passed_by(options)]


@pytest.mark.parametrize(("make", "options"), [(sd15, UNET), (flux, TRANSFORMER)])
def test_a_patch_that_other_code_passes_by_later_says_so(make, options, log_messages):
    case = make()
    tome_nodes.apply_patch(case.pipeline, **options)
    case(2)
    before = log_messages()
    wrap(case)
    case(2)
    assert log_messages() == [*before, passed_by(options)]


def test_a_run_that_calls_a_model_says_nothing_of_other_code(log_messages):
    """With an expert that has no step, in an interrupted run, and at what else frees memory."""
    case = wan()
    tome_nodes.apply_patch(case.pipeline, **TRANSFORMER)
    case.pipeline.maybe_free_model_hooks()
    case.pipeline.register_to_config(boundary_ratio=0.0)
    case(4)

    def stop(pipeline, *_):
        pipeline._interrupt = True
        return {}

    case(4, callback_on_step_end=stop)
    case.pipeline.maybe_free_model_hooks()
    case.pipeline.scheduler.set_timesteps(4)
    # Some pipelines do so before their first step.
    case.network._reset_stateful_cache()
    assert not any(reasons.NOT_CALLED.why in line for line in log_messages())


def test_a_pipeline_that_shares_a_model_says_nothing_of_the_other_one(log_messages):
    case = sd15()
    tome_nodes.apply_patch(case.pipeline, **UNET)
    other = from_a_picture(case, diffusers.StableDiffusionImg2ImgPipeline)
    for each in (other, case, other):
        each(4)
        each.pipeline.maybe_free_model_hooks()
    assert not any(reasons.NOT_CALLED.why in line for line in log_messages())


STOPPED = [(sd15, UNET, "shallow 1/6 steps"), (flux, TRANSFORMER, "forecast 1/6 steps (4)")]


@pytest.mark.parametrize(("make", "options", "words"), STOPPED)
@pytest.mark.parametrize("way", ["interrupt", "error"])
def test_a_run_that_stops_after_it_skipped_steps_says_so(make, options, words, way, log_messages):
    """Before its pipeline returns, or where an error stops it, before the next run."""

    def stop(pipeline, step, timestep, given):
        if step == 5:
            pipeline._interrupt = True
            if way == "error":
                raise KeyError
        return {}

    case = make()
    tome_nodes.apply_patch(case.pipeline, **options)
    if way == "error":
        with pytest.raises(KeyError):
            case(8, callback_on_step_end=stop)
        case(2)
    else:
        case(8, callback_on_step_end=stop)
    assert sum(words in line for line in log_messages()) == 1


@pytest.mark.parametrize("spacing", ["karras", "exponential", "beta"])
def test_an_uneven_run_of_another_scheduler_is_one_run(spacing, log_messages):
    """How many steps it has is not known, so its end shows only where its pipeline ends."""
    case = sd15()
    tome_nodes.apply_patch(case.pipeline, **UNET)
    config = case.pipeline.scheduler.config
    scheduler = diffusers.EulerDiscreteScheduler.from_config(
        config, **{f"use_{spacing}_sigmas": True}
    )
    case.pipeline = type(case.pipeline)(
        **{**case.pipeline.components, "scheduler": scheduler}, requires_safety_checker=False
    )
    case(20)
    (line,) = [each for each in log_messages() if "shallow" in each]
    share = re.search(r"shallow (\d+)/20 steps", line)
    assert share is not None and 7 <= int(share[1]) <= 14


def test_freeing_memory_still_resets_a_cache(monkeypatch):
    case = flux()
    tome_nodes.apply_patch(case.pipeline, **TRANSFORMER)
    seen = []
    monkeypatch.setattr(
        type(case.network), "_reset_stateful_cache", lambda model, recurse=True: seen.append(model)
    )
    case(2)
    assert seen == [case.network]
