"""Forecasts of the answers of real transformers, in real pipelines of diffusers."""

from collections import Counter
from itertools import accumulate
from types import SimpleNamespace

import diffusers
import pytest
import torch
from common import attributes, relative_error
from models.pipelines import (
    DEVICE,
    TRANSFORMERS,
    Around,
    flux,
    make_flux,
    make_wan,
    noise,
    sd3,
    sd3_controlnet,
)

import tome_nodes
from tome_nodes import reasons
from tome_nodes.ops import clock
from tome_nodes.python.diffusers_transformers import DiffusersTransformers
from tome_nodes.python.flow_call import FlowCall, flow_call
from tome_nodes.skipping import forecasts
from tome_nodes.skipping.steps import steps_that_run

pytestmark = pytest.mark.newest_only

FLOWS = [name for name in TRANSFORMERS if name != "cogvideox"]


@pytest.fixture
def case():
    return flux()


UNGUIDED = {"qwen_image": {"true_cfg_scale": 1.0}, "z_image": {"guidance_scale": 0.0}}
"""The arguments of a call without guidance, where it is not ``guidance_scale=1.0``."""


def evenly(steps):
    """Noise levels that most pipelines choose; SD3 leaves them to its scheduler, whose last is next
    to nothing, so that the step before would be the last that counts."""
    return [1 - step / steps for step in range(steps)]


def networks_of(case):
    return [network for network, _ in DiffusersTransformers().find(case.pipeline)]


def calls_by_step(case):
    """How often transformers run in each step, as it goes on."""
    counts, scheduler = Counter(), case.pipeline.scheduler

    def count(*_):
        # It counts its steps only once the first has ended.
        begun = scheduler.step_index is not None
        counts[scheduler.step_index if begun else scheduler.begin_index or 0] += 1

    for network in networks_of(case):
        network.register_forward_hook(count)
    return counts


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (
            [9, 2, 0.5, 2, 0.5, 2, 0.5],
            "saved 4.5 s (28%): a step took 2 s with the model, 0.5 s forecast",
        ),
        ([9, 1, 1, 1, 1, 1, 1], "no gain: a step took 1 s with the model, 1 s forecast"),
    ],
)
def test_a_run_says_whether_it_helped(caplog, monkeypatch, seconds, words):
    """It takes the times of all steps but the last; the first, where devices warm up, is long."""
    caplog.set_level("INFO", logger="tome_nodes")
    began = accumulate(seconds, initial=0)
    # With guidance, there are two calls in a step.
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(began)))
    case = TRANSFORMERS["qwen_image"]()
    counts = calls_by_step(case)
    tome_nodes.apply_patch(case.pipeline, preset="balanced")
    case(steps=8)
    assert set(counts.values()) == {2}
    assert caplog.messages == [f"[ToMe] forecast 3/8 steps (3, 5, 7); {words}"]


