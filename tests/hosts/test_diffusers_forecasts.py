"""Forecasts of the answers of real diffusers transformers."""

import math

import pytest
import torch
from common import relative_error
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from models.pipelines import DEVICE, TRANSFORMERS, make_flux, make_wan, noise
from test_diffusers_transformers import shuffle, with_layers

import tome_nodes
from tome_nodes.merging.layout import Grid
from tome_nodes.patching import forecast
from tome_nodes.pytorch.diffusers_transformers import DiffusersTransformers, Steps
from tome_nodes.pytorch.flow_call import FlowCall, flow_of
from tome_nodes.pytorch.latents import latents_of

pytestmark = pytest.mark.newest_only

FLOWS = [name for name in TRANSFORMERS if name != "cogvideox"]


@pytest.mark.parametrize("name", FLOWS)
def test_the_denoised_latent_is_where_the_only_step_ends(name, monkeypatch):
    """In the scheduler's own arithmetic, which knows what a transformer predicts."""
    case = TRANSFORMERS[name]()
    unguided = {"qwen_image": {"true_cfg_scale": 1.0}, "z_image": {"guidance_scale": 0.0}}
    options = unguided.get(name, {"guidance_scale": 1.0})
    expected = case(steps=1, **options)
    found = []
    denoised = FlowCall.denoised

    def spy(*args):
        found.append(denoised(*args))
        return found[-1]

    monkeypatch.setattr(FlowCall, "denoised", spy)
    shuffle(case.pipeline, forecast=True)
    case(steps=1, **options)
    (latent,) = found
    pack = getattr(case.pipeline, "_pack_latents", None)
    if name == "flux2":
        latent = pack(case.pipeline._patchify_latents(latent))
    elif pack is not None:
        latent = pack(latent, *(latent.shape if latent.ndim == 4 else ()))
    # Wan's timesteps are whole numbers.
    assert relative_error(latent.view_as(expected), expected) < 2e-3


@pytest.mark.parametrize(
    ("name", "make", "given", "grid", "shape"),
    [
        ("flux", make_flux, noise(1, 80, 24), Grid(8, 10), (1, 4, 16, 20)),
        ("wan", make_wan, noise(1, 10, 3, 16, 20), Grid(8, 10, 3), (1, 4, 3, 16, 20)),
    ],
    ids=["flux", "wan"],
)
@torch.no_grad()
def test_channels_that_say_what_to_paint_are_not_forecast(name, make, given, grid, shape):
    """They come in behind those of the latent, and do not come out."""
    channels = given.shape[-1 if name == "flux" else 1]
    network = make(channels)
    arguments = TRANSFORMERS[name]().called() | {"hidden_states": given, "return_dict": True}
    result = network(**arguments)
    latents = latents_of(arguments, channels)
    call = FlowCall(flow_of(network, arguments), network, arguments, latents, grid)
    assert call.latent.shape == shape
    returned = call.returned(call.latent, call.denoised(call.latent, result), result)
    assert type(returned) is type(result)
    assert relative_error(returned.sample, result.sample) < 1e-4


def log_of_signal_to_noise(share):
    share = min(share, 0.99)
    return 2 * math.log((1 - share) / share)


def sampled(case, monkeypatch, **options):
    """The noise and the latent of each of eight steps, and what came of it.

    That is what the scheduler got, by step, and what a transformer answered in those that it ran.
    """
    scheduler = case.pipeline.scheduler
    step, latents, used, answers = type(scheduler).step, [], [], {}
    for network in networks_of(case):
        network.register_forward_hook(
            lambda module, given, output: answers.update({len(latents): output[0]})
        )

    def spy(self, output, timestep, sample, *args, **kwargs):
        latents.append(sample)
        used.append(output)
        return step(self, output, timestep, sample, *args, **kwargs)

    monkeypatch.setattr(type(scheduler), "step", spy)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    case(steps=8, **options)
    return scheduler.sigmas.tolist(), latents, used, answers


def networks_of(case):
    return [network for network, _ in DiffusersTransformers().find(case.pipeline)]


