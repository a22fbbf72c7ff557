"""The attach to real diffusers pipelines: what merges, what is left alone, what is left behind."""

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch
from common import (
    EVERYTHING,
    TOMESD_OPTIONS,
    Counted,
    Shuffle,
    attributes,
    input_lengths,
    merged_everywhere,
    relative_error,
    scopes_and_tokens,
    theirs_and_ours,
)
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    LCMScheduler,
    UNet2DConditionModel,
)
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import (
    AttnProcessor,
    SlicedAttnProcessor,
)
from diffusers.models.embeddings import ImageProjection
from hypothesis import given, settings
from hypothesis import strategies as st
from models import pipelines
from models.pipelines import CASES, DEVICE, GRID, TEXT_CHANNELS, call, inputs, make_unet
from torch._dynamo.testing import CompileCounter

import tome_nodes
from tome_nodes.pytorch.diffusers_unets import DiffusersUNets
from tome_nodes.pytorch.patched_model import Attachment
from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.strategies.bipartite import BipartiteStrategy

pytestmark = pytest.mark.newest_only

# For float32 in these models, whose weights amplify rounding.
ROUNDING = 5e-5
TOKENS = GRID[0] * GRID[1]


def shuffle(unet, **options):
    """Attach the lossless plan to a UNet."""
    config = ToMeConfig(**{"ratio": 0.5, **EVERYTHING, **options})
    Attachment(config, DiffusersUNets(), 1000, Shuffle).attach(unet)


@pytest.fixture
def unet():
    return make_unet()


@pytest.mark.parametrize("name", CASES)
def test_every_pipeline_merges_and_is_as_before_without(name, log_messages):
    case = CASES[name]()
    before, expected = attributes(case.pipeline.unet), case()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    shuffle(case.pipeline.unet)
    assert relative_error(case(), expected) < ROUNDING
    assert merged_everywhere(log_messages()[-1])
    assert tome_nodes.apply_patch(case.pipeline, max_downsample="auto") is case.pipeline
    merged = case()
    assert merged.isfinite().all()
    assert relative_error(merged, expected) > 1e-3
    assert torch.equal(case(), merged)
    assert torch.equal(torch.get_rng_state(), state)
    assert tome_nodes.remove_patch(case.pipeline) is case.pipeline
    assert attributes(case.pipeline.unet) == before
    assert torch.equal(case(), expected)


@scopes_and_tokens
@pytest.mark.parametrize("family", ["sd15", "sd21", "sdxl"])
def test_a_lossless_plan_reproduces_the_unet_in_every_scope(
    family, scope, attn_tokens, log_messages
):
    unet = make_unet(family)
    expected = call(unet)
    shuffle(unet, scope=scope, attn_tokens=attn_tokens)
    assert relative_error(call(unet), expected) < ROUNDING
    assert merged_everywhere(log_messages()[-1])


def first_block(unet):
    return unet.down_blocks[0].attentions[0].transformer_blocks[0]


@functools.cache
def exact_unet(family):
    """A UNet in which no two similarities are almost equal."""
    return make_unet(family).double()


@settings(max_examples=40)
@given(
    TOMESD_OPTIONS,
    st.sampled_from(["sd15", "sd21", "sdxl"]),
    st.integers(1, 3),
    st.tuples(st.integers(8, 15), st.integers(8, 15)),
)
def test_equal_to_tomesd_for_each_of_its_options(options, family, batch, grid):
    unet = exact_unet(family)
    evaluate = functools.partial(call, batch=batch, grid=grid)
    theirs, ours = theirs_and_ours(unet, evaluate, options)
    assert relative_error(ours, theirs) < 1e-10


