"""The attach to the UNets of real diffusers pipelines: what merges and what stays."""

import copy
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace

import diffusers
import pytest
import torch
from accelerate.utils import send_to_device
from common import (
    EVERYTHING,
    TOMESD_OPTIONS,
    input_lengths,
    relative_error,
    shuffle,
    theirs_and_ours,
)
from diffusers import UNet2DConditionModel
from diffusers.models import attention_processor
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from hypothesis import given, settings
from hypothesis import strategies as st
from models.pipelines import (
    CASES,
    DEVICE,
    GRID,
    TEXT,
    TEXT_CHANNELS,
    call,
    inputs,
    lively,
    make_unet,
    noise,
    sd15,
)
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode

import tome_nodes
from tome_nodes import reasons
from tome_nodes.merging.model import unwrapped
from tome_nodes.python.diffusers_unets import DiffusersUNets
from tome_nodes.python.patched_model import NetworkPatch
from tome_nodes.python.patched_unet import UNetContext
from tome_nodes.python.scheduling import Scheduling
from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.settings.presets import settings_of
from tome_nodes.strategies.bipartite import BipartiteStrategy
from tools.environment import ROOT

pytestmark = pytest.mark.newest_only

# For float32 in these models, whose weights amplify rounding.
ROUNDING = 5e-5
TOKENS = GRID[0] * GRID[1]


@pytest.fixture
def unet():
    return make_unet()


def blocks_of(unet):
    return [module for module in unet.modules() if isinstance(module, BasicTransformerBlock)]


# In which no two similarities are almost equal.
exact_unet = cache(lambda family: make_unet(family).double())


@settings(max_examples=40)
@given(
    TOMESD_OPTIONS,
    st.sampled_from(["sd15", "sdxl"]),
    st.integers(1, 3),
    st.tuples(st.integers(8, 15), st.integers(8, 15)),
)
def test_equal_to_tomesd_for_each_of_its_options(options, family, batch, grid):
    unet = exact_unet(family)
    evaluate = partial(call, batch=batch, grid=grid)
    theirs, ours = theirs_and_ours(unet, evaluate, options)
    assert relative_error(ours, theirs) < 1e-10


def ip_adapter(unet):
    processors = unet.attn_processors
    for name in processors:
        if name.endswith("attn2.processor"):
            hidden = unet.get_submodule(name.removesuffix(".processor")).inner_dim
            kind = attention_processor.IPAdapterAttnProcessor2_0
            processors[name] = lively(kind(hidden, TEXT_CHANNELS, num_tokens=[4]))
    unet.set_attn_processor(processors)
    projection = ImageProjection(16, TEXT_CHANNELS, num_image_text_embeds=4)
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([lively(projection)])
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj")