@pytest.mark.parametrize("name", FLOWS)
def test_the_denoised_latent_is_where_the_only_step_ends(name, monkeypatch):
    """In the scheduler's own arithmetic, which knows what a transformer predicts."""
    case = TRANSFORMERS[name]()
    options = UNGUIDED.get(name, {"guidance_scale": 1.0})
    expected = case(steps=1, **options)
    denoised = []

    def keep(network, args, kwargs, output):
        noise = case.pipeline.scheduler.sigmas[0].item()
        denoised.append(flow_call(network, args, kwargs).denoised(output, noise))

    case.network.register_forward_hook(keep, with_kwargs=True)
    case(steps=1, **options)
    (latent,) = denoised
    assert relative_error(latent.view_as(expected), expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "make", "given", "shape"),
    [
        # Channels that say what to paint come in behind those of the latent, and do not come out.
        ("flux", lambda: make_flux(24), noise(1, 80, 24), (1, 80, 16)),
        ("wan", lambda: make_wan(10), noise(1, 10, 3, 16, 20), (1, 4, 3, 16, 20)),
        # Nobody reads what is returned for the tokens of references.
        ("qwen_image", None, noise(1, 80 + 48 + 24, 16), (1, 80, 16)),
    ],
)
def test_what_is_not_of_the_picture_is_not_forecast(name, make, given, shape):
    case = TRANSFORMERS[name]()
    network = case.network if make is None else make()
    arguments = case.called() | {"hidden_states": given, "return_dict": True}
    if make is None:
        arguments["img_shapes"] = [[(1, 8, 10), (1, 6, 8), (1, 4, 6)]]
    result = network(**arguments)
    call = flow_call(network, (), arguments)
    assert call.latent.shape == shape
    returned = call.returned(call.denoised(result, 0.9), 0.9, type(result))
    assert type(returned) is type(result)
    assert returned.sample.shape == result.sample.shape
    assert relative_error(returned.sample[:, :80], result.sample[:, :80]) < 1e-4


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("qwen_image", {}, dict.fromkeys((0, 1, 3, 5, 7), 2)),
        ("wan", {}, dict.fromkeys((0, 1, 3, 4, 5, 7), 2)),
        # From the second step on, a second call, of one sample instead of two.
        ("sd3", {"skip_guidance_layers": [1]}, {0: 1, **dict.fromkeys((1, 2, 3, 4, 5, 7), 2)}),
    ],
)
def test_the_calls_of_a_step_are_forecast_or_run_together(name, options, expected):
    """After a change, also of the expert, as many steps run as at the start."""
    case = TRANSFORMERS[name]()
    if name == "sd3":
        options |= {"skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
        options |= {"sigmas": evenly(8)}
    counts = calls_by_step(case)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    case(steps=8, **options)
    assert counts == expected


TWENTY = steps_that_run(0.6, 20, is_settled=False)


def without_guidance(pipeline, step, timestep, given):
    """As diffusers documents it: from now on, the negative prompt is left out."""
    if step != 5:
        return {}
    pipeline._guidance_scale = 0.0
    return {name: value.chunk(2)[-1] for name, value in given.items()}


def with_another_prompt(pipeline, step, timestep, given):
    return {name: value.flip(1) * 2 for name, value in given.items()} if step == 5 else {}


@pytest.mark.parametrize(
    ("make", "changes", "names"),
    [
        (sd3, without_guidance, ["prompt_embeds", "pooled_prompt_embeds"]),
        (flux, with_another_prompt, ["prompt_embeds"]),
    ],
)
def test_three_steps_run_before_the_next_forecast_if_prompts_change(make, changes, names):
    case = make()
    counts = calls_by_step(case)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    callback = {"callback_on_step_end": changes, "callback_on_step_end_tensor_inputs": names}
    case(steps=20, sigmas=evenly(20), **callback)
    assert counts.keys() == TWENTY | {6, 7, 8} > TWENTY


@pytest.mark.parametrize("part", ["start", "end"])
def test_three_steps_run_before_the_next_forecast_if_a_controlnet_begins_or_ends(part):
    """Its residuals are zeros of the same shape outside its range."""
    case = sd3_controlnet()
    counts = calls_by_step(case)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    case(steps=20, sigmas=evenly(20), **{f"control_guidance_{part}": 0.5})
    assert counts.keys() == TWENTY | {10, 11, 12} > TWENTY


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "is_told_by_value"),
    [
        *(("encoder_hidden_states", True), ("pooled_projections", True)),
        *(("controlnet_block_samples", False), ("controlnet_single_block_samples", False)),
    ],
)
def test_what_the_answer_goes_by_has_to_stay_but_the_values_of_control_do_not(
    case, name, is_told_by_value
):
    given = case.called()
    value = [noise(1, 80, 32)] if "samples" in name else given[name]

    def conditions(scale):
        scaled = [scale * each for each in value] if isinstance(value, list) else scale * value
        return flow_call(case.network, (), given | {name: scaled}).conditions

    assert conditions(1) == conditions(1) != conditions(0)
    assert (conditions(1) != conditions(2)) == is_told_by_value


