"""The Triton kernels against float64 brute force: on a GPU if there is one, else interpreted."""

import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from common import DEVICE, Broken
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import (
    DTYPES,
    HEADS,
    brute_force_keys,
    brute_force_merge,
    check_merge,
    partitions,
    seeded,
    surrounded,
)
from test_plan import plan_of as plan_of_owners
from test_strategies import brute_force_windows, features_of, groups, plan_of
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

pytest.importorskip("triton", "3.6", reason="the kernels need Triton 3.6")

from tome_nodes.ops import TORCH, reference, resolve
from tome_nodes.ops import triton as kernels
from tome_nodes.ops.random_picks import pick_per_cell, step_key
from tome_nodes.ops.triton import matching, merging
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies.plan import Grid, Plan
from tome_nodes.strategies.window import WindowStrategy, split_windows
from tools.environment import ROOT


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory():
    """Memory that a kernel leaves unwritten holds NaN, or the largest integer."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="module")
def mended_interpreter():
    """Triton's interpreter with products of bfloat16, and with arguments as bounds of loops."""
    if DEVICE.type == "cuda":
        yield
        return
    from triton.runtime import interpreter

    own_create_dot = interpreter.InterpreterBuilder.create_dot
    own_patch = interpreter._patch_lang_tensor

    def values(matrix):
        return (matrix.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(builder, a, b, accumulator, *options):
        if not (a.dtype.scalar.is_bf16() and b.dtype.scalar.is_bf16()):
            return own_create_dot(builder, a, b, accumulator, *options)
        product = np.matmul(values(a), values(b), dtype=np.float32)
        return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)

    def patch_tensor(tensor, scope):
        own_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        yield


def slot_plan(owners):
    return plan_of_owners(owners, kernels.TRITON, DEVICE)


def window_plan(features, grid, ratio=0.5, **options):
    config = ToMeConfig(strategy="window", ratio=ratio, **options)
    return plan_of(config, features.to(DEVICE), grid, ops=kernels.TRITON)


@settings(max_examples=8)
@given(
    st.builds(Grid, st.integers(1, 24), st.integers(1, 20), st.just(1)),
    st.sampled_from([(2, 2), (2, 4), (1, 2), (3, 2), (2, 3), (8, 8), (1, 8)]),
    st.sampled_from([0.05, 0.5, 0.75, 0.95]),
    st.booleans(),
    st.integers(0, 9),
)
def test_matching_is_the_brute_force_grouping_of_each_window(grid, cell, ratio, use_rand, seed):
    sy, sx = cell
    features = features_of(grid, batch=1, channels=5, seed=seed)
    plan = window_plan(features, grid, ratio=ratio, sy=sy, sx=sx, use_rand=use_rand, seed=seed)
    cells = grid.cells(sy, sx)
    if plan is None:
        assert int(grid.tokens * ratio) * cells.tokens * 2 < grid.tokens or cells.tokens == 0
        return
    picks = pick_per_cell(torch.tensor(step_key(seed, 0)), cells.height, cells.width, sy * sx)
    src, dst = split_windows(grid, sy, sx, picks if use_rand else torch.zeros_like(picks))
    quota, rest = divmod(grid.tokens - plan.slot_count, len(src))
    assert rest == 0
    assert groups(plan, 0) == brute_force_windows(features[0], src, dst, quota)
    assert_is_whole(plan)


def assert_is_whole(plan):
    """All arrays of a plan describe the same partition, with slots and members in order."""
    again = Plan.from_slots(plan.slots(), plan.slot_count)
    for name in ("slot_of_token", "order", "offsets"):
        assert torch.equal(getattr(plan, name), getattr(again, name)), name
    assert_close(plan.log_sizes, again.log_sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("height", "width", "channels"), [(16, 16, 64), (8, 24, 100), (13, 19, 7), (16, 8, 320)]
)
def test_matching_takes_any_dtype_and_strides(height, width, channels, dtype):
    grid = Grid(height, width)
    features = features_of(grid, channels=channels, seed=height).to(dtype)
    plan = window_plan(surrounded(features.to(DEVICE)), grid)
    # In float32, so that rounding makes no two similarities equal.
    expected = plan_of(ToMeConfig(strategy="window", ratio=0.5), features.float(), grid)
    for index in range(len(features)):
        assert groups(plan, index) == groups(expected, index)
    sizes = torch.stack([torch.bincount(row) for row in plan.slots().cpu()])
    assert_close(plan.log_sizes.cpu(), sizes.log().to(dtype))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0, 1e30])
