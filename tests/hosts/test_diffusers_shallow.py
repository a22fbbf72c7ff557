"""Shallow steps of real UNets, in real pipelines of diffusers, beside merging."""

from functools import partial
from types import SimpleNamespace

import diffusers
import pytest
import torch
from common import planned, relative_error
from models.pipelines import CASES, inputs, make_unet, noise, picture, sd15, sdxl
from peft import LoraConfig
from test_diffusers import ip_adapter
from under_test import MAY_STAY, numbers

import tome_nodes
from tome_nodes import reasons
from tome_nodes.merging.model_run import ModelRun
from tome_nodes.python import unet_run
from tome_nodes.python.diffusers_unets import DiffusersUNets
from tome_nodes.python.scheduling import Scheduling
from tome_nodes.python.unet_run import UNetRun
from tome_nodes.run.span import Span
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.skipping.features import Features
from tome_nodes.skipping.plan import LEAST_OF_THREE, whole_evaluations

pytestmark = pytest.mark.newest_only

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
"""The noise levels of Stable Diffusion."""
STEPS = 20
WHOLE = sorted(planned(STEPS))
BETAS = torch.linspace(SD["beta_start"] ** 0.5, SD["beta_end"] ** 0.5, 1000) ** 2
LARGE = {"height": 256, "width": 256}

SCHEDULERS = {
    "Euler": diffusers.EulerDiscreteScheduler,
    "Euler, karras": partial(diffusers.EulerDiscreteScheduler, use_karras_sigmas=True),
    "DDIM": diffusers.DDIMScheduler,
    "DPM, karras": partial(diffusers.DPMSolverMultistepScheduler, use_karras_sigmas=True),
    "noise in DPM": partial(
        diffusers.DPMSolverMultistepScheduler, algorithm_type="sde-dpmsolver++"
    ),
    "DPM, single": diffusers.DPMSolverSinglestepScheduler,
    "DEIS": diffusers.DEISMultistepScheduler,
    "UniPC": diffusers.UniPCMultistepScheduler,
    "PNDM": partial(diffusers.PNDMScheduler, skip_prk_steps=True),
    "LMS": diffusers.LMSDiscreteScheduler,
    "Heun": diffusers.HeunDiscreteScheduler,
    "DPM2": diffusers.KDPM2DiscreteScheduler,
    "DPM2, ancestral": diffusers.KDPM2AncestralDiscreteScheduler,
    "Euler, ancestral": diffusers.EulerAncestralDiscreteScheduler,
    "DDPM": diffusers.DDPMScheduler,
    "LCM": diffusers.LCMScheduler,
    "TCD": diffusers.TCDScheduler,
}
ADD_NOISE = {"noise in DPM", "DPM2, ancestral", "Euler, ancestral", "DDPM", "LCM", "TCD"}


@pytest.fixture
def case():
    return of("Euler")


def of(name, case=sd15):
    """A pipeline with a scheduler."""
    made = case()
    made.pipeline.scheduler = SCHEDULERS[name](**SD)
    return made


def watch(network):
    """Every evaluation of a network as it goes on: its timestep, and whether it was whole."""
    seen = []

    def begin(_, args, kwargs):
        timestep = float(args[1] if len(args) > 1 else kwargs["timestep"])
        if not seen or abs(seen[-1].timestep - timestep) > 0.01:
            seen.append(SimpleNamespace(timestep=timestep, is_whole=False))

    def whole(*_):
        seen[-1].is_whole = True

    network.register_forward_pre_hook(begin, with_kwargs=True)
    # Below a block whose forward is replaced, as its own hooks still run.
    network.mid_block.resnets[0].conv1.register_forward_hook(whole)
    return seen


def planned_for(seen, scheduler="Euler"):
    """The whole ones of evaluations at these timesteps, as Stable Diffusion counts them."""
    shares = torch.cumprod(1 - BETAS, 0)[[round(each.timestep) for each in seen]]
    levels = (shares / (1 - shares)).log().tolist()
    return sorted(whole_evaluations(0.6, levels, scheduler in ADD_NOISE))