def ip_adapter(unet):
    """Give a UNet the layers of an IP-Adapter with random weights."""
    generator = torch.Generator().manual_seed(3)
    layers = {}
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            hidden = unet.get_submodule(name.removesuffix(".processor")).inner_dim
            number = 1 + len(layers)
            for projection in ("k", "v"):
                weight = torch.randn(hidden, TEXT_CHANNELS, generator=generator).to(DEVICE) / 6
                layers[f"{number}.to_{projection}_ip.weight"] = weight
    projection = ImageProjection(16, TEXT_CHANNELS, num_image_text_embeds=4).state_dict()
    weights = {
        "image_proj": {
            name.replace("image_embeds", "proj"): value for name, value in projection.items()
        },
        "ip_adapter": layers,
    }
    unet._load_ip_adapter_weights([weights])


PROCESSORS = {
    "default": lambda unet: None,
    "eager": lambda unet: unet.set_attn_processor(AttnProcessor()),
    "sliced": lambda unet: unet.set_attn_processor(SlicedAttnProcessor(2)),
    "fused": lambda unet: unet.fuse_qkv_projections(),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_attention_processors(unet, name, when):
    expected = call(unet)
    if when == "after":
        shuffle(unet)
    PROCESSORS[name](unet)
    if when == "before":
        shuffle(unet)
    assert relative_error(call(unet), expected) < ROUNDING
    tome_nodes.apply_patch(unet)
    assert relative_error(call(unet), expected) > 1e-3


@torch.no_grad()
def test_ip_adapter(unet, log_messages):
    arguments = inputs(unet) | {"timestep": torch.tensor(500)}
    without = unet(**arguments).sample
    ip_adapter(unet)
    generator = torch.Generator().manual_seed(4)
    images = [torch.randn(2, 1, 16, generator=generator).to(DEVICE)]
    arguments["added_cond_kwargs"] = {"image_embeds": images}
    expected = unet(**arguments).sample
    assert relative_error(expected, without) > 1e-3
    for scope in "module", "stack":
        shuffle(unet, scope=scope)
        assert relative_error(unet(**arguments).sample, expected) < ROUNDING
    # Its masks have the picture's size, so the attention that they cover keeps all tokens.
    arguments["cross_attention_kwargs"] = {
        "ip_adapter_masks": [torch.ones(1, 1, 96, 128, device=DEVICE)]
    }
    expected = unet(**arguments).sample
    for scope in "module", "block":
        shuffle(unet, scope=scope)
        assert relative_error(unet(**arguments).sample, expected) < ROUNDING
    assert log_messages()[-1].endswith("block scope, module scope in 7 that are patched")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_tokens": "q"}, "need attn_tokens=q,k,v"),
        ({"attn_tokens": "k,v"}, "need attn_tokens=q,k,v"),
        ({"strategy": "pool", "proportional_attn": True}, "do not go with strategy=pool"),
    ],
    ids=str,
)
def test_queries_and_keys_cannot_differ_before_fused_projections(
    unet, log_messages, options, reason
):
    expected = call(unet)
    unet.fuse_qkv_projections()
    tome_nodes.apply_patch(unet, **options)
    assert relative_error(call(unet), expected) < ROUNDING
    assert log_messages() == [f"[ToMe] nothing merged: fused projections {reason}"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["default", "eager", "sliced"])
def test_a_weighed_key_counts_as_often_as_the_tokens_it_stands_for(unet, name):
    PROCESSORS[name](unet)
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    generator = torch.Generator().manual_seed(1)
    queries, keys = (torch.randn(2, n, 32, generator=generator).to(DEVICE) for n in (9, 5))
    sizes = torch.tensor([3, 1, 4, 1, 2], device=DEVICE)
    weighed = DiffusersUNets.record.weigh_keys(None, {}, sizes.log().expand(2, -1))
    repeated = keys.repeat_interleave(sizes, dim=1)
    expected = attention(queries, encoder_hidden_states=repeated)
    actual = attention(queries, encoder_hidden_states=keys, **weighed)
    assert relative_error(actual, expected) < ROUNDING
    assert relative_error(attention(queries, encoder_hidden_states=keys), expected) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("scope", OPTIONS["scope"].choices)
