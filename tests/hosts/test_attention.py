"""Merged keys that weigh as much as the tokens they stand for, through ComfyUI's attention."""

import inspect
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch
from comfy.ldm.modules import attention
from common import DEVICE, relative_error
from host import merging, needs, sample, with_override
from torch.testing import assert_close

from tome_nodes import reasons
from tome_nodes.comfyui.attachment import attach
from tome_nodes.comfyui.models.attention_block import Part
from tome_nodes.comfyui.models.base import OVERRIDE
from tome_nodes.comfyui.models.unet import weigh_keys
from tome_nodes.merging import attention_trial
from tome_nodes.merging.attention_trial import Tried, try_out
from tome_nodes.merging.key_weights import (
    Capabilities,
    KeyWeights,
    Ways,
    attend,
    capabilities,
)
from tome_nodes.ops import TORCH
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy
from tome_nodes.strategies.plan import Grid, Plan

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


OLD, NEW = Capabilities(), Capabilities(flash=True, cudnn=True)
FLASH = Capabilities(flash=True)


def weighed(function, q, k, v, sizes, notes, options=None, capable=OLD, **kwargs):
    """The result of an attention function; what it noted last of its keys is added to ``notes``."""
    told = []
    ways = Ways(q.device, q.dtype, capable)
    weights = KeyWeights(sizes.log().to(q.dtype), TORCH, ways, told.append)
    called = weigh_keys({"transformer_options": options or {}}, weights)
    out = function(q, k, v, HEADS, **called, **kwargs)
    notes.append(told[-1])
    return out


@pytest.fixture(autouse=True)
def untried_functions(monkeypatch):
    """Functions are tried anew: the same one stands for several."""
    monkeypatch.setattr(attention_trial, "_results", WeakKeyDictionary())


@pytest.mark.parametrize("channels", [40, 64, 80])
# Flash is not installed here, so the host's fallback runs, with the same channels.
@pytest.mark.parametrize("name", ["basic", "split", "sub_quad", "pytorch", "flash"])
def test_weighed_keys_are_repeated_keys(name, channels):
    function = getattr(attention, f"attention_{name}")
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


def right(q, k, v, heads, mask=None, **kwargs):
    return attention.attention_basic(q, k, v, heads, mask=mask, **kwargs)


def takes_no_mask(q, k, v, heads):
    return right(q, k, v, heads)


def ignores_its_mask(q, k, v, heads, mask=None, **kwargs):
    return right(q, k, v, heads, **kwargs)


def subtracts_its_mask(q, k, v, heads, mask=None, **kwargs):
    return right(q, k, v, heads, mask=None if mask is None else -mask, **kwargs)


def has_one_mask_for_all(q, k, v, heads, mask=None, **kwargs):
    return right(q, k, v, heads, mask=None if mask is None else mask[:1], **kwargs)


def fails_with_a_mask(q, k, v, heads, mask=None, **kwargs):
    if mask is not None:
        raise SystemError("no kernel for a mask")
    return right(q, k, v, heads, **kwargs)


def knows_one_kind_of_head(q, k, v, heads, mask=None, **kwargs):
    """It gets no mask right, and heads of 40 or 64 channels only."""
    assert mask is None and q.shape[2] // heads in (40, 64)
    return right(q, k, v, heads, **kwargs)


def rounds(q, k, v, heads, mask=None, **kwargs):
    """As an attention of int8 does."""
    scales = [x.abs().amax((1, 2), keepdim=True) / 127 for x in (q, k)]
    q, k = ((x / scale).round() * scale for x, scale in zip((q, k), scales, strict=True))
    return right(q, k, v, heads, mask=mask, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "ways"),
    [
        *((function, ("mask", "channels")) for function in (right, rounds)),
        *((function, ("channels",)) for function in (takes_no_mask, ignores_its_mask)),
        *((function, ("channels",)) for function in (subtracts_its_mask, has_one_mask_for_all)),
        (fails_with_a_mask, ("channels",)),
        (knows_one_kind_of_head, ()),
    ],
)
# Names do not count.
@pytest.mark.parametrize("name", ["attention_pytorch", "attention_of_the_future"])
def test_the_ways_of_a_function_are_those_that_weigh_keys_rightly(
    function, ways, name, dtype, monkeypatch
):
    monkeypatch.setattr(function, "__name__", name)
    assert try_out(function, torch.device(DEVICE), dtype) == Tried(name, ways)


