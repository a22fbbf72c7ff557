"""Forecasts of the answers of real UNets, in real pipelines of diffusers, beside merging."""

import copy
import gc
import math
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import diffusers
import pytest
import torch
from common import attributes, check_compiled, relative_error
from models.pipelines import CASES, COMPILED, call, inputs, make_unet, picture, sd15, sdxl

import tome_nodes
from benchmarks.forecasts import denoiser
from tome_nodes import reasons
from tome_nodes.forecasting import forecasts
from tome_nodes.forecasting.forecasts import Forecasts
from tome_nodes.forecasting.steps import log_snr
from tome_nodes.pytorch import patched_calls
from tome_nodes.pytorch.noise_call import NoiseCall, noise_call

pytestmark = pytest.mark.newest_only

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
"""The noise levels of Stable Diffusion."""

KINDS = {
    "Euler": diffusers.EulerDiscreteScheduler,
    "DDIM": diffusers.DDIMScheduler,
    "DPM": diffusers.DPMSolverMultistepScheduler,
}

PREDICTIONS = ("epsilon", "v_prediction", "sample")


def scheduler_of(name, prediction="epsilon", **options):
    if name == "DDIM":
        options = {"clip_sample": False, **options}
    return KINDS[name](**SD, prediction_type=prediction, **options)


@pytest.fixture
def case():
    case = sd15()
    case.pipeline.scheduler = scheduler_of("Euler")
    return case


def noise_at(scheduler, timestep):
    """The noise level of a timestep, by the products of the training alone."""
    kept = scheduler.alphas_cumprod.double().cpu()
    levels = ((1 - kept) / kept).sqrt().log()
    low = min(int(timestep), len(levels) - 2)
    return math.exp(torch.lerp(levels[low], levels[low + 1], timestep - low))


class Exact:
    """In place of a UNet's forward: the best guess of a picture, told as the scheduler reads it.

    ``answer`` returns the clean latent for a noisy one, the standard deviation of whose noise is
    given, and a prompt.
    """

    def __init__(self, case, answer):
        self._case, self._answer = case, answer
        case.network.forward = self

    def __call__(self, sample, timestep, encoder_hidden_states, return_dict=True, **_):
        scheduler = self._case.pipeline.scheduler
        noise = noise_at(scheduler, float(torch.as_tensor(timestep)))
        share = 1 / math.sqrt(1 + noise**2)
        noisy = sample.double() / share
        texts = zip(noisy.split(1), encoder_hidden_states, strict=True)
        clean = torch.cat([self._answer(one, noise, text) for one, text in texts])
        mixed = {
            "epsilon": lambda: (noisy - clean) / noise,
            "v_prediction": lambda: (share**2 * noisy - clean) / (noise * share),
            "sample": lambda: clean,
        }
        result = mixed[scheduler.config.prediction_type]().to(sample.dtype)
        kind = diffusers.models.unets.unet_2d_condition.UNet2DConditionOutput
        return kind(sample=result) if return_dict else (result,)


def gaussian(noisy, noise, text):
    """Of pictures that are normal around a mean for each prompt; see the benchmark."""
    seed, share = abs(int(100 * text.double().sum())), 1 + noise
    centre = denoiser.mean(seed, tuple(noisy.shape)) * bool(text.any())
    variance = 0.8 * (1.0 if text.any() else 1.49)
    return denoiser.denoised(noisy / share, centre.double(), noise / share, variance)


def exact(scheduler, answer=gaussian, case=None):
    case = case or sd15("one_level")
    case.pipeline.scheduler = scheduler
    case.arguments |= {"height": 256, "width": 256}
    case.arguments["negative_prompt_embeds"] = torch.zeros_like(case.arguments["prompt_embeds"])
    Exact(case, answer)
    return case


def steps_of(case):
    """The steps where the UNet runs, by its scheduler's timesteps, as it goes on."""
    ran = []

    def note(network, args, kwargs):
        timestep = args[1] if len(args) > 1 else kwargs["timestep"]
        ran.append(case.pipeline.scheduler.timesteps.tolist().index(float(timestep)))

    case.network.register_forward_pre_hook(note, with_kwargs=True)
    return ran


ODD = [*range(6, 19, 2)]
FORECAST = {"Euler": ODD, "DDIM": ODD, "DPM": [*ODD, 19]}
"""Of 20 steps, counted from 1. Under the first two, the last step is the longest by far."""