@pytest.mark.parametrize("name", FLOWS)
def test_fast_leaves_out_steps_whose_answers_a_straight_line_gives(name, monkeypatch, log_messages):
    """In the scheduler's own arithmetic: the denoised latent is the noisy one without its noise."""
    case = TRANSFORMERS[name]()
    # Guidance of these scales the answer to its length without guidance.
    scaling = {"qwen_image": {"true_cfg_scale": 1.0}, "lumina2": {"cfg_normalization": False}}
    levels, latents, used, answers = sampled(case, monkeypatch, **scaling.get(name, {}))
    assert sorted(answers) == [0, 1, 2, 4, 5, 7]
    one, other, found = (latents[at] - levels[at] * used[at] for at in (1, 2, 3))
    before, after, now = (log_of_signal_to_noise(levels[at]) for at in (1, 2, 3))
    share = 0.7 * (now - after) / (after - before)
    # Wan's timesteps are whole numbers.
    assert relative_error(found, other + share * (other - one)) < 5e-3
    forecast = [line for line in log_messages() if line.startswith("[ToMe] forecasts the answer")]
    assert len(forecast) == len(networks_of(case))


@pytest.mark.parametrize("name", ["flux", "sd3", "ltx"])
def test_the_step_after_a_forecast_makes_up_for_its_error(name, monkeypatch):
    """In the scheduler's own arithmetic, with the line between the answers around the forecast."""
    monkeypatch.setattr(forecast, "_RESPONSE", 0.0)
    case = TRANSFORMERS[name]()
    levels, latents, _, answers = sampled(case, monkeypatch, guidance_scale=1.0)
    before, after = (latents[at] - levels[at] * answers[at] for at in (2, 4))
    logs = [log_of_signal_to_noise(levels[at]) for at in (2, 3, 4)]
    between = torch.lerp(before, after, (logs[1] - logs[0]) / (logs[2] - logs[0]))
    on_line = torch.lerp(between, latents[3], levels[4] / levels[3])
    expected = torch.lerp(after, on_line, levels[5] / levels[4])
    assert relative_error(latents[5], expected) < 1e-3
    assert relative_error(latents[5], torch.lerp(after, latents[4], levels[5] / levels[4])) > 3e-3


FLOW = FlowMatchEulerDiscreteScheduler()
RANDOM = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)


@pytest.mark.parametrize(
    ("scheduler", "set_to", "from_noise", "shares"),
    [
        (FLOW, {"sigmas": [1.0, 0.5]}, True, [0.5, 0.0]),
        (FLOW, {"sigmas": [0.5, 0.1]}, False, [0.2, 0.0]),
        (RANDOM, {"sigmas": [1.0, 0.5]}, True, [None, None]),
        (UniPCMultistepScheduler(), {"num_inference_steps": 2}, True, [None, None]),
        (DDIMScheduler(), {"num_inference_steps": 2}, True, [None, None]),
    ],
    ids=["from noise", "from a picture", "random", "UniPC", "no noise levels"],
)
def test_what_a_scheduler_tells_of_a_run(scheduler, set_to, from_noise, shares):
    scheduler.set_timesteps(**set_to)
    steps = Steps(scheduler=scheduler)
    assert steps.from_noise() == from_noise
    assert [steps.latent_share(step) for step in range(2)] == pytest.approx(shares)


def test_a_run_that_cannot_be_forecast_is_the_plain_one(log_messages):
    """Nobody has said how CogVideoX predicts."""
    case = TRANSFORMERS["cogvideox"]()
    plain = case(steps=4, height=256, width=256)
    tome_nodes.apply_patch(case.pipeline, preset="fast")
    assert torch.equal(case(steps=4, height=256, width=256), plain)
    assert log_messages() == [
        "[ToMe] nothing merged: the step or the noise of an evaluation is not known, so nothing is "
        "forecast; to merge instead, switch forecast off under preset custom"
    ]


@torch.no_grad()
def test_references_whose_keys_are_kept_are_not_forecast():
    """As Flux.2's pipeline with a cache: its first call has references in front, and no other."""
    case = TRANSFORMERS["flux2"]()
    network, given = case.transformer, case.called()
    latent, places = given["hidden_states"], given["img_ids"]
    apart = torch.tensor([10, 0, 0, 0], device=DEVICE)
    both = {
        "hidden_states": torch.cat([noise(1, 80, 16, seed=5), latent], 1),
        "img_ids": torch.cat([places + apart, places], -2),
        "num_ref_tokens": 80,
        "kv_cache_mode": "extract",
    }

    def answers():
        first, kept = network(**given | both)
        cached = {"kv_cache": kept, "kv_cache_mode": "cached"}
        times = (share * given["timestep"] for share in (0.75, 0.5, 0.25))
        return [first, *(network(**given | cached | {"timestep": time})[0] for time in times)]

    expected = answers()
    tome_nodes.apply_patch(network, preset="fast")
    assert all(map(torch.equal, answers(), expected))


def test_layers_are_not_forecast():
    """The first of them would be, and the others be those of the step before."""
    network, given = with_layers()
    assert flow_of(network, given) is None
    assert flow_of(network, {**given, "additional_t_cond": None}) is not None