def test_matching_makes_a_plan_of_any_features(value):
    grid = Grid(9, 16)
    features = features_of(grid)
    features[0] = value
    features[1, ::3] = value
    plan = window_plan(features, grid, ratio=0.4)
    assert_is_whole(plan)
    assert all(len(row.unique()) == plan.slot_count for row in plan.slots())


@settings(max_examples=10)
@given(partitions(), st.integers(1, 70), st.sampled_from(DTYPES))
def test_merge_and_added_change(owners, channels, dtype):
    check_merge(slot_plan(owners), owners, channels, dtype)


@settings(max_examples=10)
@given(partitions(), st.sampled_from(HEADS), st.sampled_from([1, 7, 33]), st.sampled_from(DTYPES))
def test_each_head_of_a_key_is_as_long_as_its_tokens_are_on_average(owners, heads, channels, dtype):
    plan = slot_plan(owners)
    x = torch.randn(*plan.slot_of_token.shape, heads * channels, generator=seeded(2)).to(dtype)
    view = surrounded(x.to(DEVICE))
    means, keys = kernels.merge_keys(view, plan.slot_of_token, plan.order, plan.offsets, heads)
    assert means.dtype == keys.dtype == dtype
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
    assert_close(means.double().cpu(), brute_force_merge(owners, x), **close)
    assert_close(keys.double().cpu(), brute_force_keys(owners, x, heads), **close)


@pytest.mark.parametrize("number", [0, 75])
def test_windows_are_the_same_on_any_gpu(monkeypatch, number):
    grid = Grid(9, 34)
    x = features_of(grid, batch=1, channels=32).half().to(DEVICE)
    expected = window_plan(x, grid, 0.8, sy=2, sx=4)
    for module in (matching, merging):
        monkeypatch.setattr(module, "capability", lambda _: number)
    plan = window_plan(x, grid, 0.8, sy=2, sx=4)
    assert torch.equal(plan.slot_of_token, expected.slot_of_token)
    wide = replace(plan, ops=TORCH)
    assert_close(plan.merge(x), wide.merge(x), rtol=2e-3, atol=2e-3)
    assert_close(plan.merge_keys(x, 2), wide.merge_keys(x, 2), rtol=2e-3, atol=2e-3)