def test_a_mask_over_the_picture_keeps_all_tokens(log_messages, scope):
    unet = make_unet("one_level")
    mask = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(2)).to(DEVICE) > 0.3
    arguments = inputs(unet) | {"timestep": torch.tensor(500), "attention_mask": mask}
    expected = unet(**arguments).sample
    assert relative_error(expected, call(unet)) > 1e-3
    tome_nodes.apply_patch(unet, scope=scope)
    assert torch.equal(unet(**arguments).sample, expected)
    assert log_messages() == [
        "[ToMe] nothing merged: other code masks the attention or changes its tokens"
    ]


@torch.no_grad()
def test_samples_merge_alike_in_one_batch_or_alone(unet):
    tome_nodes.apply_patch(unet)
    arguments, timestep = inputs(unet), torch.tensor(500)
    together = unet(**arguments, timestep=timestep).sample
    alone = [
        unet(timestep=timestep, **{name: x[i : i + 1] for name, x in arguments.items()}).sample
        for i in range(2)
    ]
    assert relative_error(torch.cat(alone), together) < ROUNDING


def steps_with_merging(case, steps, **options):
    """The tokens of the first self-attention in each step of a pipeline."""
    tome_nodes.apply_patch(case.pipeline, **options)
    with input_lengths(first_block(case.pipeline.unet).attn1.to_q) as tokens:
        case(steps=steps)
    return [count / TOKENS for count in tokens]


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        # The four steps are at the timesteps 751, 501, 251 and 1 of 1000.
        ({"end_percent": 0.4}, [0.5, 1, 1, 1]),
        ({"end_percent": 0.6}, [0.5, 0.5, 1, 1]),
        ({"start_percent": 0.6}, [1, 1, 0.5, 0.5]),
        ({"start_percent": 0.3, "end_percent": 0.7}, [1, 0.5, 1, 1]),
        ({"start_percent": 0.0, "end_percent": 1.0}, [0.5] * 4),
        ({"start_percent": 0.1, "end_percent": 0.1}, [1] * 4),
    ],
    ids=str,
)
def test_percent_limits_are_shares_of_the_noise_levels(options, shares):
    case = CASES["sd15"]()
    assert steps_with_merging(case, 4, **options) == shares
    assert case.pipeline.scheduler.timesteps.tolist() == [751, 501, 251, 1]


def test_ratio_falls_with_the_noise_levels():
    shares = steps_with_merging(CASES["sd15"](), 4, ratio=0.6, ratio_end=0.2)
    expected = [1 - (0.2 + 0.4 * t / 999) for t in (751, 501, 251, 1)]
    assert shares == pytest.approx(expected, abs=1 / TOKENS)


def test_steps_aside_where_other_code_changes_the_tokens(unet, log_messages):
    expected = call(unet)
    tome_nodes.apply_patch(unet, max_downsample=8)
    for block in unet.modules():
        if isinstance(block, BasicTransformerBlock):
            # As if the other code added a token of its own.
            block.register_forward_pre_hook(
                lambda _, arguments: (torch.cat([arguments[0], arguments[0][:, :1]], 1),)
            )
            block.register_forward_hook(lambda _, __, output: output[:, :-1])
    changed = call(unet)
    tome_nodes.remove_patch(unet)
    assert torch.equal(call(unet), changed)
    assert relative_error(changed, expected) > 1e-6
    assert log_messages() == [
        "[ToMe] nothing merged: other code changes the tokens of the transformer blocks"
    ]


def test_timesteps_of_any_kind(unet):
    tome_nodes.apply_patch(unet)
    results = [
        unet(timestep=timestep, **inputs(unet)).sample
        for timestep in (500, 500.0, torch.tensor(500), torch.tensor([500, 500], device=DEVICE))
    ]
    assert all(torch.allclose(result, results[0], atol=1e-5) for result in results)
    arguments = inputs(unet)
    sample, text = arguments["sample"], arguments["encoder_hidden_states"]
    assert torch.equal(unet(sample, 500, text).sample, results[0])


