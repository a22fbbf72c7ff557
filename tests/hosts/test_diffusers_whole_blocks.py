"""Transformers of real diffusers pipelines: blocks on merged tokens, and forecasts."""

import inspect
import math
from contextlib import ExitStack, contextmanager

import pytest
import torch
from common import Shuffle, relative_error
from diffusers import FirstBlockCacheConfig, ParallelConfig
from models import pipelines
from models.pipelines import DEVICE, TEXT, TEXT_CHANNELS, TRANSFORMERS, noise
from test_diffusers_transformers import BLOCK, KEYS, ROUNDING, flux_arguments, merge, state
from torch import nn

import tome_nodes
from benchmarks.lossless import LosslessStrategy
from tome_nodes.merging.layout import Grid, Layout, Span
from tome_nodes.merging.plan import SlotPlan
from tome_nodes.patching.answer import Answer
from tome_nodes.pytorch.diffusers_transformers import DiffusersTransformers, _in_sequence
from tome_nodes.pytorch.flow_call import FlowCall, why_in_modules
from tome_nodes.pytorch.latents import latents_of
from tome_nodes.pytorch.patched_model import Attachment
from tome_nodes.pytorch.transformer_records import FlowTransformer, flow_transformer
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy

pytestmark = pytest.mark.newest_only

WHOLE = [name for name in TRANSFORMERS if name != "cogvideox"]


class AlikeShuffle(LosslessStrategy):
    """A permutation that is the same in all samples, for models that share positions."""

    def plans(self, features, grid, ratios):
        return [
            plan
            if plan is None
            else SlotPlan.from_slots(plan.slots()[:1].expand(len(features), -1), grid.tokens)
            for plan in super().plans(features, grid, ratios)
        ]


def attach(model, make, **options):
    host = DiffusersTransformers()
    for network, steps in host.find(model):
        Attachment(ToMeConfig(ratio=0.5, **KEYS, **options), host, steps, make).attach(network)


@contextmanager
def tokens_seen(*networks):
    """How many tokens enter the linear layers of the blocks, a list for each evaluation."""
    evaluations = []

    def entered(_, inputs):
        if inputs[0].ndim == 3:
            evaluations[-1].append(inputs[0].shape[1])

    with ExitStack() as hooks:
        for network in networks:
            begins = network.register_forward_pre_hook(lambda *_: evaluations.append([]))
            hooks.enter_context(begins)
            for name in flow_transformer(network).blocks:
                for module in network.get_submodule(name).modules():
                    if isinstance(module, nn.Linear):
                        hooks.enter_context(module.register_forward_pre_hook(entered))
        yield evaluations


@pytest.mark.parametrize("name", WHOLE)
def test_a_lossless_plan_reproduces_every_pipeline(name, log_messages):
    case = TRANSFORMERS[name]()
    expected = case(steps=4)
    before = state(case.transformer)
    attach(case.pipeline, Shuffle, **BLOCK)
    random = torch.get_rng_state()
    assert relative_error(case(steps=4), expected) < ROUNDING
    assert torch.equal(torch.get_rng_state(), random)
    assert all(", block scope" in line for line in log_messages())
    assert not any("module scope" in line for line in log_messages())
    assert len(log_messages()) == (2 if name == "wan" else 1)
    tome_nodes.remove_patch(case.pipeline)
    assert state(case.transformer) == before
    assert torch.equal(case(steps=4), expected)


@pytest.mark.parametrize("name", WHOLE)
def test_blocks_run_on_fewer_tokens_that_weigh_as_all(name, calls):
    case = TRANSFORMERS[name]()
    networks = [network for network, _ in DiffusersTransformers().find(case.pipeline)]
    with tokens_seen(*networks) as plain:
        expected = case(steps=4)
    keys = [key.shape[2] for _, key, _ in calls]
    calls.clear()
    merge(case.pipeline, **BLOCK)
    with tokens_seen(*networks) as seen:
        merged = case(steps=4)
    assert 1e-3 < relative_error(merged, expected) < 1.0
    pictures = case.picture + case.references
    assert len(plain) == len(seen) > 0
    for before, after in zip(plain, seen, strict=True):
        assert before != after
        # All layers of the picture, and none of text.
        assert all(
            own == every - pictures // 2 if every >= pictures else own == every
            for every, own in zip(before, after, strict=True)
        )
    fewer = [
        (before, mask)
        for before, (_, key, mask) in zip(keys, calls, strict=True)
        if key.shape[2] < before
    ]
    assert len(fewer) >= 2 * len(plain)
    for before, mask in fewer:
        weights = mask.double().exp().sum(-1)
        assert torch.allclose(weights, torch.full_like(weights, before))