WINDOWED = [
    # Several windows with tokens beside and below them; fewer tokens than a window can hold.
    (Grid(17, 34), 2, 2, 0.5, 1, 48),
    (Grid(17, 35), 2, 4, 0.8, 2, 16),
    (Grid(16, 16), 4, 4, 0.9, 1, 70),
    (Grid(5, 12), 1, 2, 0.3, 3, 8),
]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    zip(WINDOWED, [torch.float16, torch.bfloat16, torch.float16, torch.float32], strict=True),
)
def test_slots_in_windows_are_their_means(shape, dtype):
    grid, sy, sx, ratio, heads, channels = shape
    # All are alike but a few, so slots hold from one token to as many as a window has.
    x = features_of(grid, channels=heads * channels)
    x[:, ::2] = x[:, :1] + 0.01 * x[:, ::2]
    x = surrounded(x.to(DEVICE, dtype))
    plan = window_plan(x, grid, ratio, sy=sy, sx=sx)
    assert plan.window is not None and plan.log_sizes.exp().max() > 3
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for sample, slots in enumerate(plan.slots().cpu()):
        rows = x[sample].double().cpu()
        expected = torch.stack([rows[slots == slot].mean(0) for slot in range(plan.slot_count)])
        assert_close(plan.merge(x)[sample].double().cpu(), expected, rtol=bound, atol=bound)
    wide = replace(plan, ops=TORCH)
    for actual, whole in zip(plan.merge_keys(x), wide.merge_keys(x), strict=True):
        assert_close(actual, whole, rtol=bound, atol=bound)
    assert_close(plan.merge_keys(x, heads), wide.merge_keys(x, heads), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_order_of_the_members_of_a_slot_does_not_change_a_bit(dtype):
    grid = Grid(10, 24)
    x = features_of(grid, batch=1, channels=64).to(DEVICE, dtype)
    plan = window_plan(x, grid, ratio=0.7)
    ends = [*plan.offsets.tolist(), len(plan.order)]
    turned = [plan.order[start:end].flip(0) for start, end in itertools.pairwise(ends)]
    other = replace(plan, order=torch.cat(turned))
    assert not torch.equal(other.order, plan.order)
    assert torch.equal(other.merge(x), plan.merge(x))
    assert torch.equal(other.merge_keys(x, 2)[1], plan.merge_keys(x, 2)[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "channels"), [(1, 5), (3, 40), (2, 64)])
def test_heads_are_widened_as_in_the_reference(heads, channels, dtype):
    generator = seeded(0)
    q, k, v = (
        surrounded(torch.randn(2, tokens, heads * channels, generator=generator).to(DEVICE, dtype))
        for tokens in (13, 7, 7)
    )
    log_sizes = torch.randn(2, 7, generator=generator).to(dtype)
    arguments = (q, k, v, log_sizes.to(DEVICE), heads, 1.25, 3.5)
    for actual, whole in zip(kernels.widen(*arguments), reference.widen(*arguments), strict=True):
        assert actual.dtype == dtype
        assert_close(actual, whole)


def test_tokens_that_do_not_fit_are_named():
    plan = slot_plan([[0, 0, 2]])
    x = torch.zeros(1, 3, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"x is \(1, 3, 4\) of torch.float64: it must be"):
        plan.merge(x.double())
    with pytest.raises(ValueError, match="x has 4 channels, which 3 heads cannot share evenly"):
        plan.merge_keys(x, 3)
    with pytest.raises(ValueError, match="v has 2 channels, and q has 4"):
        kernels.widen(x, x, x[..., :2], x[..., 0], 2, 1.0, 1.0)
    with pytest.raises(ValueError, match="q has 4 channels, which 3 heads cannot share evenly"):
        kernels.widen(x, x, x, x[..., 0], 3, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"k is \(1, 3, 4\) of torch.float64: it must be"):
        kernels.widen(x, x.double(), x, x[..., 0], 2, 1.0, 1.0)
    arrays = plan.slot_of_token, plan.order, plan.offsets
    with pytest.raises(ValueError, match=r"x is \(\) of torch.float16: it must be"):
        kernels.merge_keys(x.sum().half(), *arrays, 2, (3, 1, 1))


def test_operators_pass_the_checks_of_torch():
    # A window of four cells in each sample, and a column next to it.
    grid = Grid(4, 5)
    features = features_of(grid).to(DEVICE)
    key = torch.tensor(7, device=DEVICE)
    window = 4, 5, 2, 2, 2, 2, 5
    slot_of_token, order, offsets, log_sizes = kernels.match_windows(features, key, *window)
    merged = kernels.merge(features, slot_of_token, order, offsets)
    few = merged[:1, :8]
    wide = features.repeat(1, 1, 6)[..., :32]
    assert merged.shape == (2, 20 - 5, 6) and log_sizes.shape == merged.shape[:2]
    operators = torch.ops.tome_nodes
    for operator, arguments in (
        (operators.match_windows, (features, key, *window)),
        (operators.merge, (features, slot_of_token, order, offsets)),
        (operators.merge_keys, (features, slot_of_token, order, offsets, 2)),
        (operators.merge, (features.half(), slot_of_token, order, offsets, [5, 4, 4])),
        (operators.merge_keys, (wide.half(), slot_of_token, order, offsets, 2, [5, 4, 4])),
        (operators.add_change, (features, merged, 2 * merged, slot_of_token)),
        (operators.widen, (few, few, few, log_sizes[:1, :8], 2, 1.5, 2.0)),
    ):
        checks = torch.library.opcheck(operator.default, arguments)
        assert set(checks.values()) == {"SUCCESS"}


def test_one_graph_serves_maps_of_any_size():
    """After that of the first size. What torch does with the same maps is tested on models."""
    strategy = WindowStrategy(ToMeConfig(strategy="window"), kernels.TRITON)
    strategy.begin(torch.tensor(7, device=DEVICE))

    def merged(x, height, width):
        plan = strategy.plan(x, Grid(height, width), 0.5)
        return plan.unmerge(plan.merge(x)), plan.window

    graphs = CompileCounter()
    compiled = torch.compile(merged, backend=graphs, fullgraph=True)
    windows = set()
    for grid in (Grid(8, 8), Grid(10, 18), Grid(18, 8), Grid(12, 10)):
        x = features_of(grid).to(DEVICE)
        actual, (_, *window) = compiled(x, grid.height, grid.width)
        expected, _ = merged(x, grid.height, grid.width)
        assert_close(actual, expected)
        windows.add(tuple(window))
    assert graphs.frame_count == 2 and len(windows) == 4


def test_a_kernel_gives_way_to_torch_for_a_shape_it_fails_on(monkeypatch, caplog):
    plan = slot_plan([[0, 0, 2, 3, 3]])
    x = torch.randn(1, 5, 11, generator=seeded(0)).to(DEVICE)
    expected = replace(plan, ops=TORCH).merge(x)
    with monkeypatch.context() as patch:
        patch.setattr(merging, "merge_kernel", Broken())
        assert_close(plan.merge(x), expected)
        assert_close(plan.merge(2 * x), 2 * expected)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "[ToMe] torch takes the place of the Triton kernel merge for tokens of (1, 5, 11): "
        "RuntimeError: out of resource: shared memory"
    ]
    plan.merge(x)
    assert_close(plan.merge(x[..., :7]), expected[..., :7])
    assert len(caplog.records) == 1