def test_picks_depend_on_seed_and_timestep(unet):
    def result(timestep=500, **options):
        tome_nodes.apply_patch(unet, **options)
        return call(unet, timestep)

    first = result(seed=5)
    assert torch.equal(result(seed=5), first)
    assert not torch.equal(result(seed=6), first)
    splits = []

    class Noted(BipartiteStrategy):
        def split(self, grid, picks):
            splits.append(picks)
            return super().split(grid, picks)

    Attachment(ToMeConfig(min_tokens=1), DiffusersUNets(), 1000, Noted).attach(unet)
    for timestep in 500, 500.5, 500:
        call(unet, timestep)
    # One more tests the device.
    _, first, second, third = splits
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


def test_applying_again_replaces_the_settings(unet):
    tome_nodes.apply_patch(unet, ratio=0.3)
    once = call(unet)
    tome_nodes.apply_patch(unet, ratio=0.7, merge_mlp=True)
    tome_nodes.apply_patch(unet, ratio=0.3)
    assert len(type(unet).__mro__) == len(UNet2DConditionModel.__mro__) + 1
    assert torch.equal(call(unet), once)


def test_ratio_zero_is_the_unpatched_unet(unet):
    before = attributes(unet)
    tome_nodes.apply_patch(unet, ratio=0.0)
    assert attributes(unet) == before


def test_hooks_of_others_stay(unet):
    calls = []
    handle = unet.register_forward_pre_hook(lambda *_: calls.append("before"))
    tome_nodes.apply_patch(unet)
    unet.register_forward_hook(lambda *_: calls.append("after"))
    tome_nodes.remove_patch(unet)
    call(unet)
    assert calls == ["before", "after"]
    handle.remove()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda unet: pickle.loads(pickle.dumps(unet))])
def test_a_copy_merges_in_its_own_weights(unet, copied):
    tome_nodes.apply_patch(unet, merge_mlp=True)
    expected = call(unet)
    other = copied(unet)
    assert torch.equal(call(other), expected)
    for parameter in unet.parameters():
        parameter.data.zero_()
    assert torch.equal(call(other), expected)
    tome_nodes.remove_patch(other)
    assert not torch.equal(call(other), expected)
    assert type(other) is UNet2DConditionModel
    assert type(unet) is not UNet2DConditionModel


def test_a_shallow_copy_merges_in_its_own_blocks(unet):
    tome_nodes.apply_patch(unet)
    merged = call(unet)
    replica = copy.copy(unet)
    replica._modules = dict(unet._modules)
    replica.down_blocks = copy.deepcopy(unet.down_blocks)
    assert torch.equal(call(replica), merged)
    for parameter in unet.down_blocks.parameters():
        parameter.data.zero_()
    assert torch.equal(call(replica), merged)
    assert not torch.equal(call(unet), merged)