def whole_of(seen):
    return [index for index, each in enumerate(seen) if each.is_whole]


@torch.no_grad()
def added_to(unet, kind):
    """The arguments by which something is added to the feature maps of a call."""
    control, adapter = [], []

    def first(_, __, h):
        control.append(noise(*h.shape, seed=1))

    def down(block, _, answer):
        x, skips = answer
        control.extend(noise(*skip.shape, seed=2) for skip in skips)
        inside = skips[len(block.resnets) - 1] if hasattr(block, "attentions") else x
        adapter.append(noise(*inside.shape, seed=3))

    hooks = [unet.conv_in.register_forward_hook(first)]
    hooks += [block.register_forward_hook(down) for block in unet.down_blocks]
    unet(timestep=500, **inputs(unet, grid=GRID))
    for hook in hooks:
        hook.remove()
    middle = noise(*control[-1].shape, seed=4)
    return {
        "nothing": {},
        "ControlNet": dict(zip(ADDED[:2], (control, middle), strict=True)),
        "adapter": {ADDED[2]: adapter},
        "adapter, as it was": {ADDED[0]: adapter},
    }[kind]


ADDED = (
    "down_block_additional_residuals",
    "mid_block_additional_residual",
    "down_intrablock_additional_residuals",
)
GRID = 32, 32


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*Passing intrablock residual connections:FutureWarning")
@pytest.mark.parametrize("kind", ["nothing", "ControlNet", "adapter", "adapter, as it was"])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize("merges", [True, False])
def test_with_its_own_deep_features_a_shallow_call_is_the_whole_one(
    monkeypatch, family, kind, merges
):
    """What a ControlNet or an adapter adds to deep blocks is in the features."""
    unet, found, watched = make_unet(family), [], ModelRun.evaluate_watched
    added, given = added_to(unet, kind), inputs(unet, grid=GRID)
    sample = given.pop("sample")

    def again():
        # A UNet takes them out of the lists.
        return {name: each[:] if isinstance(each, list) else each for name, each in added.items()}

    def twice(self, evaluate, evaluation, deep, *others):
        answer, came = watched(self, evaluate, evaluation, deep, *others)
        args, kwargs = DiffusersUNets().shallow_arguments(
            evaluate.args, {**evaluate.keywords, **again()}
        )
        own = partial(evaluate.func, *args, **kwargs)
        other = self.evaluate_shallow(own, evaluation, deep, came.clone())
        found.append(relative_error(other.sample, answer.sample))
        return answer, came

    plain = unet(sample, 700, **given, **again()).sample
    monkeypatch.setattr(ModelRun, "evaluate_watched", twice)
    monkeypatch.setattr(Features, "at", lambda *_: None)
    tome_nodes.apply_patch(unet, 0.6, merge_attn=merges, forecast=True, max_downsample=4)
    for timestep in (900, 700, 500, 300):
        answer = unet(sample, timestep, **given, **again()).sample
        if timestep == 700:
            assert torch.equal(answer, plain) != merges
    assert found == [0.0] * 4


@pytest.mark.parametrize("name", SCHEDULERS)
def test_evaluations_are_planned_whatever_the_scheduler(name, log_messages):
    """An evaluation is a timestep, at which some schedulers ask twice."""
    case = of(name)
    seen = watch(case.network)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    assert case(STEPS).isfinite().all()
    count = len(seen)
    assert count in (STEPS, 2 * STEPS - 1)
    assert whole_of(seen) == planned_for(seen, name)
    assert f"shallow {count - len(whole_of(seen))}/{count} steps" in log_messages()[-1]


def test_a_scheduler_that_swings_needs_more_steps(log_messages):
    case = of("noise in DPM")
    case.pipeline.scheduler.register_to_config(solver_order=3)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    case(LEAST_OF_THREE - 1)
    assert reasons.too_short_for_shallow(15, 16).why in log_messages()[-1]


