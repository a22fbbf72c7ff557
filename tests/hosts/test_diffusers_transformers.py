"""The attach to transformers of real diffusers pipelines, whose pictures are found by asking."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import common
import pytest
import torch
from common import relative_error
from diffusers import (
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    TaylorSeerCacheConfig,
)
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from models import pipelines
from models.pipelines import DEVICE, TEXT, TEXT_CHANNELS, TRANSFORMERS, lively, noise
from peft import LoraConfig, get_peft_model_state_dict

import tome_nodes
from tome_nodes.pytorch import diffusers_transformers
from tome_nodes.pytorch.patched_model import REASONS

pytestmark = pytest.mark.newest_only

ROUNDING = 1e-5
KEYS = {"strategy": "window", "attn_tokens": "k,v", "min_tokens": 1}

shuffle = partial(common.shuffle, **KEYS)


def merge(model, **options):
    return tome_nodes.apply_patch(model, **KEYS, proportional_attn=True, **options)


@pytest.fixture
def flux():
    return pipelines.flux()


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_only_pictures_merge_and_text_stays_in_place_bit_for_bit(name, calls):
    case = TRANSFORMERS[name]()
    case(steps=1)
    before = [*calls]
    calls.clear()
    merge(case.pipeline)
    case(steps=1)
    pictures = case.picture + case.references
    changed = 0
    for (query, key, _), (queries_left, keys_left, mask) in zip(before, calls, strict=True):
        assert queries_left.shape == query.shape
        fewer = key.shape[2] - keys_left.shape[2]
        assert fewer in (0, pictures // 2)
        if fewer and not changed:
            beside = key.shape[2] - pictures
            assert beside in (case.beside, 0)
            ends = slice(None, beside), slice(-beside, None)
            assert any(torch.equal(keys_left[:, :, end], key[:, :, end]) for end in ends)
        if fewer:
            # Keys weigh as much as the tokens that they stand for, text and padding as one.
            weights = mask.double().exp().sum(-1)
            assert torch.allclose(weights, torch.full_like(weights, key.shape[2]))
        changed += fewer > 0
    assert changed >= 2


@torch.no_grad()
def test_an_unpatched_clone_gets_its_own_result_while_the_patched_one_runs(flux):
    clone, given = copy.copy(flux.transformer), flux.called()

    @torch.no_grad()
    def evaluated():
        return clone(**given)[0]

    expected, meanwhile = evaluated(), []
    merge(flux.transformer)

    def clone_runs(*_):
        if not meanwhile:
            with ThreadPoolExecutor(1) as pool:
                meanwhile.append(pool.submit(evaluated))

    block = flux.transformer.single_transformer_blocks[0]
    with block.register_forward_pre_hook(clone_runs):
        merged = flux.transformer(**given)[0]
    assert torch.equal(meanwhile[0].result(), expected)
    assert not torch.equal(merged, expected)


@pytest.mark.parametrize("name", ["flux", "cogvideox", "wan"])
def test_percents_and_ratios_follow_the_steps_of_the_pipeline(name, calls):
    case = TRANSFORMERS[name]()

    def keys(**options):
        """The keys of self-attention in each of four steps."""
        merge(case.pipeline, **options)
        calls.clear()
        case(steps=4)
        longest = max(query.shape[2] for query, *_ in calls)
        lengths = [key.shape[2] for query, key, _ in calls if query.shape[2] == longest]
        each = len(lengths) // 4
        # Attention to text has the fewest.
        return [max(lengths[step * each : (step + 1) * each]) for step in range(4)]

    first, second, third, fourth = keys(start_percent=0.5)
    assert first == second > third == fourth
    first, second, third, fourth = keys(end_percent=0.25)
    assert first < second == third == fourth
    falling = keys(ratio=0.6, ratio_end=0.0)
    assert falling == sorted(falling)
    assert len(set(falling)) == 4


def test_a_picture_to_begin_with_begins_at_a_later_step(flux, calls):
    given = flux.called()
    calls.clear()
    merge(flux.pipeline, start_percent=0.5)
    flux.pipeline.scheduler.set_timesteps(4, mu=1.0)
    flux.pipeline.scheduler.set_begin_index(2)
    flux.transformer(**given)
    assert {key.shape[2] for _, key, _ in calls} == {TEXT + 40}


@torch.no_grad()
def test_a_transformer_without_a_pipeline(flux, calls):
    transformer, given = flux.transformer, flux.called()
    calls.clear()
    assert merge(transformer) is transformer
    transformer(**given)
    assert {key.shape[2] for _, key, _ in calls} == {TEXT + 40}
    with pytest.raises(ValueError, match=r"start_percent=0\.2 needs a pipeline, .* at 0\.0"):
        merge(transformer, start_percent=0.2)
    with pytest.raises(TypeError, match="this is a FlowMatchEulerDiscreteScheduler"):
        merge(FlowMatchEulerDiscreteScheduler())


def qwen_with_references(**options):
    """A transformer, and how pipelines that edit pictures call it."""
    given = {
        "hidden_states": noise(2, 80 + 48 + 24, 16),
        "encoder_hidden_states": noise(2, TEXT, TEXT_CHANNELS),
        "timestep": torch.tensor([0.5, 0.5], device=DEVICE),
        "img_shapes": [[(1, 8, 10), (1, 6, 8), (1, 4, 6)]] * 2,
    }
    return pipelines.make_qwen(**options), given


@torch.no_grad()
def test_references_merge_within_themselves(calls):
    transformer, arguments = qwen_with_references()
    merge(transformer)
    transformer(**arguments)
    assert {key.shape[2] for _, key, _ in calls} == {TEXT + 40 + 24 + 12}


@torch.no_grad()
def test_tokens_that_do_not_stand_row_by_row_do_not_merge(flux, log_messages):
    given = flux.called()
    given["img_ids"] = given["img_ids"][torch.randperm(80, generator=torch.Generator())]
    expected = flux.transformer(**given)[0]
    merge(flux.transformer)
    for _ in range(2):
        assert torch.equal(flux.transformer(**given)[0], expected)
    assert log_messages() == [
        "[ToMe] nothing merged: the latent of this FluxTransformer2DModel is of an unknown form"
    ]


def test_a_transformer_is_asked_once(flux, monkeypatch):
    asked = Mock(wraps=diffusers_transformers.compared)
    monkeypatch.setattr(diffusers_transformers, "compared", asked)
    merge(flux.pipeline)
    for _ in range(2):
        flux()
    assert asked.call_count == 1
    flux(height=160)
    assert asked.call_count == 2


CACHES = {
    "first_block": FirstBlockCacheConfig(threshold=0.3),
    "taylor_seer": TaylorSeerCacheConfig(
        cache_interval=2, max_order=1, disable_cache_before_step=2
    ),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("cache_first", [True, False])
def test_caches_in_either_order(flux, cache, cache_first, log_messages):
    attach = partial(shuffle, flux.pipeline)
    enable = partial(flux.transformer.enable_cache, CACHES[cache])
    enable()
    expected = flux(steps=6)
    flux.transformer.disable_cache()
    for each in (enable, attach) if cache_first else (attach, enable):
        each()
    assert relative_error(flux(steps=6), expected) < ROUNDING
    (line,) = log_messages()
    assert line.startswith("[ToMe] merged 3/3 blocks")
    flux.transformer.disable_cache()
    assert relative_error(flux(steps=6), expected) > 1e-3
    tome_nodes.remove_patch(flux.pipeline)
    enable()
    assert torch.equal(flux(steps=6), expected)


@torch.no_grad()
def test_a_cache_that_leaves_all_attention_out_is_said_once(flux, calls, log_messages):
    transformer, given = flux.transformer, flux.called()
    transformer.enable_cache(CACHES["taylor_seer"])

    def attends():
        calls.clear()
        with transformer.cache_context("cond"):
            transformer(**given)
        return bool(calls)

    assert [attends() for _ in range(4)] == [True, True, False, True]
    merge(transformer)
    assert [attends() for _ in range(4)] == [False, True, False, True]
    replaced, merged = log_messages()
    assert replaced == f"[ToMe] nothing merged: {REASONS.attention_replaced}"
    assert merged.startswith("[ToMe] merged 3/3 blocks")


def add_lora(transformer):
    """As from a file."""
    trained = copy.deepcopy(transformer)
    targets = ["to_q", "to_k", "to_v"]
    trained.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    weights = get_peft_model_state_dict(lively(trained))
    transformer.load_lora_adapter({f"transformer.{name}": each for name, each in weights.items()})


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_a_lora_before_and_after(name, log_messages):
    scale = {"joint_attention_kwargs" if name == "flux" else "attention_kwargs": {"scale": 0.7}}
    plain, before, after = (TRANSFORMERS[name]() for _ in range(3))
    without = plain(steps=4)
    add_lora(plain.transformer)
    expected = [plain(steps=4), plain(steps=4, **scale)]
    assert relative_error(expected[0], without) > 0.01
    assert relative_error(*expected) > 1e-3
    add_lora(before.transformer)
    shuffle(before.pipeline)
    shuffle(after.pipeline)
    assert relative_error(after(steps=4), without) < ROUNDING
    add_lora(after.transformer)
    for case in (before, after):
        given = [case(steps=4), case(steps=4, **scale)]
        assert all(relative_error(*pair) < ROUNDING for pair in zip(given, expected, strict=True))
        case.transformer.disable_adapters()
        assert relative_error(case(steps=4), without) < ROUNDING
        case.transformer.enable_adapters()
        tome_nodes.remove_patch(case.pipeline)
        assert torch.equal(case(steps=4), expected[0])
    assert all(line.startswith("[ToMe] merged") for line in log_messages())


@pytest.mark.parametrize("backend", ["native", "_native_math", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_backends(flux, backend, log_messages):
    merge(flux.pipeline)
    expected = flux()
    with attention_backend(backend):
        assert relative_error(flux(), expected) < ROUNDING
    assert "weigh as one token" not in log_messages()[-1]


def test_half_precision(flux, log_messages):
    flux.transformer.to(torch.bfloat16)
    for name, value in flux.arguments.items():
        if isinstance(value, torch.Tensor):
            flux.arguments[name] = value.bfloat16()
    expected = flux(steps=4)
    shuffle(flux.pipeline)
    given = flux(steps=4)
    assert given.dtype == expected.dtype
    assert relative_error(given, expected) < 0.02
    assert log_messages()[-1].startswith("[ToMe] merged 3/3 blocks")


def with_time_by_token(name):
    """The first frame is given."""
    case = TRANSFORMERS[name]()
    given = case.called()
    times = given["timestep"][:, None].repeat(1, case.picture)
    times[:, :80] = 0
    return case.transformer, given | {"timestep": times}


def with_first_frame():
    case = pipelines.hunyuan_video(image_condition_type="token_replace")
    return case.transformer, case.called()


def with_texts_of_two_lengths():
    case = pipelines.z_image()
    given = case.called()
    return case.transformer, given | {
        "x": given["x"][:1] * 2,
        "t": torch.tensor([0.5, 0.5], device=DEVICE),
        "cap_feats": [noise(TEXT, TEXT_CHANNELS), noise(40, TEXT_CHANNELS)],
    }


def with_masks_of_two_lengths():
    case = pipelines.lumina2()
    given = case.called()
    mask = torch.ones(2, TEXT, dtype=torch.long, device=DEVICE)
    mask[1, -3:] = 0
    doubled = {
        name: torch.cat([given[name]] * 2) for name in ("hidden_states", "encoder_hidden_states")
    }
    times = torch.tensor([0.5, 0.5], device=DEVICE)
    return case.transformer, {**given, **doubled, "encoder_attention_mask": mask, "timestep": times}


def with_layers():
    network, given = qwen_with_references(use_additional_t_cond=True)
    return network, given | {"additional_t_cond": torch.tensor([0, 0], device=DEVICE)}


TREATED_DIFFERENTLY = {
    "references": qwen_with_references,
    "references without noise": partial(qwen_with_references, zero_cond_t=True),
    "layers": with_layers,
    "ltx": partial(with_time_by_token, "ltx"),
    "wan": partial(with_time_by_token, "wan"),
    "hunyuan_video": with_first_frame,
    "z_image": with_texts_of_two_lengths,
    "lumina2": with_masks_of_two_lengths,
}


@pytest.mark.parametrize("name", TREATED_DIFFERENTLY)
def test_a_lossless_plan_where_tokens_are_treated_differently(name, log_messages):
    network, given = TREATED_DIFFERENTLY[name]()

    @torch.no_grad()
    def answer():
        (sample,) = network(**given | {"return_dict": False})
        return torch.stack(sample) if isinstance(sample, list) else sample

    expected = answer()
    shuffle(network)
    assert relative_error(answer(), expected) < ROUNDING
    assert log_messages()[-1].startswith("[ToMe] merged")


def test_copies_of_a_pipeline_follow_their_own_scheduler(flux):
    merge(flux.pipeline, start_percent=0.5)
    expected = flux(steps=4)
    flux.pipeline = copy.deepcopy(flux.pipeline)
    assert torch.equal(flux(steps=4), expected)


def test_pictures_as_prompts(flux):
    """IP-Adapter's processors are modules, and attend twice."""
    for block in flux.transformer.transformer_blocks:
        processor = FluxIPAdapterAttnProcessor(32, TEXT_CHANNELS)
        block.attn.set_processor(lively(processor))
    options = {"joint_attention_kwargs": {"ip_hidden_states": [noise(1, 4, TEXT_CHANNELS)]}}
    expected = flux(**options)
    shuffle(flux.pipeline)
    assert relative_error(flux(**options), expected) < ROUNDING
    merge(flux.pipeline)
    assert 1e-3 < relative_error(flux(**options), expected) < 0.5