FAILING = {
    "block": lambda unet: unet.mid_block.attentions[0].transformer_blocks[0].ff,
    "between blocks": lambda unet: unet.up_blocks[-1].resnets[0].conv1,
    "the UNet itself": lambda unet: unet,
}
"""Where an error comes."""


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("offloaded", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("place", FAILING)
def test_a_call_that_fails_leaves_nothing_behind(unet, place, offloaded, failure):
    def fail(*_):
        raise failure("on purpose")

    if offloaded:
        accelerate.cpu_offload(unet, DEVICE, offload_buffers=True)
    before, expected = attributes(unet), call(unet)
    tome_nodes.apply_patch(unet, **EVERYTHING)
    forwards, merged = [vars(module).get("forward") for module in unet.modules()], []
    for _ in range(2):
        hook = FAILING[place](unet).register_forward_hook(fail)
        with pytest.raises(failure, match="on purpose"):
            call(unet)
        hook.remove()
        assert [vars(module).get("forward") for module in unet.modules()] == forwards
        merged.append(call(unet))
    assert torch.equal(*merged)
    assert relative_error(merged[0], expected) > 1e-3
    tome_nodes.remove_patch(unet)
    assert attributes(unet) == before
    assert torch.equal(call(unet), expected)


def test_an_override_of_other_code_is_run_and_comes_back(unet):
    attention, lengths = first_block(unet).attn1, []
    tome_nodes.apply_patch(unet)

    def theirs(hidden_states, **kwargs):
        lengths.append(hidden_states.shape[1])
        return type(attention).forward(attention, hidden_states, **kwargs)

    attention.forward = theirs
    call(unet)
    assert vars(attention)["forward"] is theirs
    assert lengths == [TOKENS // 2]


def test_a_forward_with_other_names_merges_as_before(unet):
    tome_nodes.apply_patch(unet)
    expected = call(unet)
    own = unet.forward
    for theirs in (
        lambda *args, **kwargs: own(*args, **kwargs),
        lambda x, t, **others: own(x, t, **others),
        lambda x, timesteps=None, **others: own(x, others.pop("timestep", timesteps), **others),
    ):
        unet.forward = theirs
        assert torch.equal(call(unet), expected)
    unet.forward = lambda **kwargs: own(**kwargs)
    with torch.no_grad():
        assert torch.equal(unet(timestep=torch.tensor(500), **inputs(unet)).sample, expected)


def test_a_call_that_is_not_as_of_a_unet_runs_unmerged_and_says_so_once(unet, log_messages):
    own, arguments = unet.forward, inputs(unet)
    expected = call(unet)
    tome_nodes.apply_patch(unet)
    text = arguments["encoder_hidden_states"]
    unet.forward = lambda text, x: own(x["sample"], x["timestep"], text)
    with torch.no_grad():
        for _ in range(2):
            given = {"sample": arguments["sample"], "timestep": torch.tensor(500)}
            assert torch.equal(unet(text, given).sample, expected)
    assert log_messages() == [
        "[ToMe] nothing merged: the UNet was called without a sample and a timestep, as other code "
        "has replaced its forward"
    ]


@pytest.mark.parametrize("is_first", [True, False], ids=["offload first", "patch first"])
@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_offloading(unet, offload, is_first):
    """With accelerate's own hooks; without a GPU, the execution device is the CPU, too."""
    expected = call(unet)
    weights = {name: value.clone() for name, value in unet.state_dict().items()}

    def begin_offload(unet):
        if offload == "model":
            accelerate.cpu_offload_with_hook(unet, DEVICE)
        else:
            accelerate.cpu_offload(unet, DEVICE, offload_buffers=True)
            assert {parameter.device.type for parameter in unet.parameters()} == {"meta"}

    for begin in (begin_offload, shuffle) if is_first else (shuffle, begin_offload):
        begin(unet)
    assert relative_error(call(unet), expected) < ROUNDING
    tome_nodes.apply_patch(unet)
    assert relative_error(call(unet), expected) > 1e-3
    tome_nodes.remove_patch(unet)
    assert torch.equal(call(unet), expected)
    accelerate.hooks.remove_hook_from_module(unet, recurse=True)
    assert torch.equal(call(unet), expected)
    assert all(torch.equal(unet.state_dict()[name], value) for name, value in weights.items())


KEPT_DETAIL = {"scope": "stack", "refresh_steps": 4}


def results(unet, *timesteps, seed=0):
    return [call(unet, timestep, seed=seed) for timestep in timesteps]


@pytest.mark.parametrize(
    ("before", "timesteps"),
    # Timesteps that are numbers say nothing about their schedule.
    [((900,), (900, 600, 300)), ((900, 600), (500, 300))],
    ids=["at the first timestep", "at a lower timestep"],
)
def test_another_picture_begins_a_run(unet, before, timesteps):
    tome_nodes.apply_patch(unet, **KEPT_DETAIL)
    expected = results(unet, *timesteps, seed=1)
    tome_nodes.apply_patch(unet, **KEPT_DETAIL)
    results(unet, *before)
    assert all(map(torch.equal, results(unet, *timesteps, seed=1), expected))


def interrupt(pipeline, step, timestep, values):
    pipeline._interrupt = step == 2
    return values


@pytest.mark.parametrize(
    "end",
    [{"denoising_end": 0.7}, {"callback_on_step_end": interrupt}],
    ids=["at a share of the steps", "by an interrupt"],
)
def test_a_picture_after_one_that_ended_early_begins_a_run(end):
    first, second = CASES["sdxl"](), CASES["sdxl_img2img"]()
    unet = second.pipeline.unet = first.pipeline.unet

    def picture():
        return second(steps=8, strength=0.4, seed=3)

    tome_nodes.apply_patch(unet, max_downsample=2, **KEPT_DETAIL)
    expected = picture()
    tome_nodes.apply_patch(unet, max_downsample=2, **KEPT_DETAIL)
    first(steps=8, **end)
    assert torch.equal(picture(), expected)


@pytest.mark.parametrize(
    ("scheduler", "merged"),
    [(DDIMScheduler, 6), (EulerAncestralDiscreteScheduler, 7), (LCMScheduler, 7)],
)
def test_a_run_goes_on_whatever_noise_its_sampler_adds(untried, scheduler, merged):
    case = CASES["sd15"]()
    case.pipeline.scheduler = scheduler()
    config = ToMeConfig(min_tokens=1, **KEPT_DETAIL)
    Attachment(config, DiffusersUNets(), 1000, Counted).attach(case.pipeline.unet)
    Counted.made = 0
    case(steps=8)
    # The fifth step runs on all tokens, and the first if it is not at the most noise. One more,
    # of few tokens, tests the device.
    assert Counted.made == merged * 3 + 1


def test_a_call_that_failed_ends_its_run(unet):
    def fail(*_):
        raise RuntimeError("on purpose")

    tome_nodes.apply_patch(unet, **KEPT_DETAIL)
    expected = results(unet, 500, 300)
    tome_nodes.apply_patch(unet, **KEPT_DETAIL)
    call(unet, 900)
    with unet.conv_out.register_forward_hook(fail), pytest.raises(RuntimeError, match="on purpose"):
        call(unet, 600)
    assert all(map(torch.equal, results(unet, 500, 300), expected))


@pytest.mark.parametrize("options", [{}, {"scope": "stack", "refresh_steps": 3}], ids=str)
def test_threads_on_one_unet_take_turns_and_each_follows_its_own_run(unet, options):
    tome_nodes.apply_patch(unet, **options)
    runs = {seed: (900 - 10 * seed, 600, 300) for seed in range(3)}

    def run(seed):
        return [call(unet, timestep, seed=seed) for timestep in runs[seed]]

    alone = {seed: run(seed) for seed in runs}
    with ThreadPoolExecutor(len(runs)) as pool:
        together = dict(zip(runs, pool.map(run, runs), strict=True))
    for seed, results in alone.items():
        assert all(map(torch.equal, together[seed], results))
    tome_nodes.remove_patch(unet)
    assert not any("forward" in vars(module) for module in unet.modules())


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_a_call_that_a_thread_left_blocks_no_other(unet, end):
    """PyTorch runs no hooks after these, and nothing of ours runs outside of the modules."""
    expected = call(unet)
    tome_nodes.apply_patch(unet)
    merged = call(unet)
    hook = None

    def fail(*_):
        hook.remove()
        raise end

    with ThreadPoolExecutor(1) as pool:
        for elsewhere in False, True:
            hook = unet.conv_out.register_forward_hook(fail)
            with pytest.raises(end):
                pool.submit(call, unet).result() if elsewhere else call(unet)
            assert torch.equal(pool.submit(call, unet).result(timeout=60), merged)
            assert torch.equal(call(unet), merged)
        hook = unet.conv_out.register_forward_hook(fail)
        with pytest.raises(end):
            call(unet)
        pool.submit(tome_nodes.remove_patch, unet).result(timeout=60)
    assert not any("forward" in vars(module) for module in unet.modules())
    assert torch.equal(call(unet), expected)


def compile_in_place(unet, **options):
    unet.compile(**options)
    return unet


def compile_blocks(unet, **options):
    unet.compile_repeated_blocks(**options)
    return unet


@pytest.mark.parametrize(
    ("compiled", "options"),
    [
        (torch.compile, {"merge_crossattn": True, "merge_mlp": True}),
        (compile_in_place, {}),
        (compile_blocks, {"scope": "stack", "strategy": "window"}),
    ],
    ids=["whole", "in place", "blocks"],
)
def test_torch_compile_makes_whole_graphs_once(fresh_compiler, compiled, options):
    unet, graphs = make_unet("one_level"), CompileCounter()
    plain = call(unet)
    tome_nodes.apply_patch(unet, **options)
    expected = {timestep: call(unet, timestep) for timestep in (900, 600, 300)}
    torch._dynamo.reset()
    fast = compiled(unet, backend=graphs, fullgraph=True)
    counts = []
    for _ in range(2):
        tome_nodes.apply_patch(fast, **options)
        for timestep, result in expected.items():
            assert relative_error(call(fast, timestep), result) < ROUNDING
        counts.append(graphs.frame_count)
    assert counts[0] == counts[1] > 0
    tome_nodes.remove_patch(fast)
    assert relative_error(call(fast, 500), plain) < ROUNDING


def test_gradients_through_merged_tokens_are_those_of_finite_differences(unet):
    unet = unet.double()
    tome_nodes.apply_patch(unet, **EVERYTHING)
    arguments = inputs(unet)
    sample = arguments.pop("sample").requires_grad_()

    def loss(x):
        return unet(x, torch.tensor(500), **arguments).sample.square().mean()

    loss(sample).backward()
    assert all(p.grad is not None and p.grad.any() for p in unet.parameters())
    generator = torch.Generator().manual_seed(1)
    # So small that the same tokens still merge.
    way = 1e-6 * torch.randn(sample.shape, generator=generator, dtype=torch.float64).to(DEVICE)
    with torch.no_grad():
        difference = (loss(sample + way) - loss(sample - way)) / 2
    assert difference.item() == pytest.approx((sample.grad * way).sum().item(), rel=1e-4)


def gradients(unet, *timesteps):
    for timestep in timesteps:
        unet.zero_grad()
        unet(timestep=torch.tensor(timestep), **inputs(unet)).sample.square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in unet.parameters()])