def test_a_run_merges_and_is_shallow_and_says_both_in_one_line_once(case, caplog):
    caplog.set_level("INFO", logger="tome_nodes")
    plain = case(STEPS, **LARGE)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    both = case(STEPS, **LARGE)
    case(STEPS, **LARGE)
    (line,) = caplog.messages
    assert line.startswith("[ToMe] merged ")
    # In SD 1.5, tokens merge in the last block of a shallow step, too.
    assert ", 20/20 steps, shallow 11/20 steps, ratio 0.60" in line
    assert "whole, " in line and " shallow; " in line
    # Where the percents leave out all steps, the picture is as before.
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast", start_percent=1.0)
    assert torch.equal(case(STEPS, **LARGE), plain)
    assert relative_error(both, plain) > 1e-3
    why = "no step was shallow: start_percent=1.0 to end_percent=1.0 covers no step of this run"
    assert why in caplog.messages[-1]


def by_hand(unet, timesteps, sample=None, **given):
    """A sampler of one's own: the latent goes towards what the UNet says."""
    arguments = inputs(unet)
    own = arguments.pop("sample")
    latent = own if sample is None else sample
    with torch.no_grad():
        for timestep in timesteps:
            latent = latent - 0.1 * unet(latent, timestep, **{**arguments, **given}).sample
    return latent


@pytest.mark.parametrize("timesteps", [range(951, 0, -50), range(999, 0, -50)], ids=str)
def test_a_loop_by_hand_is_counted_by_how_its_timesteps_fall(timesteps, log_messages):
    unet = make_unet()
    seen = watch(unet)
    tome_nodes.apply_patch(unet, 0.6, preset="fast")
    by_hand(unet, timesteps)
    assert whole_of(seen) == planned_for(seen)
    assert "shallow 11/20 steps" in log_messages()[-1]
    # A timestep that rises begins another run.
    del seen[:]
    by_hand(unet, timesteps)
    assert whole_of(seen) == planned_for(seen)


@pytest.mark.parametrize("names", [("sample",), ("timestep",), ("sample", "timestep")])
def test_arguments_may_be_passed_by_name(names):
    unet, given = make_unet(), inputs(make_unet())
    latent = given.pop("sample")
    seen = watch(unet)
    tome_nodes.apply_patch(unet, 0.6, preset="fast")
    for timestep in range(951, 0, -50):
        own = {"sample": latent, "timestep": timestep}
        by_place = [value for name, value in own.items() if name not in names]
        by_name = {name: own[name] for name in names}
        if names == ("sample",):
            by_place, by_name = [], own
        with torch.no_grad():
            latent = latent - 0.1 * unet(*by_place, **by_name, **given).sample
    assert whole_of(seen) == WHOLE


def test_an_attention_processor_from_elsewhere_keeps_all_blocks_running(case, log_messages):
    """As in SAG and LEDITS++, which read afterwards what the deep blocks attend to."""

    class Reads(diffusers.models.attention_processor.AttnProcessor):
        pass

    case.network.mid_block.attentions[0].transformer_blocks[0].attn1.processor = Reads()
    seen = watch(case.network)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    case(STEPS)
    assert len(whole_of(seen)) == STEPS
    assert reasons.reads_attention("Reads").why in log_messages()[-1]


@pytest.mark.parametrize("strength", [0.9, 0.5])
def test_a_run_that_begins_late_in_a_fine_schedule_is_counted_right(strength, log_messages):
    case = of("Euler", CASES["sdxl_img2img"])
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    seen = watch(case.network)
    case(60, strength=strength)
    count = round(60 * strength)
    assert len(seen) == count
    assert whole_of(seen) == planned_for(seen)
    assert f"/{count} steps" in log_messages()[-1]


def test_the_run_of_a_scheduler_whose_timesteps_are_no_indices():
    """Those of EDM are logarithms of noise levels."""
    case = sd15()
    case.pipeline.scheduler = diffusers.EDMEulerScheduler()
    seen = watch(case.network)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    assert case(STEPS).isfinite().all()
    assert whole_of(seen) == WHOLE


