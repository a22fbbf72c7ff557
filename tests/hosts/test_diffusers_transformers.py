"""The attach to transformers of real diffusers pipelines, whose pictures are found by asking."""

import copy
import inspect
import re
from concurrent.futures import ThreadPoolExecutor

import accelerate
import diffusers
import pytest
import torch
from common import Shuffle, attributes, relative_error
from diffusers import (
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    TaylorSeerCacheConfig,
)
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from models import pipelines
from models.pipelines import DEVICE, TEXT, TEXT_CHANNELS, TRANSFORMERS, noise
from peft import LoraConfig, get_peft_model_state_dict
from torch._dynamo.testing import CompileCounter

import tome_nodes
from tome_nodes.pytorch import diffusers_transformers
from tome_nodes.pytorch.diffusers_transformers import DiffusersTransformers
from tome_nodes.pytorch.patched_model import Attachment
from tome_nodes.settings.config import ToMeConfig
from tools.environment import ROOT

pytestmark = pytest.mark.newest_only

ROUNDING = 1e-5
KEYS = {"strategy": "window", "attn_tokens": "k,v", "min_tokens": 1}


def shuffle(model, **options):
    """Attach the lossless plan to the transformers of a pipeline."""
    host = DiffusersTransformers()
    for network, steps in host.find(model):
        config = ToMeConfig(**{"ratio": 0.5, **KEYS, **options})
        Attachment(config, host, steps, Shuffle).attach(network)


def merge(model, **options):
    return tome_nodes.apply_patch(model, **KEYS, proportional_attn=True, **options)


