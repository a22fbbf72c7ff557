"""Merged keys that weigh as much as the tokens they stand for, through ComfyUI's attention."""

import inspect
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from comfy.ldm.modules import attention
from comfy.ldm.modules.attention import BasicTransformerBlock
from common import DEVICE, relative_error
from host import merging, needs, sample, with_override
from torch.testing import assert_close

from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.attention import OVERRIDE, weigh_attention
from tome_nodes.merging.layout import Grid
from tome_nodes.ops import TORCH
from tome_nodes.ops.autotune import Choice, Tuner
from tome_nodes.patching import attention_call, key_weights
from tome_nodes.patching.key_weights import Capabilities, Variant, variant_of
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy

BATCH, HEADS = 2, 4


def tensors(channels, dtype=torch.float32):
    """37 queries, 29 keys and their values, and how many tokens each of the keys stands for."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BATCH, tokens, HEADS * channels, generator=generator).to(DEVICE, dtype)
        for tokens in (37, 29, 29)
    ] + [torch.randint(1, 9, (BATCH, 29), generator=generator).to(DEVICE)]


def attention_to_repeated(q, k, v, sizes):
    """Brute force in float64: every key and value repeated as often as its size says."""
    samples = []
    for sample_q, sample_k, sample_v, times in zip(q, k, v, sizes, strict=True):
        keys, values = (x.repeat_interleave(times, 0) for x in (sample_k, sample_v))
        queries, keys, values = (
            x.double().unflatten(1, (HEADS, -1)).transpose(0, 1) for x in (sample_q, keys, values)
        )
        heads = torch.softmax(queries @ keys.mT / queries.shape[2] ** 0.5, 2) @ values
        samples.append(heads.transpose(0, 1).flatten(1))
    return torch.stack(samples)


def weighed(function, q, k, v, sizes, notes, options=None, ops=TORCH, tuner=None, **kwargs):
    log_sizes = sizes.log().to(q.dtype)
    block = SimpleNamespace(ops=ops, tuner=tuner, note_unweighted=notes.append)
    options = weigh_attention(options or {}, block, log_sizes)
    return function(q, k, v, HEADS, transformer_options=options, **kwargs)


@pytest.mark.parametrize("channels", [40, 64, 80])
@pytest.mark.parametrize(
    "function",
    [
        attention.attention_basic,
        attention.attention_split,
        attention.attention_sub_quad,
        attention.attention_pytorch,
        # It is not installed here, so the host's fallback runs, with the same channels.
        attention.attention_flash,
    ],
)
def test_weighed_keys_are_repeated_keys(function, channels):
    q, k, v, sizes = tensors(channels)
    expected = attention_to_repeated(q, k, v, sizes)
    notes = []
    assert_close(weighed(function, q, k, v, sizes, notes).double(), expected, atol=1e-5, rtol=1e-5)
    assert notes == [None]
    plain = function(q, k, v, HEADS)
    assert relative_error(plain.double(), expected) > 0.05


def needs_argument(name):
    needs(f"{name} in its attention", f'"{name}"' in inspect.getsource(attention))


def test_the_scale_of_the_caller_is_kept():
    needs_argument("scale")
    q, k, v, sizes = tensors(40)
    expected = attention_to_repeated(2 * q, k, v, sizes)
    for function in (attention.attention_pytorch, attention.attention_flash):
        actual = weighed(function, q, k, v, sizes, [], scale=2 / 40**0.5)
        assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
        unscaled = weighed(function, q, k, v, sizes, [], scale=None)
        assert torch.equal(unscaled, weighed(function, q, k, v, sizes, []))


@pytest.mark.parametrize("function", [attention.attention_pytorch, attention.attention_flash])
def test_a_mask_that_an_override_changes_counts(function):
    q, k, v, sizes = tensors(40)
    region = torch.zeros(1, 1, 1, 29, device=DEVICE)
    region[..., :5] = -torch.inf

    def theirs(func, *args, mask=None, **kwargs):
        return func(*args, mask=mask + region, **kwargs)

    merged = weighed(function, q, k, v, sizes, [], {OVERRIDE: theirs})
    without = sizes.clone()
    without[:, :5] = 0
    expected = attention_to_repeated(q, k, v, without)
    assert_close(merged.double(), expected, atol=1e-5, rtol=1e-5)


OLD, NEW = Capabilities(), Capabilities(flash=True, cudnn=True, kernel=True)
FLASH, NO_CUDNN = Capabilities(flash=True), replace(NEW, cudnn=False)


MASK, CHANNELS, KERNEL = Variant.MASK, Variant.CHANNELS, Variant.KERNEL


@pytest.mark.parametrize(
    ("channels", "with_cudnn", "without_cudnn", "of_flash"),
    [
        # With further channels, they stay in the kernel of flash.
        *((channels, CHANNELS, CHANNELS, CHANNELS) for channels in (40, 80, 160, 248)),
        # cuDNN's heads have at most 128 channels, and those of our kernel 256.
        *((channels, MASK, KERNEL, KERNEL) for channels in (32, 64, 96, 128)),
        *((channels, KERNEL, KERNEL, KERNEL) for channels in (192, 256)),
        (512, MASK, MASK, CHANNELS),
    ],
)
def test_ways_by_the_channels_of_a_head(channels, with_cudnn, without_cudnn, of_flash):
    assert variant_of("attention_pytorch", channels, NEW) is with_cudnn
    assert variant_of("attention_pytorch", channels, NO_CUDNN) is without_cudnn
    assert variant_of("attention_flash", channels, NEW) is of_flash
    assert variant_of("attention_pytorch", channels, OLD) is MASK
    assert variant_of("attention_xformers", channels, OLD) is CHANNELS
    assert variant_of("attention_basic", channels, NEW) is MASK
    assert variant_of("attention_sage", channels, NEW) is None


def test_what_is_not_possible_is_not_taken():
    assert variant_of("attention_pytorch", 40, FLASH, may_widen=False) is MASK
    assert variant_of("attention_pytorch", 64, FLASH) is MASK
    assert variant_of("attention_flash", 64, FLASH) is CHANNELS
    assert variant_of("attention_flash", 64, FLASH, may_widen=False) is None
    assert variant_of("attention_flash", 40, NO_CUDNN, may_widen=False) is KERNEL
    assert variant_of("attention_flash", 40, NO_CUDNN, may_widen=False, may_replace=False) is None
    assert variant_of("attention_pytorch", 64, NO_CUDNN, may_replace=False) is MASK


class Attended:
    """Operations that attend in plain torch, and count how often."""

    def __init__(self):
        self.count = 0
        self.ops = replace(TORCH, name="triton", attend=self.attend)

    def attend(self, *arguments):
        self.count += 1
        return TORCH.attend(*arguments)


WAYS = {MASK: OLD, CHANNELS: NEW, KERNEL: NO_CUDNN}
"""What has to be possible for each to be taken."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("channels", [40, 64, 128, 256])
def test_each_way_is_right_in_any_precision_and_layout(monkeypatch, channels, key_heads, dtype):
    if key_heads < HEADS:
        needs_argument("enable_gqa")
    q, k, v, sizes = tensors(channels, dtype)
    k, v = (x[..., : key_heads * channels] for x in (k, v))
    repeated = [
        x.unflatten(2, (key_heads, -1)).repeat_interleave(HEADS // key_heads, 2).flatten(2)
        for x in (k, v)
    ]
    expected = attention_to_repeated(q, *repeated, sizes)
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    gqa = {"enable_gqa": True} if key_heads < HEADS else {}
    kernels = Attended()
    for way, capable in WAYS.items():
        monkeypatch.setattr(key_weights, "capabilities", lambda *_, capable=capable: capable)
        kernels.count = 0
        notes = []
        attend = partial(weighed, attention.attention_pytorch, ops=kernels.ops, **gqa)
        flat = attend(q, k, v, sizes, notes)
        assert flat.dtype == dtype and flat.is_contiguous()
        assert relative_error(flat.double(), expected) < bound
        by_head = [x.unflatten(2, (-1, channels)).transpose(1, 2).contiguous() for x in (q, k, v)]
        for skips in {"skip_reshape": True}, {"skip_reshape": True, "skip_output_reshape": True}:
            out = attend(*by_head, sizes, notes, **skips)
            out = out.transpose(1, 2).flatten(2) if len(skips) == 2 else out
            assert relative_error(out.double(), expected) < bound
        assert notes == [None] * 3
        is_widened = channels == 40 and key_heads == HEADS
        if way is KERNEL:
            assert kernels.count == (2 if is_widened else 3)
        else:
            assert kernels.count == (3 if way is CHANNELS and channels == 256 else 0)


def test_a_way_that_was_the_fastest_is_taken_only_where_it_is_possible(monkeypatch):
    monkeypatch.setattr(key_weights, "capabilities", lambda *_: NEW)
    kernels = Attended()

    def choose(device, case, default, ways):
        return Choice("kernel" if "kernel" in ways() else default, default, {})

    tuner = Tuner(choose)
    q, k, v, sizes = tensors(64)
    expected = attention_to_repeated(q, k, v, sizes)
    # Our kernel does not know this argument.
    for kwargs, count in (({}, 1), ({"window_size": 3}, 1), ({}, 2)):
        tools = {"ops": kernels.ops, "tuner": tuner}
        out = weighed(attention.attention_pytorch, q, k, v, sizes, [], **tools, **kwargs)
        assert kernels.count == count
        assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_an_unknown_attention_runs_as_it_is():
    q, k, v, sizes = tensors(40)

    @attention.wrap_attn
    def attention_of_the_future(q, k, v, heads, mask=None, **kwargs):
        assert mask is None
        return attention.attention_basic(q, k, v, heads)

    notes = []
    actual = weighed(attention_of_the_future, q, k, v, sizes, notes)
    assert torch.equal(actual, attention.attention_basic(q, k, v, HEADS))
    assert notes == ["attention_of_the_future takes no weights"]


def test_the_override_of_another_node_runs_first_and_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(key_weights, "capabilities", lambda *_: NEW)
    tuner = Tuner(lambda *_: pytest.fail("tried"))
    q, k, v, sizes = tensors(64)

    def theirs(func, q, k, v, heads, **kwargs):
        return 3 * func(2 * q, k, v, heads, **kwargs)

    options = {OVERRIDE: theirs}
    actual = weighed(attention.attention_pytorch, q, k, v, sizes, [], options, tuner=tuner)
    expected = 3 * attention_to_repeated(2 * q, k, v, sizes)
    assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    assert options == {OVERRIDE: theirs}


def test_the_log_tells_where_an_override_changes_the_keys(sd15, log_messages):
    def theirs(func, q, k, v, heads, mask=None, **kwargs):
        return func(q, k[:, ::2], v[:, ::2], heads, **kwargs)

    sample(attach(with_override(sd15, theirs), merging()))
    assert log_messages()[-1].endswith(
        "merged keys weigh as one token (another node changes how the attention is called)"
    )


@pytest.fixture
def of_equal_cells(sd15):
    """A model that makes the input of its transformer blocks equal within each 2x2 cell."""

    def level(module, args, kwargs):
        x, options = args[0], kwargs["transformer_options"]
        image = x.mT.unflatten(2, tuple(options["activations_shape"][-2:]))
        if x.shape[1] == image.shape[2] * image.shape[3]:
            cells = image[:, :, ::2, ::2]
            image = cells.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return (image.flatten(2).mT, *args[1:]), kwargs

    with ExitStack() as hooks:
        for module in sd15.model.diffusion_model.modules():
            if isinstance(module, BasicTransformerBlock):
                hooks.enter_context(module.register_forward_pre_hook(level, with_kwargs=True))
        yield sd15


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategy": "window"},
        {"attn_tokens": "k,v"},
        {"merge_mlp": True, "merge_crossattn": True, "ratio": 0.4},
        {"scope": "stack"},
        {"scope": "stack", "merge_attn": False},
    ],
    ids=str,
)
def test_merging_equal_tokens_changes_nothing(of_equal_cells, settings):
    expected = sample(of_equal_cells)
    error, error_unweighed = (
        relative_error(sample(attach(of_equal_cells, config)), expected)
        for config in (merging(**settings), merging(**settings, proportional_attn=False))
    )
    assert error < 5e-5
    assert error_unweighed > 20 * error


def test_keys_that_are_hidden_from_all_stay_hidden_from_merged_queries():
    pytest.importorskip("triton", reason="Triton is not made for this system")
    from tome_nodes.ops import triton as kernels

    strategy = make_strategy(ToMeConfig(strategy="window"), kernels)
    strategy.begin(torch.tensor(7, device=DEVICE))
    tokens = torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    plan = strategy.plan(tokens, Grid(8, 8), 0.5)
    bias = torch.zeros(1, 1, 64, 20, dtype=torch.float16, device=DEVICE)
    bias[..., 5] = -torch.inf
    for merged in (
        attention_call._merged_queries(bias, plan, 1)[..., 5],
        attention_call._merged_keys(bias.mT, plan, 1)[:, :, 5],
    ):
        assert (merged == torch.finfo(torch.float16).min).all()
    others = attention_call._merged_queries(bias, plan, 1)[..., :5]
    assert torch.equal(others, torch.zeros_like(others))