def test_calls_at_one_timestep_are_counted_to_a_limit(monkeypatch):
    monkeypatch.setattr(unet_run, "_MOST_CALLS", 3)
    config = ToMeConfig(forecast=True)
    kept = UNetRun(config, Span(config, float), Scheduling(), 1000)
    for call in range(9):
        kept.begin(noise(1, 4, 8, 8), 951.0, call)
    assert kept._conditions == [0, 1, 2] and not kept.is_last


def test_calls_at_any_noise_level_are_all_whole():
    unet = make_unet()
    seen = watch(unet)
    tome_nodes.apply_patch(unet, 0.6, preset="fast")
    by_hand(unet, [900, 880, 500, 490, 60, 55, 54, 20, 700, 300, 290, 30, 20, 5, 1])
    assert len(whole_of(seen)) == len(seen)


def test_a_second_pipeline_is_counted_by_its_own_timesteps():
    case, other = of("Euler"), of("DDIM")
    other.pipeline.unet = case.network
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    case(STEPS)
    seen = watch(case.network)
    other(12)
    assert whole_of(seen) == sorted(planned(12))


def test_a_run_of_another_schedule_begins_anew_even_if_its_timestep_falls(case):
    """An interrupted run, and one that begins with a picture, at a later step."""
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    seen = watch(case.network)

    def stop(pipeline, step, timestep, given):
        pipeline._interrupt = step == 6
        return {}

    case(STEPS, callback_on_step_end=stop)
    del seen[:]
    kind = diffusers.StableDiffusionImg2ImgPipeline
    later = kind(**case.pipeline.components, requires_safety_checker=False)
    case.pipeline = later
    later.set_progress_bar_config(disable=True)
    given = {"image": picture(), "strength": 0.5, "height": None, "width": None}
    case.arguments = {
        name: value for name, value in (case.arguments | given).items() if value is not None
    }
    case(STEPS)
    assert len(seen) == STEPS // 2
    assert whole_of(seen) == planned_for(seen)


def test_a_run_that_a_refiner_goes_on_with_ends_where_it_leaves_off(log_messages):
    """Of the 25 steps, 20 are left; another pipeline of its parts knows nothing of that."""
    case = of("Euler", sdxl)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    seen = watch(case.network)
    case(25, denoising_end=0.8)
    assert whole_of(seen) == planned_for(seen)
    assert "shallow 11/20 steps" in log_messages()[-1]
    kind = diffusers.StableDiffusionXLImg2ImgPipeline
    case.pipeline = kind(**case.pipeline.components, add_watermarker=False)
    case.pipeline.set_progress_bar_config(disable=True)
    for name in "height", "width":
        del case.arguments[name]
    del seen[:]
    case(54, image=picture(), strength=0.6)
    count = len(seen)
    assert count == 32
    assert whole_of(seen) == planned_for(seen)
    assert f"/{count} steps" in log_messages()[-1]