@pytest.mark.parametrize("name", WHOLE)
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
    attach(case.pipeline, Shuffle, forecast=True)
    case(steps=1, **options)
    (latent,) = found
    pack = getattr(case.pipeline, "_pack_latents", None)
    if name == "flux2":
        latent = pack(case.pipeline._patchify_latents(latent))
    elif pack is not None:
        latent = pack(latent, *(latent.shape if latent.ndim == 4 else ()))
    # Wan's timesteps are whole numbers.
    assert relative_error(latent.view_as(expected), expected) < 2e-3


@pytest.mark.parametrize("name", ["flux", "z_image", "wan"])
def test_nothing_to_merge_is_exact(name):
    case = TRANSFORMERS[name]()
    expected = case(steps=1)
    merge(case.pipeline, ratio=0, ratio_end=0.5, **BLOCK)
    assert torch.equal(case(steps=1), expected)
    assert not torch.equal(case(steps=4), case(steps=1))


@pytest.mark.parametrize("name", ["flux", "qwen_image", "hunyuan_video"])
def test_several_samples(name, log_messages, monkeypatch):
    """Positions without a batch are those of all samples, which have to merge alike."""
    case = TRANSFORMERS[name]()
    options = {"num_videos_per_prompt" if name == "hunyuan_video" else "num_images_per_prompt": 2}
    expected = case(steps=4, **options)
    assert len(expected) == 2
    attach(case.pipeline, lambda *args: AlikeShuffle(make_strategy(*args)), **BLOCK)
    assert relative_error(case(steps=4, **options), expected) < ROUNDING
    assert ", block scope" in log_messages()[-1]
    chosen, tokens = [], SlotPlan.tokens

    def spy(plan):
        chosen.append(tokens(plan))
        return chosen[-1]

    monkeypatch.setattr(SlotPlan, "tokens", spy)
    merge(case.pipeline, **BLOCK)
    merged = case(steps=4, **options)
    assert 1e-3 < relative_error(merged, expected) < 1.0
    assert "module scope" not in log_messages()[-1]
    assert chosen
    assert all(torch.equal(*each) for each in chosen)


@torch.no_grad()
def twice(network, given):
    """The second of two evaluations of a transformer, the first of which is on all tokens."""
    (time,) = (name for name in ("timestep", "t") if name in given)
    network(**given)
    return network(**{**given, time: 0.9 * given[time]})


def answer(network, given):
    """The answer of the same, as one tensor."""
    sample = twice(network, given)[0]
    return torch.stack(sample) if isinstance(sample, list) else sample


def test_a_transformer_without_a_pipeline_returns_what_it_did():
    transformer = pipelines.make_flux()
    arguments = flux_arguments()
    expected = twice(transformer, arguments)
    attach(transformer, Shuffle, **BLOCK)
    given = twice(transformer, arguments)
    assert type(given) is type(expected)
    assert relative_error(given.sample, expected.sample) < ROUNDING
    merge(transformer, **BLOCK)
    with torch.no_grad():
        hidden = arguments.pop("hidden_states")
        transformer(hidden, **arguments)
        arguments["timestep"] = 0.9 * arguments["timestep"]
        (merged,) = transformer(hidden, **arguments, return_dict=False)
    assert 1e-3 < relative_error(merged, expected.sample) < 0.5


@pytest.mark.parametrize(
    ("make", "arguments", "along", "own", "grid"),
    [
        (
            pipelines.make_flux,
            {**flux_arguments(), "hidden_states": noise(1, 80, 24)},
            2,
            16,
            Grid(8, 10),
        ),
        (
            pipelines.make_wan,
            {
                "hidden_states": noise(1, 10, 3, 16, 20),
                "encoder_hidden_states": noise(1, TEXT, TEXT_CHANNELS),
                "timestep": torch.tensor([500.0], device=DEVICE),
            },
            1,
            4,
            Grid(8, 10, 3),
        ),
    ],
    ids=["flux", "wan"],
)
@torch.no_grad()
def test_channels_that_say_what_to_paint_are_not_forecast(make, arguments, along, own, grid):
    """They come in behind those of the latent, and do not come out."""
    channels = arguments["hidden_states"].shape[along]
    network = make(in_channels=channels, out_channels=own)
    result = network(**arguments)
    latents = latents_of(arguments, channels)
    call = FlowCall(flow_transformer(network), network, arguments, latents, grid)
    assert call.latent.shape[1:] == (4, *([3] if grid.frames > 1 else []), 16, 20)
    returned = call.returned(call.latent, call.denoised(call.latent, result), result)
    assert type(returned) is type(result)
    assert relative_error(returned.sample, result.sample) < 1e-4