def missing(ran, steps=20):
    """The steps that were forecast, counted from 1."""
    return [step + 1 for step in range(steps) if step not in ran]


def in_words(steps, total=20):
    return f"forecast {len(steps)}/{total} steps ({', '.join(map(str, steps))})"


@pytest.mark.parametrize("guidance", [1.0, 7.0])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            (name, {"timestep_spacing": spacing})
            for name in KINDS
            for spacing in ("linspace", "leading", "trailing")
        ),
        *((name, {"use_karras_sigmas": True}) for name in ("Euler", "DPM")),
        ("Euler", {"use_exponential_sigmas": True}),
        ("DDIM", {"set_alpha_to_one": False, "steps_offset": 1}),
        ("Euler", {"final_sigmas_type": "sigma_min"}),
        ("DPM", {"euler_at_final": True, "use_karras_sigmas": True}),
        ("DPM", {"solver_order": 3}),
    ],
    ids=str,
)
def test_forecasts_change_pictures_less_than_as_many_fewer_steps(name, options, guidance):
    case = exact(scheduler_of(name, **options))
    plain = case(steps=20, guidance_scale=guidance)
    ran = steps_of(case)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    forecast = case(steps=20, guidance_scale=guidance)
    tome_nodes.remove_patch(case.pipeline)
    assert 12 <= len(ran) <= 14
    fewer = case(steps=len(ran), guidance_scale=guidance)
    assert relative_error(forecast, plain) < 0.7 * relative_error(fewer, plain)


@pytest.mark.parametrize("name", KINDS)
def test_forecasts_are_the_same_whatever_the_unet_predicts(name):
    pictures = []
    for prediction in PREDICTIONS:
        case = exact(scheduler_of(name, prediction))
        tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
        pictures.append(case(steps=20, guidance_scale=3.0))
    for other in pictures[1:]:
        assert relative_error(other, pictures[0]) < 1e-3


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", KINDS)
def test_the_denoised_latent_is_where_the_only_step_ends(name, prediction):
    """In the scheduler's own arithmetic, which knows what a UNet predicts."""
    case = sd15("one_level")
    case.pipeline.scheduler = scheduler_of(name, prediction, timestep_spacing="trailing")
    found = []

    def keep(network, args, kwargs, output):
        seen = noise_call(network, args, kwargs, case.pipeline.scheduler)
        noise = noise_at(case.pipeline.scheduler, 999)
        denoised = seen.denoised(output, noise)
        found.append(denoised)
        returned = seen.returned(denoised, noise, type(output))
        assert type(returned) is type(output)
        assert relative_error(returned[0], output[0]) < 1e-4

    case.network.register_forward_hook(keep, with_kwargs=True)
    expected = case(steps=1, guidance_scale=1.0)
    (denoised,) = found
    assert relative_error(denoised, expected) < 1e-4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Euler", {}),
        ("Euler", {"use_karras_sigmas": True}),
        ("DDIM", {"timestep_spacing": "leading"}),
        ("DDIM", {"timestep_spacing": "trailing"}),
    ],
    ids=str,
)
def test_the_step_after_a_forecast_makes_up_for_its_error(name, options, monkeypatch):
    """If answers are on a line and do not follow the latent, it has made up for the whole error."""
    monkeypatch.setattr(forecasts, "_RESPONSE", 0.0)
    monkeypatch.setattr(forecasts, "_DAMPING", 0.5)
    ends = torch.randn(2, 1, 4, 32, 32, generator=torch.Generator().manual_seed(3)).double()

    def on_a_line(noisy, noise, text):
        return ends[0] + 0.1 * log_snr(noise, is_flow=False) * ends[1]

    case = exact(scheduler_of(name, **options), on_a_line)

    def latents():
        seen = []

        def keep(pipeline, step, timestep, given):
            seen.append(given["latents"].clone())
            return {}

        case(steps=20, callback_on_step_end=keep)
        return seen

    plain = latents()
    ran = steps_of(case)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    changed = [relative_error(*pair) for pair in zip(latents(), plain, strict=True)]
    skipped = [step - 1 for step in missing(ran)]
    assert len(skipped) >= 7
    assert min(changed[step] for step in skipped) > 1e-3
    made_up = [step for step in range(19) if step in ran and step - 1 in skipped]
    assert max(changed[step] for step in made_up) < 1e-3