PROCESSORS = {
    "eager": lambda unet: unet.set_attn_processor(attention_processor.AttnProcessor()),
    "sliced": lambda unet: unet.set_attn_processor(attention_processor.SlicedAttnProcessor(2)),
    "fused": UNet2DConditionModel.fuse_qkv_projections,
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_attention_processors_that_are_set_once_a_unet_is_patched(unet, name):
    """Those that are set before have a table of their own."""
    expected = call(unet)
    shuffle(unet)
    PROCESSORS[name](unet)
    assert relative_error(call(unet), expected) < ROUNDING
    tome_nodes.apply_patch(unet)
    assert relative_error(call(unet), expected) > 1e-3


@torch.no_grad()
def test_ip_adapter(unet, log_messages):
    arguments = inputs(unet) | {"timestep": torch.tensor(500)}
    without = unet(**arguments).sample
    ip_adapter(unet)
    arguments["added_cond_kwargs"] = {"image_embeds": [noise(2, 1, 16)]}
    # Its masks have the picture's size, so the attention that they cover keeps all tokens.
    masks = {"ip_adapter_masks": [torch.ones(1, 1, 96, 128, device=DEVICE)]}
    for arguments["cross_attention_kwargs"] in None, masks:
        tome_nodes.remove_patch(unet)
        expected = unet(**arguments).sample
        assert relative_error(expected, without) > 1e-3
        for scope in "module", "stack":
            shuffle(unet, scope=scope)
            assert relative_error(unet(**arguments).sample, expected) < ROUNDING
    assert log_messages()[-1].endswith("stack scope, module scope in 7 that are patched")


def test_queries_and_keys_cannot_differ_before_fused_projections(unet, log_messages):
    expected = call(unet)
    unet.fuse_qkv_projections()
    tome_nodes.apply_patch(unet, attn_tokens="k,v")
    assert relative_error(call(unet), expected) < ROUNDING
    assert log_messages() == [f"[ToMe] nothing merged: {reasons.FUSED}"]


@torch.no_grad()
@pytest.mark.parametrize("scope", OPTIONS["scope"].choices)
def test_a_mask_over_the_picture_keeps_all_tokens(log_messages, scope):
    unet = make_unet("one_level")
    mask = noise(2, TOKENS) > -0.5
    arguments = inputs(unet) | {"timestep": torch.tensor(500), "attention_mask": mask}
    expected = unet(**arguments).sample
    assert relative_error(expected, call(unet)) > 1e-3
    tome_nodes.apply_patch(unet, scope=scope)
    assert torch.equal(unet(**arguments).sample, expected)
    assert log_messages() == [f"[ToMe] nothing merged: {reasons.ATTENTION_MASKED}"]


TIMES = [376, 251, 126, 1]


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"end_percent": 0.6}, [TOKENS // 2, TOKENS // 2, TOKENS, TOKENS]),
        ({"start_percent": 0.3, "end_percent": 0.7}, [TOKENS, TOKENS // 2, TOKENS, TOKENS]),
        (
            {"ratio": 0.6, "ratio_end": 0.2},
            [TOKENS - int(TOKENS * (0.2 + 0.4 * time / 499)) for time in TIMES],
        ),
    ],
    ids=str,
)
def test_percents_and_ratios_follow_the_noise_levels(options, tokens):
    case = sd15()
    case.pipeline.scheduler = diffusers.DDIMScheduler(500, steps_offset=1)
    tome_nodes.apply_patch(case.pipeline, **options)
    with input_lengths(blocks_of(case.network)[0].attn1.to_q) as lengths:
        case(steps=4)
    assert case.pipeline.scheduler.timesteps.tolist() == TIMES
    assert lengths == tokens


def test_the_sample_of_a_summarys_method_merges_clusters_in_the_last_two_fifths(log_messages):
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    script, settings = re.findall(r"(?ms)^```(?:python|json)\n(.*?)^```$", page)
    case = sd15()
    exec(script, {"tome_nodes": tome_nodes, "pipe": case.pipeline})
    with input_lengths(blocks_of(case.network)[0].attn1.to_q) as lengths:
        case(steps=10)
    assert lengths == [TOKENS] * 6 + [TOKENS // 2] * 4
    (line,) = log_messages()
    assert line.endswith("ratio 0.50, cluster")
    node = json.loads(settings)
    merges = {"strategy": "cluster", "ratio": 0.5, "start_percent": 0.6}
    assert settings_of(node.pop("preset"), node) == merges


def test_steps_aside_where_other_code_changes_the_tokens(unet, log_messages):
    expected = call(unet)
    tome_nodes.apply_patch(unet, max_downsample=8)
    for block in blocks_of(unet):
        # As if the other code added a token of its own.
        block.register_forward_pre_hook(lambda _, x: (torch.cat([x[0], x[0][:, :1]], 1),))
        block.register_forward_hook(lambda _, __, output: output[:, :-1])
    changed = call(unet)
    tome_nodes.remove_patch(unet)
    assert torch.equal(call(unet), changed)
    assert relative_error(changed, expected) > 1e-6
    assert log_messages() == [f"[ToMe] nothing merged: {reasons.TOKENS_CHANGED}"]


def test_timesteps_of_any_kind(unet):
    tome_nodes.apply_patch(unet)
    arguments = inputs(unet).values()
    sample, text = arguments
    expected = unet(sample, 500, text).sample
    for timestep in 500.0, torch.tensor(500), torch.tensor([500, 500], device=DEVICE):
        assert torch.allclose(unet(sample, timestep, text).sample, expected, atol=1e-5)
    named = unet(sample=sample, timestep=500, encoder_hidden_states=text)
    assert torch.equal(named.sample, expected)


def test_picks_depend_on_the_timestep_and_not_on_the_batch(unet):
    found = []

    class Noted(BipartiteStrategy):
        def picks(self, cells):
            found.append(super().picks(cells))
            return found[-1]

    context = UNetContext(Scheduling())
    NetworkPatch(ToMeConfig(min_tokens=1), DiffusersUNets(), context, Noted).attach(unet)
    call(unet, 500)
    call(unet, 500.5)
    call(unet, 500, batch=1)
    # One more tests the device.
    _, first, of_another_time, alone = found
    assert torch.equal(first, alone)
    assert not torch.equal(first, of_another_time)


def test_a_bad_option_leaves_the_settings_as_they_are(unet):
    tome_nodes.apply_patch(unet, ratio=0.3)
    once = call(unet)
    with pytest.raises(TypeError, match=r"has no option rate; it has ratio, start_percent, "):
        tome_nodes.apply_patch(unet, rate=0.5)
    with pytest.raises(ValueError, match=r"ratio=1\.5 is not allowed"):
        tome_nodes.apply_patch(unet, ratio=1.5)
    assert torch.equal(call(unet), once)


def replica(unet):
    """A shallow copy with modules of its own, as on another device."""
    other = copy.copy(unet)
    other._modules = copy.deepcopy(unet._modules)
    return other


def parallel_replica(unet):
    """The same of ``DataParallel``."""
    other = unet._replicate_for_data_parallel()
    other._modules = copy.deepcopy(unet._modules)
    return other


@pytest.mark.parametrize("copied", [replica, parallel_replica])
def test_a_replica_merges_in_its_own_weights(unet, copied):
    tome_nodes.apply_patch(unet, merge_mlp=True)
    expected = call(unet)
    other = copied(unet)
    for parameter in unet.parameters():
        parameter.data.zero_()
    assert torch.equal(call(other), expected)
    tome_nodes.remove_patch(other)
    assert not torch.equal(call(other), expected)


def test_a_forward_with_other_names_merges_as_before(unet, log_messages):
    tome_nodes.apply_patch(unet)
    expected = call(unet)
    own = unet.forward
    for unet.forward in (
        lambda *args, **kwargs: own(*args, **kwargs),
        lambda x, t, **others: own(x, t, **others),
        lambda x, timesteps=None, **others: own(x, others.pop("timestep", timesteps), **others),
    ):
        assert torch.equal(call(unet), expected)
    unet.forward = lambda **kwargs: own(**kwargs)
    with torch.no_grad():
        assert torch.equal(unet(timestep=torch.tensor(500), **inputs(unet)).sample, expected)
    # A call that is not as of a UNet runs unmerged, and says so once.
    tome_nodes.remove_patch(unet)
    del unet.forward
    plain, (latent, text) = call(unet), inputs(unet).values()
    tome_nodes.apply_patch(unet)
    given = {"sample": latent, "timestep": torch.tensor(500)}
    unet.forward = lambda text, x: own(x["sample"], x["timestep"], text)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(unet(text, given).sample, plain)
    assert log_messages()[1:] == [f"[ToMe] nothing merged: {reasons.UNKNOWN_CALL}"]


def results(unet, *timesteps, seed=0):
    return [call(unet, timestep, seed=seed) for timestep in timesteps]


def test_threads_on_one_unet_take_turns_and_each_follows_its_own_run(unet):
    tome_nodes.apply_patch(unet, scope="stack")

    def run(seed):
        return results(unet, 900 - 10 * seed, 600, 300, seed=seed)

    alone = [*map(run, range(3))]
    with ThreadPoolExecutor(3) as pool:
        together = [*pool.map(run, range(3))]
    for actual, expected in zip(together, alone, strict=True):
        assert all(map(torch.equal, actual, expected))
    tome_nodes.remove_patch(unet)
    assert not any("forward" in vars(module) for module in unet.modules())


IN_STACKS = {"scope": "stack", "strategy": "window"}


def test_what_a_unet_compiled_of_itself_before_it_was_patched_runs_merged(fresh_compiler):
    unet, graphs = make_unet("one_block"), CompileCounter()
    plain = call(unet)
    unet.compile(backend=graphs, fullgraph=True)
    compiled, counts = unet._compiled_call_impl, []
    for _ in range(2):
        tome_nodes.apply_patch(unet)
        assert relative_error(call(unet), plain) > 1e-3
        tome_nodes.remove_patch(unet)
        assert relative_error(call(unet), plain) < ROUNDING
        assert unet._compiled_call_impl is compiled
        counts.append(graphs.frame_count)
    assert counts[0] == counts[1] > 0


def test_gradients_through_merged_tokens_are_those_of_finite_differences(unet):
    unet = unet.double()
    tome_nodes.apply_patch(unet, **EVERYTHING)
    arguments = inputs(unet)
    sample = arguments.pop("sample").requires_grad_()

    def loss(x):
        return unet(x, torch.tensor(500), **arguments).sample.square().mean()

    loss(sample).backward()
    assert all(p.grad is not None and p.grad.any() for p in unet.parameters())
    # So small that the same tokens still merge.
    way = 1e-6 * noise(*sample.shape).double()
    with torch.no_grad():
        difference = (loss(sample + way) - loss(sample - way)) / 2
    assert difference.item() == pytest.approx((sample.grad * way).sum().item(), rel=1e-4)


DYNAMIC = {
    "defaults": {},
    "balanced": {"preset": "balanced"},
    "fast": {"preset": "fast"},
}


@torch.no_grad()
@pytest.mark.parametrize("name", DYNAMIC)
def test_one_graph_serves_batches_of_any_size_that_are_marked_as_dynamic(fresh_compiler, name):
    if name in ("balanced", "fast") and torch.__version__ < "2.14":
        pytest.skip("PyTorch before 2.14 fixes the batch where attention has a mask")
    unet, graphs = make_unet("one_block"), CompileCounter()
    tome_nodes.apply_patch(unet, **DYNAMIC[name])
    expected = {batch: call(unet, batch=batch, grid=(32, 32)) for batch in (2, 3, 5)}
    compiled = torch.compile(unet, backend=graphs, fullgraph=True)
    for batch, output in expected.items():
        given = inputs(unet, batch=batch, grid=(32, 32))
        for tensor in given.values():
            torch._dynamo.mark_dynamic(tensor, 0)
        actual = compiled(timestep=torch.tensor(500), **given).sample
        assert relative_error(actual, output) < ROUNDING
    assert graphs.frame_count == 1


@torch.no_grad()
def test_why_a_compiled_model_merges_nothing_is_said_with_its_numbers(log_messages, fresh_compiler):
    """Within a graph, a ratio that changes from step to step cannot be put into words."""
    unet = make_unet("one_block")
    tome_nodes.apply_patch(unet, ratio=0.001, ratio_end=0.003, min_tokens=1)
    compiled = torch.compile(unet, backend="eager", fullgraph=True)
    for timestep in 999, 500:
        call(compiled, grid=(16, 16), timestep=timestep)
    assert log_messages() == [
        f"[ToMe] nothing merged: 256 tokens are too few for ratio={ratio}; raise it"
        for ratio in ("0.001", "0.001999")
    ]


@torch.no_grad()
def test_merging_needs_as_many_graphs_for_many_sizes_as_the_plain_model(fresh_compiler):
    """Three: for the first size, for any other width, and for any size."""
    unet, graphs = make_unet("one_block"), CompileCounter()
    tome_nodes.apply_patch(unet)
    sizes = [(16, 16), (16, 20), (24, 24), (20, 24), (24, 32)]
    expected = [call(unet, grid=size) for size in sizes]
    compiled = torch.compile(unet, backend=graphs, fullgraph=True)
    for size, output in zip(sizes, expected, strict=True):
        assert relative_error(call(compiled, grid=size), output) < ROUNDING
    assert graphs.frame_count == 3


@torch.no_grad()
def test_sizes_that_are_cut_into_windows_of_one_size_share_a_graph(fresh_compiler):
    """There are two: for the first size, and for any."""
    unet, graphs = make_unet("one_block"), CompileCounter()
    sizes = [(32, 32), (36, 48), (34, 50)]
    plain = [call(unet, grid=size) for size in sizes]
    tome_nodes.apply_patch(unet, **DYNAMIC["fast"])
    expected = [call(unet, grid=size) for size in sizes]
    compiled = torch.compile(unet, backend=graphs, fullgraph=True)
    for size, output, unmerged in zip(sizes, expected, plain, strict=True):
        assert relative_error(call(compiled, grid=size), output) < ROUNDING
        assert relative_error(output, unmerged) > 100 * ROUNDING
    assert graphs.frame_count == 2


def test_gradients_also_reach_merged_tokens_after_kernels_have_merged_without(unet):
    """They need plain torch. On a CPU, the kernels are interpreted."""
    pytest.importorskip("triton", "3.6", reason="the kernels need Triton 3.6")
    tome_nodes.apply_patch(unet, backend="triton", **EVERYTHING)
    small = {"batch": 1, "grid": (8, 8)}
    expected, arguments = call(unet, **small), inputs(unet, **small)
    actual = unet(arguments.pop("sample"), torch.tensor(500), **arguments).sample
    assert relative_error(actual, expected) < ROUNDING
    actual.square().mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in unet.parameters())


def test_gradient_checkpointing_is_left_alone_after_merging_too(log_messages):
    case = sd15()
    given, network = case.called(), case.network.train()
    network.enable_gradient_checkpointing()

    def gradients():
        network.zero_grad()
        network(**given)[0].square().mean().backward()
        return torch.cat([weight.grad.flatten() for weight in network.parameters()])

    expected = gradients()
    tome_nodes.apply_patch(network)
    with torch.no_grad():
        network(**given)
    for _ in range(2):
        # On a GPU sums are not in the same order each time.
        assert relative_error(gradients(), expected) < 1e-4
    merged, reason = log_messages()
    assert merged.startswith("[ToMe] merged 3/")
    assert reason == f"[ToMe] nothing merged: {reasons.RECOMPUTED}"


def test_a_feed_forward_in_chunks(unet, log_messages):
    expected = call(unet)
    for block in blocks_of(unet):
        block.set_chunk_feed_forward(1, dim=1)
    assert relative_error(call(unet), expected) < ROUNDING
    shuffle(unet, scope="stack")
    assert relative_error(call(unet), expected) < ROUNDING
    tome_nodes.apply_patch(unet, scope="stack", merge_mlp=True)
    assert 1e-3 < relative_error(call(unet), expected) < 1
    assert log_messages()[-1].endswith("stack scope, module scope in 3 that are patched")


def test_what_was_merged_is_logged_once_for_each_size(log_messages):
    case = sd15()
    tome_nodes.apply_patch(case.pipeline, ratio=0.9, scope="stack", strategy="window")
    case()
    case()
    assert log_messages() == [
        "[ToMe] merged 3/7 blocks (192 -> 48 tokens), ratio 0.90 capped at 0.75, window, "
        "stack scope"
    ]
    # Other batches and the same number of tokens say nothing new.
    case(num_images_per_prompt=2)
    case(height=128, width=96)
    assert len(log_messages()) == 1
    case(height=64, width=64)
    assert len(log_messages()) == 2


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("sd15", {"attn_tokens": "k,v"}, "expected, not measured: 5% fewer"),
        ("sd15", {"scope": "stack"}, "expected, not measured: 14% fewer"),
        ("sdxl", {"max_downsample": 2}, str(reasons.LITTLE_ATTENTION)),
    ],
)
def test_a_line_says_what_merging_saves(caplog, name, options, words):
    caplog.set_level("INFO", logger="tome_nodes")
    case = CASES[name]()
    tome_nodes.apply_patch(case.pipeline, **options)
    case()
    (line,) = caplog.messages
    assert words in line and " multiplications in a merged step" in line