def test_a_cache_that_is_gone_is_forgotten(log_messages):
    transformer = pipelines.make_flux()
    with tokens_seen(transformer) as plain:
        twice(transformer, flux_arguments())
    transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    merge(transformer, **BLOCK)
    with transformer.cache_context("cond"):
        twice(transformer, flux_arguments())
    assert "module scope in 3 as a cache" in log_messages()[-1]
    transformer.disable_cache()
    with tokens_seen(transformer) as seen:
        twice(transformer, flux_arguments())
    assert sum(seen[-1]) < sum(plain[-1])


def test_pictures_stand_where_they_were_found():
    first, second = Grid(8, 10), Grid(6, 8)
    for at_end, spans in [
        (True, (Span(7, first), Span(90, second))),
        (False, (Span(0, first), Span(90, second))),
    ]:
        layout = Layout(150, spans)
        answer = Answer({"blocks.0": {(150, 150): layout, (7, 150): None}})
        record = FlowTransformer(blocks={}, at_end=at_end, timesteps=(0.0, 1.0))
        pictures = _in_sequence(record, answer)
        assert Layout.of_pictures(150, pictures, at_end) == layout


def test_half_precision(log_messages):
    case = pipelines.flux()
    case.transformer.to(torch.bfloat16)
    case.arguments = {
        name: value.bfloat16() if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments.items()
    }
    expected = case(steps=4)
    attach(case.pipeline, Shuffle, **BLOCK)
    given = case(steps=4)
    assert given.dtype == expected.dtype
    assert relative_error(given, expected) < 0.02
    assert ", block scope" in log_messages()[-1]


TREATED = "whose tokens are treated differently"


def called(case):
    """How the pipeline of a case calls its transformer."""
    given = {}

    def keep(network, args, kwargs):
        names = [*inspect.signature(type(network).forward).parameters][1:]
        given.update(dict(zip(names, args, strict=False)) | kwargs)

    hook = case.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    case(steps=1)
    hook.remove()
    return case.transformer, given


def with_time_by_token(name):
    """The first frame is given."""
    case = TRANSFORMERS[name]()
    network, given = called(case)
    times = given["timestep"][:, None].repeat(1, case.picture)
    times[:, :80] = 0
    return network, given | {"timestep": times}


def with_first_frame():
    return called(pipelines.hunyuan_video(image_condition_type="token_replace"))


def with_texts_of_two_lengths():
    network, given = called(pipelines.z_image())
    return network, given | {
        "x": given["x"][:1] * 2,
        "t": torch.tensor([0.5, 0.5], device=DEVICE),
        "cap_feats": [noise(TEXT, TEXT_CHANNELS), noise(40, TEXT_CHANNELS)],
    }


def with_masks_of_two_lengths():
    network, given = called(pipelines.lumina2())
    mask = torch.ones(2, TEXT, dtype=torch.long, device=DEVICE)
    mask[1, -3:] = 0
    doubled = {
        name: torch.cat([given[name]] * 2) for name in ("hidden_states", "encoder_hidden_states")
    }
    times = torch.tensor([0.5, 0.5], device=DEVICE)
    return network, {**given, **doubled, "encoder_attention_mask": mask, "timestep": times}


def with_reference(**options):
    given = {
        "hidden_states": noise(1, 80 + 48, 16),
        "encoder_hidden_states": noise(1, TEXT, TEXT_CHANNELS),
        "timestep": torch.tensor([0.5], device=DEVICE),
        "img_shapes": [[(1, 8, 10), (1, 6, 8)]],
    }
    return pipelines.make_qwen(**options), given