def on_this_device():
    return torch.device(DEVICE), torch.float32


def test_a_function_is_tried_once_and_one_that_is_faster_unweighed_not_at_all():
    q, k, v, sizes = tensors(40)
    masks = []

    def attention_sage(q, k, v, heads, mask=None):
        masks.append(mask)
        return right(q, k, v, heads, mask)

    assert try_out(attention_sage, *on_this_device()).ways == () and not masks
    ways = Ways(*on_this_device(), OLD)
    unnamed, counts = partial(attention_sage), []
    for _ in range(3):
        masks.clear()
        weights = KeyWeights(sizes.log(), TORCH, ways, lambda _: None)
        attend(weights, unnamed, None, None, q, k, v, HEADS, {})
        counts.append(len(masks))
    assert counts[0] > 1 and counts[1:] == [1, 1]


def test_a_trial_that_runs_out_of_memory_says_so():
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        try_out(full, *on_this_device())


@pytest.mark.parametrize("is_prepared", [True, False])
def test_in_a_compiled_model_a_function_is_not_tried(fresh_compiler, is_prepared):
    """One that is new there weighs its keys once, and the outcome says why."""
    q, k, v, sizes = tensors(40)
    ways, told = Ways(q.device, q.dtype, OLD), []
    if is_prepared:
        ways.prepare([right])

    @torch.compile(backend="eager", fullgraph=True)
    def model(q, k, v, log_sizes):
        weights = KeyWeights(log_sizes, TORCH, ways, told.append)
        return attend(weights, right, None, None, q, k, v, HEADS, {})

    actual = model(q, k, v, sizes.log())
    weighed = attention_to_repeated(q, k, v, sizes).float()
    expected = weighed if is_prepared else right(q, k, v, HEADS)
    assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert told[-1] == (None if is_prepared else reasons.UNTRIED)