def test_nothing_is_kept_while_gradients_are_computed(unet, log_messages):
    """A sample that looks like the next step of the one before, as timesteps of training may."""
    tome_nodes.apply_patch(unet, **KEPT_DETAIL)
    first = gradients(unet, 300)
    tome_nodes.apply_patch(unet, **KEPT_DETAIL)
    # On a GPU sums are not in the same order each time.
    assert relative_error(gradients(unet, 800, 600, 300), first) < 1e-4
    assert "as gradients are computed" in log_messages()[-1]


def test_gradient_checkpointing_is_left_alone(unet, log_messages):
    unet.train()
    unet.enable_gradient_checkpointing()
    expected = gradients(unet, 500)
    tome_nodes.apply_patch(unet)
    assert relative_error(gradients(unet, 500), expected) < 1e-4
    assert log_messages() == [
        "[ToMe] nothing merged: gradient checkpointing runs the transformer blocks again outside "
        "of the model's call"
    ]
    call(unet)
    assert log_messages()[-1].startswith("[ToMe] merged 3/7 blocks")


@pytest.mark.parametrize("dim", [0, 1])
def test_a_feed_forward_in_chunks(unet, log_messages, dim):
    expected = call(unet)
    for block in unet.modules():
        if isinstance(block, BasicTransformerBlock):
            block.set_chunk_feed_forward(1, dim)
    assert relative_error(call(unet), expected) < ROUNDING
    shuffle(unet, scope="block")
    assert relative_error(call(unet), expected) < ROUNDING
    tome_nodes.apply_patch(unet, scope="stack", merge_mlp=True)
    assert 1e-3 < relative_error(call(unet), expected) < 1
    assert log_messages()[-1].endswith("stack scope, module scope in 3 that are patched")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, log_messages):
    unet = make_unet().to(dtype)
    plain = call(unet)
    tome_nodes.apply_patch(unet, proportional_attn=True)
    merged = call(unet)
    assert merged.dtype == dtype
    assert 1e-3 < relative_error(merged.float(), plain.float()) < 1
    (line,) = log_messages()
    assert line.startswith("[ToMe] merged 3/7 blocks") and "weigh as one token" not in line