def test_matching_by_kernel_gives_way_to_torch(monkeypatch, caplog):
    grid = Grid(9, 11)
    features = features_of(grid, seed=3)
    expected = window_plan(features, grid)
    with monkeypatch.context() as patch:
        patch.setattr(matching, "match_windows_kernel", Broken())
        broken = window_plan(features + 0, grid)
    for sample in range(len(features)):
        assert groups(broken, sample) == groups(expected, sample)
    assert caplog.text.count("takes the place") == 1


def test_auto_takes_the_kernels_where_they_run():
    with torch.no_grad():
        assert resolve("auto", torch.device("cpu"), torch.float16) == ("torch", None)
        assert resolve("auto", torch.device("cuda"), torch.float16) == ("triton", None)
        assert resolve("torch", torch.device("cuda"), torch.float16) == ("torch", None)
        backend, why = resolve("auto", torch.device("cuda"), torch.float64)
        assert backend == "torch" and "torch.float64" in why
        backend, why = resolve("triton", torch.device("mps"), torch.float16)
        assert backend == "torch" and "on mps" in why
    backend, why = resolve("auto", torch.device("cuda"), torch.float16)
    assert backend == "torch" and "gradients" in why


def test_the_pack_imports_no_triton_and_takes_torch_where_there_is_no_working_one():
    script = f"""
import sys, types
sys.path.insert(0, {str(ROOT)!r})
import tome_nodes.strategies, tome_nodes.merging.unet, tome_nodes.ops
import torch

class Broken(types.ModuleType):
    def __getattr__(self, name):
        raise OSError(f"{{name}} has gone\\nfar away")

print([name for name in ("triton", "comfy") if name in sys.modules])
for triton in None, Broken("triton"):
    sys.modules["triton"] = triton
    print(*tome_nodes.ops.resolve("auto", torch.device("cuda"), torch.float16))
"""
    output = subprocess.check_output([sys.executable, "-c", script], env={}, text=True)
    modules, missing, broken = output.splitlines()
    assert modules == "[]"
    assert missing.startswith("torch ") and "triton" in missing
    assert broken.startswith("torch ") and "has gone" in broken