@pytest.fixture
def flux():
    return pipelines.flux()


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("attn_tokens", ["k,v", "q,k,v"])
def test_a_lossless_plan_reproduces_every_pipeline(name, attn_tokens, log_messages):
    case = TRANSFORMERS[name]()
    expected = case()
    before = attributes(case.transformer)
    shuffle(case.pipeline, attn_tokens=attn_tokens)
    random = torch.get_rng_state()
    assert relative_error(case(), expected) < ROUNDING
    assert torch.equal(torch.get_rng_state(), random)
    assert all(line.startswith("[ToMe] merged") for line in log_messages())
    assert len(log_messages()) == (2 if name == "wan" else 1)
    assert tome_nodes.remove_patch(case.pipeline) is case.pipeline
    assert attributes(case.transformer) == before
    assert torch.equal(case(), expected)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_only_pictures_merge_and_text_stays_in_place_bit_for_bit(name, calls):
    case = TRANSFORMERS[name]()
    case(steps=1)
    before = [*calls]
    calls.clear()
    assert merge(case.pipeline) is case.pipeline
    merged = case(steps=1)
    assert merged.isfinite().all()
    pictures = case.picture + case.references
    changed = 0
    for (query, key, _), (queries_left, keys_left, mask) in zip(before, calls, strict=True):
        assert queries_left.shape == query.shape
        fewer = key.shape[2] - keys_left.shape[2]
        assert fewer in (0, pictures // 2)
        if fewer and not changed:
            beside = key.shape[2] - pictures
            assert beside in (case.beside, 0)
            at = slice(None, beside) if torch.equal(key[:, :, :1], keys_left[:, :, :1]) else None
            at = at if at is not None else slice(-beside or key.shape[2], None)
            assert torch.equal(keys_left[:, :, at], key[:, :, at])
        if fewer:
            # Keys weigh as much as the tokens that they stand for, text and padding as one.
            weights = mask.double().exp().sum(-1)
            assert torch.allclose(weights, torch.full_like(weights, key.shape[2]))
        changed += fewer > 0
    assert changed >= 2


def test_another_pipeline_of_the_class_is_not_touched_in_any_thread(flux):
    other = pipelines.flux()
    expected = other(steps=3)
    merge(flux.pipeline)
    merged = flux(steps=3)
    assert relative_error(merged, expected) > 1e-3

    def run(case):
        return [case(steps=3) for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        patched, plain = pool.map(run, (flux, other))
    assert all(torch.equal(each, merged) for each in patched)
    assert all(torch.equal(each, expected) for each in plain)


@torch.no_grad()
def test_an_unpatched_clone_gets_its_own_result_while_the_patched_one_runs(flux):
    clone, arguments = copy.copy(flux.transformer), flux_arguments()

    @torch.no_grad()
    def evaluated():
        return clone(**arguments).sample

    expected, meanwhile = evaluated(), []
    merge(flux.transformer)

    def clone_runs(*_):
        if not meanwhile:
            with ThreadPoolExecutor(1) as pool:
                meanwhile.append(pool.submit(evaluated))

    block = flux.transformer.single_transformer_blocks[0]
    with block.register_forward_pre_hook(clone_runs):
        merged = flux.transformer(**arguments).sample
    assert torch.equal(meanwhile[0].result(), expected)
    assert not torch.equal(merged, expected)


def test_an_error_in_the_middle_leaves_nothing_behind(flux):
    merge(flux.pipeline)
    expected = flux()
    before = attributes(flux.transformer)

    def fails(*_):
        raise RuntimeError("no block today")

    block = flux.transformer.single_transformer_blocks[0]
    with block.register_forward_hook(fails), pytest.raises(RuntimeError, match="no block today"):
        flux()
    assert attributes(flux.transformer) == before
    assert torch.equal(flux(), expected)


@pytest.mark.parametrize("name", ["flux", "z_image", "cogvideox", "wan"])
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
    merge(flux.pipeline, start_percent=0.5)
    flux.pipeline.scheduler.set_timesteps(4, mu=1.0)
    flux.pipeline.scheduler.set_begin_index(2)
    arguments = flux_arguments()
    flux.transformer(**arguments)
    assert {key.shape[2] for _, key, _ in calls} == {TEXT + 40}


def flux_arguments(height=8, width=10, seed=3):
    places = torch.zeros(height, width, 3)
    places[..., 1] += torch.arange(height)[:, None]
    places[..., 2] += torch.arange(width)
    return {
        "hidden_states": noise(1, height * width, 16, seed=seed),
        "encoder_hidden_states": noise(1, TEXT, TEXT_CHANNELS),
        "pooled_projections": noise(1, TEXT_CHANNELS),
        "timestep": torch.tensor([0.5], device=DEVICE),
        "img_ids": places.view(-1, 3).to(DEVICE),
        "txt_ids": torch.zeros(TEXT, 3, device=DEVICE),
    }


@torch.no_grad()
def test_a_transformer_without_a_pipeline(flux, calls):
    transformer = flux.transformer
    assert merge(transformer) is transformer
    transformer(**flux_arguments())
    assert {key.shape[2] for _, key, _ in calls} == {TEXT + 40}
    with pytest.raises(ValueError, match=r"start_percent=0\.2 needs a pipeline, .* at 0\.0"):
        merge(transformer, start_percent=0.2)
    with pytest.raises(TypeError, match="this is a FlowMatchEulerDiscreteScheduler"):
        merge(FlowMatchEulerDiscreteScheduler())


@torch.no_grad()
def test_references_merge_within_themselves(calls):
    """As pipelines that edit pictures call Qwen-Image."""
    transformer = pipelines.make_qwen()
    arguments = {
        "hidden_states": noise(2, 80 + 48 + 24, 16),
        "encoder_hidden_states": noise(2, TEXT, TEXT_CHANNELS),
        "timestep": torch.tensor([0.5, 0.5], device=DEVICE),
        "img_shapes": [[(1, 8, 10), (1, 6, 8), (1, 4, 6)]] * 2,
    }
    expected = transformer(**arguments).sample
    shuffle(transformer)
    assert relative_error(transformer(**arguments).sample, expected) < ROUNDING
    calls.clear()
    merge(transformer)
    transformer(**arguments)
    assert {key.shape[2] for _, key, _ in calls} == {TEXT + 40 + 24 + 12}


@torch.no_grad()
def test_tokens_that_do_not_stand_row_by_row_do_not_merge(flux, log_messages):
    arguments = flux_arguments()
    arguments["img_ids"] = arguments["img_ids"][torch.randperm(80, generator=torch.Generator())]
    expected = flux.transformer(**arguments).sample
    merge(flux.transformer)
    for _ in range(2):
        assert torch.equal(flux.transformer(**arguments).sample, expected)
    assert log_messages() == [
        "[ToMe] nothing merged: the latent of this FluxTransformer2DModel is of an unknown form"
    ]


def test_a_transformer_is_asked_once(flux, monkeypatch):
    asked = []
    compared = diffusers_transformers.compared
    monkeypatch.setattr(
        diffusers_transformers, "compared", lambda *args: asked.append(args) or compared(*args)
    )
    merge(flux.pipeline)
    for _ in range(2):
        flux()
    assert len(asked) == 1
    flux(height=160)
    assert len(asked) == 2


CACHES = {
    "first_block": FirstBlockCacheConfig(threshold=0.3),
    "taylor_seer": TaylorSeerCacheConfig(
        cache_interval=2, max_order=1, disable_cache_before_step=2
    ),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("cache_first", [True, False])
def test_caches_in_either_order(flux, cache, cache_first, log_messages):
    def attach():
        shuffle(flux.pipeline)

    def enable():
        flux.transformer.enable_cache(CACHES[cache])

    enable()
    expected = flux(steps=6)
    flux.transformer.disable_cache()
    for each in (enable, attach) if cache_first else (attach, enable):
        each()
    assert relative_error(flux(steps=6), expected) < ROUNDING
    assert len(log_messages()) == 1
    assert log_messages()[0].startswith("[ToMe] merged 3/3 blocks")
    flux.transformer.disable_cache()
    flux(steps=6)
    assert relative_error(flux(steps=6), expected) > 1e-3
    tome_nodes.remove_patch(flux.pipeline)
    flux.transformer.enable_cache(CACHES[cache])
    assert torch.equal(flux(steps=6), expected)


@torch.no_grad()
def test_a_cache_that_leaves_all_attention_out_is_said_once(flux, calls, log_messages):
    transformer, arguments = flux.transformer, flux_arguments()
    transformer.enable_cache(CACHES["taylor_seer"])

    def attends():
        calls.clear()
        with transformer.cache_context("cond"):
            transformer(**arguments)
        return bool(calls)

    assert [attends() for _ in range(4)] == [True, True, False, True]
    merge(transformer)
    assert [attends() for _ in range(4)] == [False, True, False, True]
    replaced, merged = log_messages()
    assert replaced == (
        "[ToMe] nothing merged: other code replaces the attention of the transformer blocks"
    )
    assert merged.startswith("[ToMe] merged 3/3 blocks")


@pytest.mark.parametrize(
    "offload",
    [
        lambda model: accelerate.cpu_offload_with_hook(model, execution_device=DEVICE),
        lambda model: accelerate.cpu_offload(model, DEVICE),
        lambda model: model.enable_group_offload(DEVICE, offload_type="leaf_level"),
    ],
    ids=["model", "sequential", "group"],
)
def test_offloaded_weights(flux, offload, log_messages):
    expected = flux()
    offload(flux.transformer)
    shuffle(flux.pipeline)
    assert relative_error(flux(), expected) < ROUNDING
    assert log_messages()[0].startswith("[ToMe] merged 3/3 blocks")


LORA = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)


def add_lora(transformer):
    transformer.add_adapter(LORA)
    adapter = [weight for name, weight in transformer.named_parameters() if "lora_" in name]
    for index, weight in enumerate(adapter):
        weight.data.copy_(noise(*weight.shape, seed=index))


def load_lora(transformer):
    """As from a file."""
    trained = copy.deepcopy(transformer)
    add_lora(trained)
    weights = get_peft_model_state_dict(trained)
    transformer.load_lora_adapter({f"transformer.{name}": each for name, each in weights.items()})


@pytest.mark.parametrize("add", [add_lora, load_lora])
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_a_lora_before_and_after(name, add, log_messages):
    scale = {"joint_attention_kwargs" if name == "flux" else "attention_kwargs": {"scale": 0.7}}
    plain, before, after = (TRANSFORMERS[name]() for _ in range(3))
    without = plain(steps=4)
    add(plain.transformer)
    expected = [plain(steps=4), plain(steps=4, **scale)]
    assert relative_error(expected[0], without) > 0.01
    assert relative_error(*expected) > 1e-3
    add(before.transformer)
    shuffle(before.pipeline)
    shuffle(after.pipeline)
    assert relative_error(after(steps=4), without) < ROUNDING
    add(after.transformer)
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


def test_applying_again_makes_no_other_graph(flux, fresh_compiler):
    graphs = CompileCounter()
    flux.pipeline.transformer = torch.compile(flux.transformer, backend=graphs, fullgraph=True)
    for _ in range(2):
        merge(flux.pipeline)
        flux(steps=2)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("make", [pipelines.flux, pipelines.flux_kontext])
@pytest.mark.parametrize("way", ["before", "after", "in_place", "block_by_block"])
def test_compiled_transformers(fresh_compiler, way, make):
    flux = make()
    transformer, options = flux.transformer, {"backend": "eager", "fullgraph": True}
    plain = flux(steps=1)
    merge(flux.pipeline)
    expected = flux(steps=1)
    torch._dynamo.reset()
    if way == "before":
        tome_nodes.remove_patch(flux.pipeline)
    if way in ("before", "after"):
        flux.pipeline.transformer = torch.compile(transformer, **options)
    elif way == "in_place":
        transformer.compile(**options)
    else:
        transformer.compile_repeated_blocks(**options)
    if way == "before":
        flux(steps=1)
        merge(flux.pipeline)
    # There may be more blocks than graphs of one code.
    with torch._dynamo.config.patch(recompile_limit=2):
        assert relative_error(flux(steps=1), expected) < ROUNDING
    tome_nodes.remove_patch(flux.pipeline)
    assert relative_error(flux(steps=1), plain) < ROUNDING


def test_half_precision(log_messages):
    case = pipelines.flux()
    case.transformer.to(torch.bfloat16)
    case.arguments = {
        name: value.bfloat16() if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments.items()
    }
    expected = case(steps=4)
    shuffle(case.pipeline)
    given = case(steps=4)
    assert given.dtype == expected.dtype
    assert relative_error(given, expected) < 0.02
    assert log_messages()[-1].startswith("[ToMe] merged 3/3 blocks")


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
    "make",
    [
        lambda: with_reference(zero_cond_t=True),
        lambda: with_time_by_token("ltx"),
        lambda: with_time_by_token("wan"),
        with_first_frame,
        with_texts_of_two_lengths,
        with_masks_of_two_lengths,
        with_layers,
    ],
    ids=["reference", "ltx", "wan", "hunyuan_video", "z_image", "lumina2", "layers"],
)
def test_a_lossless_plan_where_tokens_are_treated_differently(make, log_messages):
    network, given = make()

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
        block.attn.set_processor(pipelines.lively(processor))
    options = {"joint_attention_kwargs": {"ip_hidden_states": [noise(1, 4, TEXT_CHANNELS)]}}
    expected = flux(**options)
    shuffle(flux.pipeline)
    assert relative_error(flux(**options), expected) < ROUNDING
    merge(flux.pipeline)
    assert 1e-3 < relative_error(flux(**options), expected) < 0.5


def test_gradient_checkpointing_is_left_alone_after_merging_too(flux, log_messages):
    transformer = flux.transformer.train()
    transformer.enable_gradient_checkpointing()

    def gradient():
        transformer.zero_grad()
        transformer(**flux_arguments()).sample.square().mean().backward()
        return transformer.x_embedder.weight.grad.clone()

    expected = gradient()
    merge(transformer)
    with torch.no_grad():
        transformer(**flux_arguments())
    for _ in range(2):
        assert torch.equal(gradient(), expected)
    merged, reason = log_messages()
    assert merged.startswith("[ToMe] merged 3/3 blocks")
    assert reason.startswith("[ToMe] nothing merged: gradient checkpointing")


def test_the_page_on_python_names_and_runs_what_is_tested(monkeypatch, log_messages, flux):
    class Pretrained(diffusers.FluxPipeline):
        """Small random weights, and no text encoder."""

        @classmethod
        def from_pretrained(cls, name):
            vae = pipelines.make_vae(shift_factor=0.0)
            return cls(**{**flux.pipeline.components, "vae": vae})

        def __call__(self, prompt):
            arguments = {**flux.arguments, "height": 256, "width": 256}
            return super().__call__(**arguments, num_inference_steps=4)

    monkeypatch.setattr(diffusers, "FluxPipeline", Pretrained)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    _, script = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names = {}
    exec(script, names)
    assert names["image"].size == (256, 256)
    assert log_messages() == ["[ToMe] forecasts the answer of the model in some steps, ratio 0.60"]
    named = set(re.findall(r"`(\w+Pipeline)`", page))
    assert named == {type(make().pipeline).__name__ for make in TRANSFORMERS.values()}