@pytest.mark.parametrize("name", CASES)
def test_every_pipeline_forecasts_and_is_as_before_without(name, log_messages):
    case = CASES[name]()
    case.pipeline.scheduler = scheduler_of("Euler")
    expected, before, random = case(steps=20), attributes(case.network), torch.get_rng_state()
    assert tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced") is case.pipeline
    forecast = case(steps=20)
    assert 1e-3 < relative_error(forecast, expected) < 1
    # Another run begins anew.
    assert torch.equal(case(steps=20), forecast)
    assert torch.equal(torch.get_rng_state(), random)
    assert log_messages() == [f"[ToMe] {in_words(ODD)}"]
    tome_nodes.remove_patch(case.pipeline)
    assert attributes(case.network) == before
    assert torch.equal(case(steps=20), expected)


def test_a_run_merges_and_forecasts_and_says_both_in_one_line_once(case, caplog):
    caplog.set_level("INFO", logger="tome_nodes")
    size = {"height": 256, "width": 256}
    plain, ran = case(steps=20, **size), steps_of(case)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    both = case(steps=20, **size)
    assert missing(ran) == ODD
    case(steps=20, **size)
    (line,) = caplog.messages
    assert line.startswith("[ToMe] merged ")
    assert f", 13/20 steps, {in_words(ODD)}, ratio 0.60" in line
    assert "with the model" in line and "fewer multiplications in a merged step" in line
    # Without forecasts, the picture is another one.
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast", start_percent=1.0)
    assert torch.equal(case(steps=20, **size), plain)
    assert relative_error(both, plain) > 1e-3


UNKNOWN = {
    "PNDM": lambda: diffusers.PNDMScheduler(**SD, skip_prk_steps=True),
    "UniPC": lambda: diffusers.UniPCMultistepScheduler(**SD),
    "noise in DPM": lambda: scheduler_of("DPM", algorithm_type="sde-dpmsolver++"),
    "noise in Euler": lambda: diffusers.EulerAncestralDiscreteScheduler(**SD),
}
UNEVEN = {
    "beta in Euler": lambda: scheduler_of("Euler", use_beta_sigmas=True),
    "exponential in DPM": lambda: scheduler_of("DPM", use_exponential_sigmas=True),
    "as far apart in DPM": lambda: scheduler_of("DPM", use_lu_lambdas=True),
}


@pytest.mark.parametrize("name", [*UNKNOWN, *UNEVEN])
def test_nothing_is_forecast_under_other_schedulers(name, log_messages):
    case = sd15()
    case.pipeline.scheduler = scheduler = (UNKNOWN | UNEVEN)[name]()
    expected = case(steps=20)
    tome_nodes.apply_patch(case.pipeline, preset="balanced")
    for _ in range(2):
        assert torch.equal(case(steps=20), expected)
    kind = type(scheduler).__name__
    why = reasons.UNEVEN if name in UNEVEN else reasons.unknown_scheduler(kind, is_unet=True)
    said = "\n".join(log_messages())
    assert said.count("nothing was forecast: ") == 1
    assert f"nothing was forecast: {why}" in said


@pytest.mark.parametrize("scheduler", ["Euler", "PNDM"])
def test_balanced_leaves_short_runs_alone_and_fast_says_why_it_does(scheduler, log_messages):
    case = sd15()
    make = UNKNOWN.get(scheduler, lambda: scheduler_of(scheduler))
    case.pipeline.scheduler = make()
    ran = []
    case.network.register_forward_hook(lambda *_: ran.append(1))
    for preset in "balanced", "fast":
        tome_nodes.apply_patch(case.pipeline, preset=preset)
        case(steps=12)
        assert ("forecast" in "\n".join(log_messages())) == (preset == "fast")
    # PNDM runs a step twice.
    assert len(ran) == 2 * (13 if scheduler == "PNDM" else 12)


def test_a_unet_without_its_pipeline_merges_only(case, log_messages):
    ran = steps_of(case)
    tome_nodes.apply_patch(case.network, preset="balanced")
    case(steps=20, height=256, width=256)
    assert not missing(ran)
    (line,) = log_messages()
    assert line.startswith("[ToMe] merged ")


@pytest.mark.parametrize("options", [{}, {"ratio": 0.0, "ratio_end": 0.4, "forecast": True}])
def test_settings_without_forecasts_merge_only(case, options):
    ran = steps_of(case)
    tome_nodes.apply_patch(case.pipeline, **options)
    case(steps=20)
    assert not missing(ran)