def with_layers():
    network, given = with_reference(use_additional_t_cond=True)
    return network, given | {"additional_t_cond": torch.tensor([0], device=DEVICE)}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: with_reference(zero_cond_t=True), TREATED),
        (lambda: with_time_by_token("ltx"), TREATED),
        (lambda: with_time_by_token("wan"), TREATED),
        (with_first_frame, TREATED),
        (with_texts_of_two_lengths, TREATED),
        (with_masks_of_two_lengths, "as its picture is found in other blocks than usual"),
        (with_layers, "as it is called with additional_t_cond"),
    ],
    ids=["reference", "ltx", "wan", "hunyuan_video", "z_image", "lumina2", "layers"],
)
def test_what_treats_tokens_differently_merges_in_its_attention(make, why, log_messages):
    network, given = make()
    expected = answer(network, given)
    attach(network, Shuffle, **BLOCK)
    assert relative_error(answer(network, given), expected) < ROUNDING
    assert why in log_messages()[-1]
    assert "module scope in" in log_messages()[-1]


def test_parts_of_a_sequence_on_several_devices_merge_in_their_attention():
    network = pipelines.make_flux()
    record = flow_transformer(network)
    assert why_in_modules(record, network, {}, ()) is None
    network._parallel_config = ParallelConfig()
    assert "several devices" in why_in_modules(record, network, {}, ())
    record = flow_transformer(pipelines.flux2().transformer)
    given = {"kv_cache_mode": "extract"}
    assert why_in_modules(record, pipelines.make_flux(), given, ()) == (
        "as it is called with kv_cache_mode"
    )


def log_of_signal_to_noise(share):
    share = min(share, 0.99)
    return 2 * math.log((1 - share) / share)


@pytest.mark.parametrize("name", WHOLE)
def test_fast_leaves_out_steps_whose_answers_a_straight_line_gives(name, monkeypatch, log_messages):
    """In the scheduler's own arithmetic: the denoised latent is the noisy one without its noise."""
    case = TRANSFORMERS[name]()
    scheduler, networks = case.pipeline.scheduler, [case.transformer]
    networks += [each for each in [getattr(case.pipeline, "transformer_2", None)] if each]
    step, known, ran = type(scheduler).step, [], []
    for network in networks:
        (first, *_) = (m for m in network.modules() if isinstance(m, nn.Linear))
        first.register_forward_pre_hook(lambda *_: ran.append(len(known)))

    def spy(self, output, timestep, sample, *args, **kwargs):
        share = float(self.sigmas[len(known)])
        known.append((log_of_signal_to_noise(share), sample - share * output))
        return step(self, output, timestep, sample, *args, **kwargs)

    monkeypatch.setattr(type(scheduler), "step", spy)
    tome_nodes.apply_patch(case.pipeline, 0.6, preset="fast")
    # Guidance of these scales the answer to its length without guidance.
    scaling = {"qwen_image": {"true_cfg_scale": 1.0}, "lumina2": {"cfg_normalization": False}}
    case(steps=8, **scaling.get(name, {}))
    left_out = sorted(set(range(8)) - set(ran))
    # Two experts run half of the steps each, and neither knows what the other answered.
    assert left_out == ([6] if len(networks) > 1 else [4, 6])
    for index in left_out:
        (before, one), (after, other) = [known[at] for at in range(index) if at in ran][-2:]
        share = 0.7 * (known[index][0] - after) / (after - before)
        expected = other + share * (other - one)
        # Wan's timesteps are whole numbers.
        assert relative_error(known[index][1], expected) < 5e-3
    forecast = [line for line in log_messages() if line.startswith("[ToMe] forecasts the answer")]
    assert len(forecast) == 1


@pytest.mark.parametrize(
    ("kind", "steps", "reason"),
    [
        ("flux", 3, "a run of 3 steps or fewer has none to forecast"),
        (
            "cogvideox",
            4,
            "the step or the noise of an evaluation is not known, so nothing is forecast",
        ),
    ],
)
def test_a_run_that_cannot_be_forecast_is_the_plain_one(log_messages, kind, steps, reason):
    case = TRANSFORMERS[kind]()
    plain = case(steps=steps, height=256, width=256)
    tome_nodes.apply_patch(case.pipeline, preset="fast")
    assert torch.equal(case(steps=steps, height=256, width=256), plain)
    assert log_messages() == [
        f"[ToMe] nothing merged: {reason}; to merge instead, switch forecast off under preset "
        "custom"
    ]