@pytest.mark.parametrize(
    ("device", "dtype", "major", "hip", "expected"),
    [
        ("cuda", torch.float16, 8, None, NEW),
        ("cuda", torch.bfloat16, 12, None, NEW),
        ("cuda", torch.float16, 9, "6.4", FLASH),
        ("cuda", torch.float16, 7, None, OLD),
        ("cuda", torch.float32, 9, None, OLD),
        ("cpu", torch.float16, 9, None, OLD),
    ],
)
def test_what_a_device_runs(monkeypatch, device, dtype, major, hip, expected):
    """As the parts of PyTorch would tell it of such a device."""
    cuda, device_of = torch.backends.cuda, SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device_of)
    # PyTorch 2.4 cannot be asked this.
    monkeypatch.setattr(cuda, "is_flash_attention_available", lambda: True, raising=False)
    monkeypatch.setattr(cuda, "cudnn_sdp_enabled", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert capabilities(torch.device(device), dtype) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("channels", [40, 64, 128, 256])
def test_each_way_is_right_in_any_precision_and_layout(channels, key_heads, dtype):
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
    seen = []

    def attention_pytorch(q, k, v, heads, mask=None, **kwargs):
        # Not in a trial.
        if q.shape[-2] == 37:
            seen.append("channels" if mask is None else "mask")
        return attention.attention_pytorch(q, k, v, heads, mask=mask, **kwargs)

    by_head = [x.unflatten(2, (-1, channels)).transpose(1, 2).contiguous() for x in (q, k, v)]
    for capable in (NEW, FLASH):
        seen.clear()
        notes = []
        attend = partial(weighed, attention.wrap_attn(attention_pytorch), capable=capable, **gqa)
        flat = attend(q, k, v, sizes, notes)
        assert flat.dtype == dtype and flat.is_contiguous()
        assert relative_error(flat.double(), expected) < bound
        for skips in {"skip_reshape": True}, {"skip_reshape": True, "skip_output_reshape": True}:
            out = attend(*by_head, sizes, notes, **skips)
            out = out.transpose(1, 2).flatten(2) if len(skips) == 2 else out
            assert relative_error(out.double(), expected) < bound
        assert notes == [None] * 3
        is_widened = capable is FLASH and channels == 40 and key_heads == HEADS
        assert seen == ["channels" if is_widened else "mask", "mask", "mask"]


def test_an_attention_that_takes_no_weights_runs_as_it_is():
    q, k, v, sizes = tensors(40)
    notes = []
    actual = weighed(attention.wrap_attn(knows_one_kind_of_head), q, k, v, sizes, notes)
    assert torch.equal(actual, attention.attention_basic(q, k, v, HEADS))
    assert notes == ["knows_one_kind_of_head takes no weights"]


@pytest.mark.parametrize("function", [attention.attention_pytorch, attention.attention_flash])
@pytest.mark.parametrize("capable", [OLD, NEW, FLASH])
def test_the_override_of_another_node_runs_first_and_its_mask_counts(function, capable):
    q, k, v, sizes = tensors(40)
    region = torch.zeros(1, 1, 1, 29, device=DEVICE)
    region[..., :5] = -torch.inf

    def theirs(func, q, k, v, heads, mask=None, **kwargs):
        return 3 * func(2 * q, k, v, heads, mask=mask + region, **kwargs)

    options = {OVERRIDE: theirs}
    actual = weighed(function, q, k, v, sizes, [], options, capable)
    sizes[:, :5] = 0
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
            if isinstance(module, attention.BasicTransformerBlock):
                hooks.enter_context(module.register_forward_pre_hook(level, with_kwargs=True))
        yield sd15


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"strategy": "window"}, {"attn_tokens": "k,v"}),
        {"merge_mlp": True, "merge_crossattn": True, "ratio": 0.4},
        *({"scope": "stack"}, {"scope": "stack", "merge_attn": False}),
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


def test_a_mask_of_merged_keys_is_its_mean_over_each_slot():
    slots = torch.tensor([[0, 1, 0, 2, 1, 1], [2, 2, 2, 0, 1, 0]])
    part = Part(2, 1, Plan.from_slots(slots, 3))
    bias = torch.randn(1, HEADS, 5, 9, generator=torch.Generator().manual_seed(0))
    expected = [
        [bias[0, ..., 0], bias[0, ..., 1]]
        + [bias[0, ..., 2:8][..., own == slot].double().mean(-1).float() for slot in range(3)]
        + [bias[0, ..., 8]]
        for own in slots
    ]
    merged = part.merged_bias(bias, BATCH)
    assert_close(merged, torch.stack([torch.stack(columns, -1) for columns in expected]))


def test_keys_that_are_hidden_from_all_stay_hidden_once_merged():
    pytest.importorskip("triton", "3.6", reason="the kernels need Triton 3.6")
    from tome_nodes.ops import triton as kernels

    strategy = make_strategy(ToMeConfig(strategy="window"), kernels)
    strategy.begin(torch.tensor(7, device=DEVICE))
    tokens = torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    plan = strategy.plan(tokens, Grid(8, 8), 0.5)
    bias = torch.zeros(1, 1, 20, 66, dtype=torch.float16, device=DEVICE)
    bias[:, :, 5] = -torch.inf
    merged = Part(2, 0, plan).merged_bias(bias, 1)
    assert merged.shape == (1, 1, 20, 34)
    assert (merged[:, :, 5] == torch.finfo(torch.float16).min).all()
    merged[:, :, 5] = 0
    assert not merged.any()