def test_steps_are_counted_where_half_precision_cannot_tell_their_timesteps_apart():
    """At the start of 40 steps under a high shift, the noise falls by 0.002 a step."""

    def running(dtype):
        case = flux()
        case.pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=12.0)
        case.network.to(dtype)
        for name in "prompt_embeds", "pooled_prompt_embeds":
            case.arguments[name] = case.arguments[name].to(dtype)
        counts = calls_by_step(case)
        tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
        latent = case(steps=40)
        assert latent.dtype == dtype and latent.isfinite().all()
        return counts

    assert running(torch.bfloat16) == running(torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("is_told", [True, False])
def test_a_picture_to_begin_with_begins_at_a_later_step(case, is_told):
    """Of the four steps that are left, the third is forecast."""
    given, scheduler = case.called(), case.pipeline.scheduler
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    counts = calls_by_step(case)
    scheduler.set_timesteps(sigmas=evenly(8), device=DEVICE, mu=1.0)
    # Older pipelines do not tell their scheduler.
    scheduler.set_begin_index(4 if is_told else None)
    for time in scheduler.timesteps[4:]:
        given["timestep"] = time[None] / 1000
        answer = case.network(**given)[0]
        given["hidden_states"] = scheduler.step(answer, time, given["hidden_states"])[0]
    assert counts.keys() == ({4, 5, 7} if is_told else {0, 5, 7})


def multistep(kind, **options):
    return kind(prediction_type="flow_prediction", use_flow_sigmas=True, **options)


@pytest.mark.parametrize(
    ("scheduler", "steps", "running", "is_corrected"),
    [
        (diffusers.FlowMatchEulerDiscreteScheduler(), 4, {*range(4)}, False),
        (diffusers.FlowMatchEulerDiscreteScheduler(), 8, {0, 1, 2, 4, 5, 6, 7}, True),
        (diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True), 4, {0, 1, 3}, True),
        (multistep(diffusers.UniPCMultistepScheduler), 7, {*range(7)}, False),
        (multistep(diffusers.UniPCMultistepScheduler), 8, {0, 1, 2, 4, 5, 7}, False),
        (multistep(diffusers.DPMSolverMultistepScheduler), 8, {0, 1, 2, 4, 5, 7}, True),
        (multistep(diffusers.DPMSolverMultistepScheduler), 7, {*range(7)}, False),
    ],
    ids=["short Euler", "Euler", "karras", "short UniPC", "UniPC", "DPM", "short DPM"],
)
def test_what_is_forecast_under_a_scheduler(scheduler, steps, running, is_corrected, monkeypatch):
    changed = []
    missing = forecasts._missing

    def watched(*given):
        changed.append(missing(*given))
        return changed[-1]

    monkeypatch.setattr(forecasts, "_missing", watched)
    case = sd3()
    case.pipeline.scheduler = scheduler
    counts = calls_by_step(case)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    case(steps=steps)
    assert counts.keys() == running
    assert any(each is not None for each in changed) == is_corrected


@pytest.mark.parametrize(
    ("scheduler", "is_uneven"),
    [
        (diffusers.FlowMatchHeunDiscreteScheduler(), False),
        (diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True), False),
        (multistep(diffusers.DPMSolverMultistepScheduler, algorithm_type="sde-dpmsolver++"), False),
        # Its first two levels are next to pure noise, so that they count as one.
        (multistep(diffusers.DPMSolverMultistepScheduler, flow_shift=30.0), True),
        (multistep(diffusers.UniPCMultistepScheduler, use_karras_sigmas=True), True),
    ],
    ids=["second order", "noise in each step", "noise in DPM", "two levels as one", "karras"],
)
def test_nothing_is_forecast_under_other_schedulers(scheduler, is_uneven, log_messages):
    case = sd3()
    case.pipeline.scheduler = scheduler
    torch.manual_seed(0)
    expected = case(steps=8)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    for _ in range(2):
        torch.manual_seed(0)
        assert torch.equal(case(steps=8), expected)
    why = reasons.UNEVEN if is_uneven else reasons.unknown_scheduler(type(scheduler).__name__)
    assert log_messages() == [f"[ToMe] nothing was forecast: {why}"]


def test_a_model_that_is_not_known_to_predict_a_flow_is_left_alone(log_messages):
    case = TRANSFORMERS["cogvideox"]()
    plain = case(steps=4, height=256, width=256)
    tome_nodes.apply_patch(case.pipeline, preset="balanced")
    assert torch.equal(case(steps=4, height=256, width=256), plain)
    why = reasons.unknown_prediction("CogVideoXTransformer3DModel")
    assert log_messages() == [f"[ToMe] nothing was forecast: {why}"]