@pytest.mark.parametrize("name", KINDS)
def test_a_picture_to_begin_with_begins_at_a_later_step(name, log_messages):
    """Its answers hardly change. Of the eight steps that are left, two are forecast."""
    given = exact(scheduler_of(name))
    kind = diffusers.StableDiffusionImg2ImgPipeline
    given.pipeline = kind(**given.pipeline.components, requires_safety_checker=False)
    given.pipeline.set_progress_bar_config(disable=True)
    begin = {"image": picture(), "strength": 0.2}
    for name_ in "height", "width":
        del given.arguments[name_]
    ran = steps_of(given)
    tome_nodes.apply_patch(given.pipeline, 0.6, preset="fast")
    given(steps=40, guidance_scale=1.0, **begin)
    assert ran == [32, 33, 35, 37, 38, 39]
    (line,) = log_messages()
    assert line == f"[ToMe] {in_words([3, 5], 8)}"


def test_a_run_that_a_refiner_goes_on_with_ends_where_it_leaves_off(log_messages):
    """Of the 25 steps, 20 are left."""
    case = sdxl()
    case.pipeline.scheduler = scheduler_of("Euler")
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    ran = steps_of(case)
    case(steps=25, denoising_end=0.8)
    assert max(ran) == 19 and len(missing(ran)) == 8
    assert log_messages() == [f"[ToMe] {in_words(missing(ran))}"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"end_percent": 0.5}, [6, 8, 10]), ({"start_percent": 0.5}, [12, 14, 16, 18])],
    ids=str,
)
def test_percents_follow_the_timesteps_as_those_of_merging_do(case, given, expected):
    ran = steps_of(case)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced", **given)
    case(steps=20)
    assert missing(ran) == expected


def without_guidance(pipeline, step, timestep, given):
    """As diffusers documents it: from now on, the negative prompt is left out."""
    if step != 9:
        return {}
    pipeline._guidance_scale = 0.0
    return {"prompt_embeds": given["prompt_embeds"].chunk(2)[-1]}


def test_after_a_change_five_steps_run_before_the_next_forecast(case):
    ran = steps_of(case)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    given = ["latents", "prompt_embeds"]
    case(steps=20, callback_on_step_end=without_guidance, callback_on_step_end_tensor_inputs=given)
    assert missing(ran) == [6, 8, 10, 16, 18]


@torch.no_grad()
def test_what_the_answer_goes_by_has_to_stay_but_the_values_of_control_do_not():
    unet = make_unet("sdxl", in_channels=9)
    scheduler = scheduler_of("Euler")
    given = {"timestep": torch.tensor(500.0), **inputs(unet)}

    def conditions(**others):
        return noise_call(unet, (), given | others, scheduler).conditions

    sample, text = given["sample"], given["encoder_hidden_states"]
    assert conditions() == conditions() == conditions(timestep=torch.tensor(100.0))
    noisier = sample.clone()
    noisier[:, :4] += 1
    assert conditions(sample=noisier) == conditions()
    masked = sample.clone()
    masked[:, 4] += 1
    added = given["added_cond_kwargs"]
    control = {"mid_block_additional_residual": torch.ones(2, 64, 3, 4)}
    changed = [
        {"sample": masked},
        {"encoder_hidden_states": text + 1},
        {"encoder_hidden_states": text[:, :3]},
        {"timestep_cond": torch.ones(2, 8)},
        {"added_cond_kwargs": added | {"text_embeds": added["text_embeds"] + 1}},
        {"cross_attention_kwargs": {"scale": 0.5}},
        control,
    ]
    all_conditions = {conditions(**others) for others in [{}, *changed]}
    assert len(all_conditions) == 1 + len(changed)
    doubled = {name: 2 * residual for name, residual in control.items()}
    assert conditions(**control) == conditions(**doubled)
    by_place = noise_call(unet, (sample, 500, text), {"added_cond_kwargs": added}, scheduler)
    assert isinstance(by_place, NoiseCall)
    assert torch.equal(by_place.latent, sample[:, :4])


def test_calls_of_another_form_or_of_an_unknown_prediction_are_not_forecast():
    unet = make_unet()
    given = {"timestep": 500, **inputs(unet)}
    other = scheduler_of("DPM", "flow_prediction", use_flow_sigmas=True)
    named = "UNet2DConditionModel with flow_prediction"
    assert noise_call(unet, (), given, other) == reasons.unknown_prediction(named)
    for changed in {"sample": None}, {"sample": given["sample"][:, :3]}, {"timestep": None}:
        found = noise_call(unet, (), given | changed, scheduler_of("Euler"))
        assert found == reasons.OTHER_FORM