def test_what_was_merged_is_logged_once_for_each_size(log_messages):
    case = CASES["sd15"]()
    tome_nodes.apply_patch(case.pipeline, ratio=0.9, scope="block", strategy="window")
    case()
    case()
    assert log_messages() == [
        "[ToMe] merged 3/7 blocks (192 -> 48 tokens), ratio 0.90 capped at 0.75, window, "
        "block scope"
    ]
    case(height=64, width=64)
    assert len(log_messages()) == 2


def test_a_call_without_merging_says_why_in_one_warning(unet, caplog):
    expected = call(unet)
    tome_nodes.apply_patch(unet, ratio=0.004)
    assert torch.equal(call(unet), expected)
    call(unet, timestep=400)
    ours = [record for record in caplog.records if record.name == "tome_nodes"]
    reason = "192 tokens are too few for ratio=0.004; raise it"
    assert [(record.levelname, record.getMessage()) for record in ours] == [
        ("WARNING", f"[ToMe] nothing merged: {reason}")
    ]


def test_blocks_that_attend_to_text_only_have_their_queries_merged(log_messages):
    unet = make_unet(only_cross_attention=True)
    expected = call(unet)
    shuffle(unet)
    assert relative_error(call(unet), expected) < ROUNDING
    tome_nodes.apply_patch(unet)
    block = first_block(unet)
    with input_lengths(block.attn1.to_q, block.attn1.to_k, block.attn2.to_q) as lengths:
        call(unet)
    assert lengths == [TOKENS // 2, 7, TOKENS]
    assert log_messages()[-1].startswith("[ToMe] merged 3/7 blocks")


def test_other_models_are_refused_by_name():
    vae = AutoencoderKL(norm_num_groups=4, block_out_channels=(8,))
    for model in vae, object(), None, "stable-diffusion-v1-5":
        for patch in tome_nodes.apply_patch, tome_nodes.remove_patch:
            with pytest.raises(TypeError, match=f"this is a {type(model).__name__}$"):
                patch(model)


def test_a_unet_without_transformer_blocks_is_refused():
    unet = make_unet(
        down_block_types=("DownBlock2D",) * 3,
        up_block_types=("UpBlock2D",) * 3,
        mid_block_type=None,
    )
    with pytest.raises(TypeError, match="needs a model with transformer blocks"):
        tome_nodes.apply_patch(unet)


def test_a_bad_option_changes_nothing(unet):
    tome_nodes.apply_patch(unet, ratio=0.3)
    before = call(unet)
    with pytest.raises(TypeError, match=r"has no option rate; it has ratio, start_percent, "):
        tome_nodes.apply_patch(unet, rate=0.5)
    with pytest.raises(ValueError, match=r"ratio=1\.5 is not allowed"):
        tome_nodes.apply_patch(unet, ratio=1.5)
    assert torch.equal(call(unet), before)


def test_a_pipeline_with_a_compiled_unet_is_known():
    case = pipelines.sd15()
    case.pipeline.unet = torch.compile(case.pipeline.unet, backend="eager")
    tome_nodes.apply_patch(case.pipeline)
    assert type(case.pipeline.unet._orig_mod) is not UNet2DConditionModel
    tome_nodes.remove_patch(case.pipeline)
    assert type(case.pipeline.unet._orig_mod) is UNet2DConditionModel