class Wrapper(Around):
    """A transformer of no class of diffusers, as some libraries make one."""

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_a_transformer_in_a_wrapper_is_left_alone(case, log_messages):
    plain = case(steps=4)
    case.pipeline.transformer = Wrapper(case.network)
    tome_nodes.apply_patch(case.pipeline, preset="balanced")
    assert torch.equal(case(steps=4), plain)
    assert log_messages() == [
        f"[ToMe] nothing was forecast: {reasons.unknown_prediction('Wrapper')}"
    ]


@pytest.mark.parametrize(
    ("name", "others"),
    [
        # The first answer would be forecast for one of several layers.
        ("qwen_image", {"additional_t_cond": torch.tensor([0], device=DEVICE)}),
        # A first call has references in front, and no other.
        ("flux2", {"kv_cache_mode": "extract"}),
        ("z_image", {"x": [[noise(4, 1, 16, 20)]]}),
    ],
)
def test_answers_of_another_form_are_not_forecast(name, others):
    case = TRANSFORMERS[name]()
    given = case.called()
    assert isinstance(flow_call(case.network, (), given), FlowCall)
    assert flow_call(case.network, (), given | others) == reasons.OTHER_FORM


@torch.no_grad()
def test_tiles_of_two_sizes_may_share_a_step(case):
    transformer, scheduler = case.network, case.pipeline.scheduler
    given = case.called()
    latent = given["hidden_states"]
    tiles = slice(0, 50), slice(50, latent.shape[1])

    def sampled():
        scheduler.set_timesteps(sigmas=evenly(8), mu=0.5)
        now = latent.clone()
        for timestep in scheduler.timesteps:
            flow = torch.zeros_like(now)
            for tile in tiles:
                of_tile = {"hidden_states": now[:, tile], "img_ids": given["img_ids"][tile]}
                time = (timestep / 1000).expand(1)
                flow[:, tile] = transformer(**{**given, **of_tile, "timestep": time})[0]
            (now,) = scheduler.step(flow, timestep, now, return_dict=False)
        return now

    plain = sampled()
    tome_nodes.apply_patch(case.pipeline, preset="balanced")
    calls = calls_by_step(case)
    assert 0 < relative_error(sampled(), plain) < 1
    assert len(calls) < 8


@pytest.mark.parametrize("is_first", [True, False])
def test_beside_a_cache(case, is_first):
    cache = diffusers.FirstBlockCacheConfig(threshold=0.3)
    counts = calls_by_step(case)
    if is_first:
        case.network.enable_cache(cache)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="balanced")
    if not is_first:
        case.network.enable_cache(cache)
    assert case(steps=20).isfinite().all()
    assert counts.keys() == TWENTY


@pytest.mark.parametrize("options", [{}, {"preset": "paper"}, {"ratio": 0.3, "min_tokens": 0}])
def test_settings_that_only_merge_are_refused_before_anything_is_patched(case, options):
    before = attributes(case.network)
    with pytest.raises(ValueError, match=r"forecast=False is not allowed .* preset='balanced'"):
        tome_nodes.apply_patch(case.pipeline, **options)
    assert attributes(case.network) == before
    tome_nodes.apply_patch(case.pipeline, forecast=True)
    assert attributes(case.network) != before


def test_a_transformer_without_its_pipeline_is_refused_and_can_be_restored(case):
    before = attributes(case.network)
    with pytest.raises(ValueError, match=r"FluxTransformer2DModel alone .* pass its pipeline"):
        tome_nodes.apply_patch(case.network, preset="balanced")
    assert attributes(case.network) == before
    tome_nodes.apply_patch(case.pipeline, preset="balanced")
    assert tome_nodes.remove_patch(case.network) is case.network
    assert attributes(case.network) == before
    with pytest.raises(TypeError, match="this is a FlowMatchEulerDiscreteScheduler"):
        tome_nodes.apply_patch(case.pipeline.scheduler)