def test_a_run_may_leave_off_in_noise(log_messages):
    """Its last step does not paint the picture; a refiner does."""
    case = of("Euler", sdxl)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    seen = watch(case.network)
    case(STEPS, denoising_end=0.5)
    assert len(seen) == STEPS // 2
    assert whole_of(seen) == planned_for(seen) != [*range(STEPS // 2)]
    assert "shallow 4/10 steps" in log_messages()[-1]


def without_guidance(pipeline, step, timestep, given):
    """As diffusers documents it: from now on, the negative prompt is left out."""
    if step != 9:
        return {}
    pipeline._guidance_scale = 0.0
    return {"prompt_embeds": given["prompt_embeds"].chunk(2)[-1]}


def another_prompt(pipeline, step, timestep, given):
    return {"prompt_embeds": given["prompt_embeds"] + 1} if step == 9 else {}


@pytest.mark.parametrize("change", [without_guidance, another_prompt])
def test_the_step_after_a_change_of_the_prompt_is_whole(case, change):
    assert 10 not in WHOLE
    seen = watch(case.network)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    given = ["latents", "prompt_embeds"]
    case(STEPS, callback_on_step_end=change, callback_on_step_end_tensor_inputs=given)
    assert whole_of(seen) == sorted({*WHOLE, 10})


@pytest.mark.parametrize("kind", ["sd15", "sd15_inpaint"])
@pytest.mark.parametrize("name", ["Euler, karras", "DPM, karras", "UniPC", "LMS"])
def test_the_step_after_a_callback_changed_the_latent_is_whole(name, kind):
    def changed(pipeline, step, timestep, given):
        return {"latents": given["latents"].flip(-1)} if step == 9 else {}

    case = of(name, CASES[kind])
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    seen = watch(case.network)
    case(STEPS)
    usual = whole_of(seen)
    seen.clear()
    case(STEPS, callback_on_step_end=changed)
    (more,) = {*whole_of(seen)} - {*usual}
    # The next evaluation may be whole anyway.
    assert more == (11 if 10 in usual else 10)


def test_the_step_in_which_a_controlnet_ends_is_whole():
    """Its residuals become zeros."""
    case = of("Euler", CASES["sd15_controlnet"])
    seen = watch(case.network)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    case(STEPS, control_guidance_end=0.5)
    assert 10 not in WHOLE and 10 in whole_of(seen)


@torch.no_grad()
def test_what_the_answer_goes_by_has_to_stay_but_the_values_of_control_do_not():
    unet = make_unet("sdxl")
    given, added = inputs(unet), inputs(unet)["added_cond_kwargs"]
    text = given["encoder_hidden_states"]

    def conditions(**others):
        named = {**given, **others}
        del named["sample"]
        return DiffusersUNets().conditions((), named)

    control = {ADDED[1]: torch.ones(2, 64, 3, 4)}
    changed = [
        {"encoder_hidden_states": text + 1},
        {"encoder_hidden_states": text[:, :3]},
        {"timestep_cond": torch.ones(2, 8)},
        {"added_cond_kwargs": added | {"text_embeds": added["text_embeds"] + 1}},
        {"cross_attention_kwargs": {"scale": 0.5}},
        control,
        {ADDED[1]: 0 * control[ADDED[1]]},
    ]
    all_conditions = {conditions(**others) for others in [{}, *changed]}
    assert len(all_conditions) == 1 + len(changed)
    assert conditions(**control) == conditions(**{ADDED[1]: 2 * control[ADDED[1]]})


def test_calls_with_gradients_are_whole():
    unet = make_unet()
    seen, given = watch(unet), inputs(unet)
    sample = given.pop("sample")
    tome_nodes.apply_patch(unet, 0.6, preset="fast")
    for timestep in range(951, 0, -50):
        unet(sample, timestep, **given)
    assert len(whole_of(seen)) == len(seen) == STEPS


def test_blocks_that_bring_in_weights_for_the_next_all_run(case, log_messages, monkeypatch):
    """Streams need a GPU, so the hook of a block only says that it has one."""
    case.network.enable_group_offload("cpu", offload_type="block_level", num_blocks_per_group=1)
    hooked = [each for each in case.network.modules() if hasattr(each, "_diffusers_hook")]
    hook = hooked[-1]._diffusers_hook.get_hook("group_offloading")
    seen = watch(case.network)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    case(STEPS)
    assert whole_of(seen) == WHOLE
    monkeypatch.setattr(hook.group, "stream", object())
    monkeypatch.setattr(hook.group, "onload_", lambda: None)
    monkeypatch.setattr(hook.group, "offload_", lambda: None)
    del seen[:]
    case(STEPS)
    assert len(whole_of(seen)) == STEPS
    assert str(reasons.STREAMED) in log_messages()[-1]


@pytest.mark.parametrize(("size", "is_whole"), [(1, False), (3, True)])
def test_blocks_that_are_brought_in_with_others_are_not_left_out(case, size, is_whole):
    """The outermost block comes in when the first one of its group is called."""
    case.network.enable_group_offload("cpu", offload_type="block_level", num_blocks_per_group=size)
    seen = watch(case.network)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    case(STEPS)
    assert whole_of(seen) == ([*range(STEPS)] if is_whole else WHOLE)


def test_parts_of_a_picture_under_copies_of_the_scheduler_are_one_run(log_messages):
    """As in panoramas: each part of the picture has a copy of the scheduler."""
    case = sd15()
    kind = diffusers.StableDiffusionPanoramaPipeline
    case.pipeline = kind(
        **{**case.pipeline.components, "scheduler": SCHEDULERS["DDIM"](**SD)},
        requires_safety_checker=False,
    )
    case.pipeline.set_progress_bar_config(disable=True)
    seen = watch(case.network)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    case(8, height=512, width=576)
    assert whole_of(seen) == planned_for(seen)
    assert "shallow 3/8 steps" in log_messages()[-1]


def with_lora(case):
    case.network.add_adapter(LoraConfig(r=1, target_modules=["to_k"], init_lora_weights=False))
    return lambda: case.network.set_adapters("default", 0.3)


def with_image_prompt(case):
    ip_adapter(case.network)
    case.arguments["ip_adapter_image_embeds"] = [noise(2, 1, 16)]
    return lambda: case.pipeline.set_ip_adapter_scale(0.3)


@pytest.mark.parametrize("add", [with_lora, with_image_prompt])
def test_the_step_after_a_callback_changed_an_adapter_is_whole(case, add):
    change = add(case)

    def changed(pipeline, step, timestep, given):
        if step == 9:
            change()
        return {}

    seen = watch(case.network)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    case(STEPS)
    assert whole_of(seen) == WHOLE
    del seen[:]
    case(STEPS, callback_on_step_end=changed)
    assert whole_of(seen) == sorted({*WHOLE, 10})


def test_a_module_with_a_scaling_of_another_kind_is_no_adapter():
    """Modules of other code may have a number of that name."""
    unet = make_unet()
    unet.mid_block.scaling = 0.5
    seen = watch(unet)
    tome_nodes.apply_patch(unet, 0.6, preset="fast")
    by_hand(unet, range(951, 0, -50))
    assert whole_of(seen) == WHOLE


def test_a_loop_by_hand_over_the_unet_of_a_pipeline_ends_by_itself(case, log_messages):
    """The pipeline's scheduler knows nothing of the loop."""
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    before = numbers()
    by_hand(case.network, range(951, 0, -50))
    assert "shallow 11/20 steps" in log_messages()[-1]
    assert numbers() < before + MAY_STAY


@pytest.mark.parametrize("name", ["Euler, karras", "Euler"])
def test_a_second_pipeline_of_another_scheduler_has_one_run(name, log_messages):
    """What was patched knows nothing of its scheduler."""
    case, other = of("Euler"), of(name)
    other.pipeline.unet = case.network
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    other(STEPS)
    assert f"/{STEPS} steps" in log_messages()[-1]


def test_a_latent_of_another_size_begins_a_run():
    unet = make_unet()
    seen = watch(unet)
    tome_nodes.apply_patch(unet, 0.6, preset="fast")
    by_hand(unet, range(951, 500, -50))
    del seen[:]
    by_hand(unet, range(451, 0, -50), noise(2, 4, 24, 24))
    assert whole_of(seen)[:3] == [0, 1, 2]


def test_parts_of_several_sizes_are_one_run():
    config = ToMeConfig(forecast=True)
    kept = UNetRun(config, Span(config, float), Scheduling(), 1000)
    sizes = [(8, 8), (8, 12)]
    for size in sizes:
        kept.begin(noise(1, 4, *size), 951.0, None)
    for size in [*sizes, (12, 12)]:
        assert kept.takes(noise(1, 4, *size), 901.0) == (size in sizes)
        # Other parts of the same evaluation.
        assert kept.takes(noise(1, 4, *size), 951.0)