def test_blocks_that_attend_to_text_only_have_their_queries_merged(log_messages):
    unet = make_unet(only_cross_attention=True)
    tome_nodes.apply_patch(unet)
    block = blocks_of(unet)[0]
    with input_lengths(block.attn1.to_q, block.attn1.to_k, block.attn2.to_q) as lengths:
        call(unet)
    assert lengths == [TOKENS // 2, TEXT, TOKENS]
    assert log_messages()[-1].startswith("[ToMe] merged 3/7 blocks")


def test_preset_fast_merges_queries_that_attend_to_text_and_elsewhere_only_keys():
    """In the largest maps."""
    for attends_to_text, expected in (True, [512, TEXT, 512]), (False, [1024, 512, 1024]):
        unet = make_unet(only_cross_attention=attends_to_text)
        tome_nodes.apply_patch(unet, preset="fast")
        block = blocks_of(unet)[0]
        with input_lengths(block.attn1.to_q, block.attn1.to_k, block.attn2.to_q) as lengths:
            call(unet, 999, grid=(32, 32))
        assert lengths == expected


def test_other_models_are_refused_by_name():
    vae = diffusers.AutoencoderKL(norm_num_groups=4, block_out_channels=(8,))
    for model in vae, object(), None, "stable-diffusion-v1-5":
        for patch in tome_nodes.apply_patch, tome_nodes.remove_patch:
            with pytest.raises(TypeError, match=f"this is a {type(model).__name__}$"):
                patch(model)
    blocks = {"down_block_types": ("DownBlock2D",) * 3, "up_block_types": ("UpBlock2D",) * 3}
    with pytest.raises(TypeError, match="needs a model with transformer blocks"):
        tome_nodes.apply_patch(make_unet(**blocks, mid_block_type=None))


def put(module, device):
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            made = torch.empty_like(weight, device=device)
            part.register_parameter(name, torch.nn.Parameter(made, requires_grad=False))


@torch.no_grad()
@pytest.mark.usefixtures("untried")
def test_a_unet_on_several_devices_runs_on_all_tokens(log_messages):
    """Fake tensors stand for those of two GPUs: they have no values, but may not meet."""
    unet = make_unet()
    far = [*unet.up_blocks, unet.conv_norm_out, unet.conv_out]
    with FakeTensorMode(allow_non_fake_inputs=True):
        put(unet, "cuda:0")
        for part in far:
            put(part, "cuda:1")
            part.register_forward_pre_hook(
                lambda _, args, kwargs: send_to_device((args, kwargs), "cuda:1"), with_kwargs=True
            )
        given = {
            name: torch.empty_like(each, device="cuda:0") for name, each in inputs(unet).items()
        }
        tome_nodes.apply_patch(unet, backend="torch")
        for _ in range(2):
            assert unet(timestep=500, **given).sample.device == torch.device("cuda:1")
    assert log_messages() == [f"[ToMe] nothing merged: {reasons.SEVERAL_DEVICES}"]


WRAPPED = {
    "DataParallel": torch.nn.DataParallel,
    "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
}


@torch.no_grad()
@pytest.mark.parametrize("way", WRAPPED)
def test_a_unet_within_wrappers_merges(mesh, way):
    unet = make_unet()
    plain, given = call(unet), inputs(unet)
    wrapped = WRAPPED[way](unet)
    for model in wrapped, SimpleNamespace(unet=wrapped):
        assert tome_nodes.apply_patch(model, use_rand=False) is model
        merged = wrapped(timestep=torch.tensor(500), **given).sample
        assert relative_error(merged, plain) > 1e-3
        tome_nodes.remove_patch(model)
        assert torch.equal(wrapped(timestep=torch.tensor(500), **given).sample, plain)
    compiled = torch.compile(WRAPPED[way](torch.compile(unet)))
    assert unwrapped(compiled) is unet


def test_a_pipeline_whose_unet_is_something_else_is_refused_by_the_name_of_that():
    other = SimpleNamespace(unet=torch.nn.Sequential(make_unet()))
    with pytest.raises(TypeError, match=r"SimpleNamespace, whose unet is a Sequential$"):
        tome_nodes.apply_patch(other)


@pytest.fixture
def mesh(tmp_path):
    """The devices of a group of one process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.init_device_mesh(DEVICE.type, (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch has no torch.distributed")
def test_a_unet_that_is_sharded_once_it_is_patched_merges_until_the_patch_is_removed(unet, mesh):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no fully_shard")
    plain = call(unet)
    tome_nodes.apply_patch(unet)
    merged = call(unet)
    fsdp.fully_shard(unet, mesh=mesh)
    for _ in range(2):
        tome_nodes.apply_patch(unet)
        assert relative_error(call(unet), merged) < ROUNDING
        tome_nodes.remove_patch(unet)
        assert relative_error(call(unet), plain) < ROUNDING
    assert relative_error(merged, plain) > 1e-3


class Called(torch.nn.Module):
    """Calls a UNet with positional arguments, and returns a tensor."""

    def __init__(self, unet):
        super().__init__()
        self.unet = unet

    def forward(self, sample, timestep, text):
        return self.unet(sample, timestep, text, return_dict=False)[0]


@torch.no_grad()
def test_a_larger_model_that_is_compiled_calls_a_patched_unet(fresh_compiler):
    unet = make_unet("one_block")
    sample, text = inputs(unet).values()
    plain = call(unet)
    tome_nodes.apply_patch(unet)
    merged = call(unet)
    compiled = torch.compile(Called(unet), backend="eager")
    assert relative_error(compiled(sample, torch.tensor(500), text), merged) < ROUNDING
    tome_nodes.remove_patch(unet)
    assert relative_error(compiled(sample, torch.tensor(500), text), plain) < ROUNDING
    assert relative_error(merged, plain) > 1e-3


KEPT = {
    "traced": lambda model, given: torch.jit.trace(model, given, check_trace=False),
    "exported": lambda model, given: torch.export.export(model, given, strict=False).module(),
}


@torch.no_grad()
@pytest.mark.parametrize("way", KEPT)
def test_a_model_that_is_traced_or_exported_runs_on_all_tokens(unet, log_messages, way):
    """What it keeps would have the random picks of a single step."""
    sample, text = inputs(unet).values()
    given = sample, torch.tensor(500), text
    plain = call(unet)
    tome_nodes.apply_patch(unet)
    kept = KEPT[way](Called(unet).eval(), given)
    assert relative_error(kept(*given), plain) < ROUNDING
    assert log_messages() == [f"[ToMe] nothing merged: {reasons.TRACED}"]
    assert relative_error(call(unet), plain) > 1e-3


@pytest.mark.parametrize(
    "options", [{"attn_tokens": "k,v", "proportional_attn": True}, IN_STACKS], ids=str
)
def test_gradients_of_gradients_and_in_forward_mode_are_those_of_finite_differences(unet, options):
    """With attention in steps, since PyTorch's own in one has no gradients of gradients."""
    unet = unet.double()
    PROCESSORS["eager"](unet)
    tome_nodes.apply_patch(unet, **options)
    text = inputs(unet)["encoder_hidden_states"]
    sample, way = inputs(unet)["sample"], noise(*GRID).double()
    # So small that the same tokens still merge.
    small = 1e-6

    def loss(x):
        return unet(x, torch.tensor(500), text).sample.square().mean()

    def slope(x, create_graph=False):
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x), x, create_graph=create_graph)
        return (gradient * way).sum()

    _, forward = torch.func.jvp(loss, (sample,), (way.expand_as(sample),))
    assert forward.item() == pytest.approx(slope(sample.clone()).item(), rel=1e-9)
    at = sample.clone()
    (second,) = torch.autograd.grad(slope(at, create_graph=True), at)
    difference = (slope(sample + small * way) - slope(sample - small * way)) / (2 * small)
    assert difference.item() == pytest.approx((second * way).sum().item(), rel=1e-4)