@pytest.mark.parametrize("name", KINDS)
def test_calls_that_the_scheduler_knows_nothing_of_only_merge(name, log_messages):
    case = sd15()
    case.pipeline.scheduler = scheduler_of(name)
    with torch.no_grad():
        expected = call(case.network, 500)
    tome_nodes.apply_patch(case.pipeline, preset="balanced")
    for _ in range(2):
        assert torch.equal(call(case.network, 500), expected)
    assert f"[ToMe] nothing was forecast: {reasons.OTHER_NOISE}" in log_messages()


def test_a_second_pipeline_of_a_unet_only_merges_unless_it_shares_the_scheduler(log_messages):
    case, other = sd15(), sd15()
    case.pipeline.scheduler = scheduler_of("Euler")
    other.pipeline.scheduler = scheduler_of("Euler")
    other.pipeline.unet = case.network
    expected = other(steps=20)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    forecast = case(steps=20)
    assert torch.equal(other(steps=20), expected)
    assert f"[ToMe] nothing was forecast: {reasons.OTHER_NOISE}" in log_messages()
    assert torch.equal(case(steps=20), forecast)
    other.pipeline.scheduler = case.pipeline.scheduler
    assert torch.equal(other(steps=20), forecast)


def test_a_run_that_is_interrupted_leaves_the_next_as_it_was(case, log_messages):
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    expected = case(steps=20)

    def stop(pipeline, step, timestep, given):
        pipeline._interrupt = step == 8
        return {}

    case(steps=20, callback_on_step_end=stop)
    assert torch.equal(case(steps=20), expected)
    assert len(log_messages()) == 1


@pytest.mark.parametrize("failure", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_a_run(case, failure, monkeypatch):
    kept, observe = [], Forecasts.observe

    def spy(self, *args):
        kept.append(weakref.ref(self))
        return observe(self, *args)

    def fail(*_):
        if failure is not None and case.pipeline.scheduler.step_index == 8:
            raise failure("on purpose")

    monkeypatch.setattr(Forecasts, "observe", spy)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    expected, patched = case(steps=20), attributes(case.network)
    hook = case.network.register_forward_hook(fail)
    with nullcontext() if failure is None else pytest.raises(failure, match="on purpose"):
        case(steps=20)
    hook.remove()
    assert attributes(case.network) == patched
    gc.collect()
    assert len(kept) > 18 and not any(reference() for reference in kept)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(case, 20).result(timeout=60), expected)


def test_copies_of_a_pipeline_follow_their_own_scheduler(case):
    plain = case(steps=20)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    expected = case(steps=20)
    case.pipeline = copy.deepcopy(case.pipeline)
    assert torch.equal(case(steps=20), expected)
    # A copy of the UNet alone has lost its pipeline.
    case.pipeline.unet = pickle.loads(pickle.dumps(case.network))
    assert torch.equal(case(steps=20), plain)


@pytest.mark.parametrize("way", ["before", "compile_repeated_blocks"])
def test_torch_compile_makes_whole_graphs_once(fresh_compiler, way):
    case = sd15(COMPILED[way])
    case.pipeline.scheduler = scheduler_of("Euler")
    case.arguments |= {"height": 256, "width": 256}
    check_compiled(case, way, bound=1e-4, steps=20, ratio=0.6, preset="fast")


@pytest.mark.parametrize("name", KINDS)
def test_a_model_in_half_precision_forecasts_the_same_steps(name):
    case = sd15()
    case.pipeline.scheduler = scheduler_of(name)
    case.network.to(torch.bfloat16)
    for prompt in "prompt_embeds", "negative_prompt_embeds":
        case.arguments[prompt] = case.arguments[prompt].bfloat16()
    ran = steps_of(case)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    latent = case(steps=20)
    assert latent.dtype == torch.bfloat16 and latent.isfinite().all()
    assert missing(ran) == FORECAST[name]


def test_an_error_in_the_report_costs_no_picture(case, log_messages, monkeypatch):
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    expected = case(steps=20)

    def fail(*_, **__):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(patched_calls, "replace", fail)
    assert torch.equal(case(steps=20), expected)
    assert log_messages()[1:] == [
        "[ToMe] the report of this run is missing: RuntimeError: on purpose"
    ]
