"""The Triton kernels against float64 brute force: on a GPU if there is one, else interpreted."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bipartite import brute_force_groups, features_of, groups
from test_plan import brute_force_merge, partitions
from torch.testing import assert_close

pytest.importorskip("triton", reason="Triton is not made for this system")

from tome_nodes.config import ToMeConfig
from tome_nodes.grid import Grid
from tome_nodes.ops import fused, reference, resolve
from tome_nodes.picks import pick_per_cell, step_key
from tome_nodes.plan import Plan
from tome_nodes.strategies import make_strategy
from tome_nodes.strategies.window import split_windows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory():
    """Whatever a kernel leaves unwritten is NaN, or the largest integer."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="module")
def interpreted_bfloat16():
    """Matrix products of bfloat16, which the interpreter of Triton 3.6 takes for integers."""
    if DEVICE.type == "cuda":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def values(matrix):
        if not matrix.dtype.scalar.is_bf16():
            return matrix.data
        return (matrix.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(builder, a, b, accumulator, *_):
        product = np.matmul(values(a), values(b), dtype=np.float32)
        return TensorHandle(product + accumulator.data, accumulator.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


def surrounded(x):
    """A view equal to ``x``, of unusual strides, amid NaN."""
    batch, tokens, channels = x.shape
    store = x.new_full((channels + 2, 2 * tokens + 1, batch + 1), torch.nan)
    view = store.permute(2, 1, 0)[1:, 1::2, 1:-1]
    return view.copy_(x)


def window_plan(features, grid, step=0, **options):
    config = ToMeConfig(strategy="window", backend="triton", **options)
    strategy = make_strategy(config)
    strategy.start_step(torch.tensor(step_key(config.seed, step), device=DEVICE), config.ratio)
    return strategy.plan(features.to(DEVICE), grid)


@settings(max_examples=25)
@given(
    st.builds(Grid, st.integers(1, 40), st.integers(1, 20)),
    st.sampled_from([(2, 2), (2, 4), (1, 2), (3, 2), (2, 3), (8, 8), (1, 8)]),
    st.sampled_from([0.05, 0.5, 0.75, 0.95]),
    st.booleans(),
    st.integers(0, 9),
)
def test_matching_is_the_brute_force_grouping_of_each_window(grid, cell, ratio, use_rand, seed):
    sy, sx = cell
    features = features_of(grid, channels=5, seed=seed)
    plan = window_plan(features, grid, ratio=ratio, sy=sy, sx=sx, use_rand=use_rand, seed=seed)
    cells = grid.cells(sy, sx)
    if plan is None:
        assert int(grid.tokens * ratio) * cells.tokens * 2 < grid.tokens or cells.tokens == 0
        return
    picks = pick_per_cell(torch.tensor(step_key(seed, 0)), cells, sy * sx)
    src, dst = split_windows(grid, sy, sx, picks if use_rand else torch.zeros_like(picks))
    quota, rest = divmod(grid.tokens - plan.slot_count, len(src))
    assert rest == 0
    for index, values in enumerate(features):
        expected, inside = set(), set()
        for own_src, own_dst in zip(src.tolist(), dst.tolist(), strict=True):
            expected |= brute_force_groups(values, own_src, own_dst, quota)
            inside |= {*own_src, *own_dst}
        expected |= {frozenset([token]) for token in set(range(grid.tokens)) - inside}
        assert groups(plan, index) == expected
    assert_is_whole(plan)


def assert_is_whole(plan):
    """All arrays of a plan tell of the same partition, slots and members in order."""
    again = Plan.from_slots(plan.slots, plan.slot_count)
    for name in ("rows", "members", "starts"):
        assert torch.equal(getattr(plan, name), getattr(again, name)), name
    assert_close(plan.log_sizes, again.log_sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("height", "width", "channels"), [(16, 16, 64), (8, 24, 100), (13, 19, 7), (16, 8, 320)]
)
def test_matching_takes_any_dtype_and_strides(height, width, channels, dtype):
    grid = Grid(height, width)
    features = features_of(grid, batch=3, channels=channels, seed=height).to(dtype)
    plan = window_plan(surrounded(features), grid)
    plain = make_strategy(ToMeConfig(strategy="window"))
    plain.start_step(torch.tensor(step_key(0, 0)), 0.5)
    # In float32, so that rounding ties no similarities.
    expected = plain.plan(features.float(), grid)
    for index in range(len(features)):
        assert groups(plan, index) == groups(expected, index)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0, 1e30])
def test_matching_makes_a_plan_of_any_features(value):
    grid = Grid(9, 16)
    features = features_of(grid)
    features[0] = value
    features[1, ::3] = value
    plan = window_plan(features, grid, ratio=0.4)
    assert_is_whole(plan)
    assert all(len(row.unique()) == plan.slot_count for row in plan.slots)


@settings(max_examples=25)
@given(partitions(), st.integers(1, 70), st.sampled_from(DTYPES))
def test_merge_and_added_change(owners, channels, dtype):
    generator = torch.Generator().manual_seed(1)
    plan = Plan.from_owners(torch.tensor(owners, device=DEVICE), len(set(owners[0])), fused)
    x = torch.randn(*plan.rows.shape, channels, generator=generator).to(dtype)
    merged = plan.merge(surrounded(x).to(DEVICE))
    assert merged.dtype == dtype
    close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    assert_close(merged.double().cpu(), brute_force_merge(owners, x), **close)

    after = torch.randn(merged.shape, generator=generator).to(dtype)
    result = plan.add_change(surrounded(x).to(DEVICE), surrounded(merged), after.to(DEVICE))
    assert result.dtype == dtype
    change = after.double() - merged.double().cpu()
    slots = plan.slots.cpu()
    expected = x.double() + torch.stack([c[s] for c, s in zip(change, slots, strict=True)])
    assert_close(result.double().cpu(), expected, **close)


@settings(max_examples=25)
@given(partitions(), st.integers(1, 70), st.sampled_from(DTYPES))
def test_merged_keys_are_means_as_long_as_their_tokens(owners, channels, dtype):
    generator = torch.Generator().manual_seed(2)
    plan = Plan.from_owners(torch.tensor(owners, device=DEVICE), len(set(owners[0])), fused)
    x = torch.randn(*plan.rows.shape, channels, generator=generator).to(dtype)
    queries, keys, values = plan.merge_qkv(surrounded(x).to(DEVICE))
    assert keys.dtype == dtype and values is queries
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
    means = brute_force_merge(owners, x)
    assert_close(values.double().cpu(), means, **close)
    lengths = brute_force_merge(owners, x.double().norm(dim=2, keepdim=True))
    expected = means * lengths / means.norm(dim=2, keepdim=True)
    assert_close(keys.double().cpu(), expected, **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "channels"), [(1, 5), (3, 40), (2, 64)])
def test_heads_are_widened_as_in_the_reference(heads, channels, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        surrounded(torch.randn(2, tokens, heads * channels, generator=generator).to(dtype))
        for tokens in (13, 7, 7)
    )
    log_sizes = torch.randn(2, 7, generator=generator).to(dtype)
    arguments = [x.to(DEVICE) for x in (q, k, v, log_sizes)], (heads, 1.25, 3.5)
    expected = reference.widen(*arguments[0], *arguments[1])
    for actual, whole in zip(fused.widen(*arguments[0], *arguments[1]), expected, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, whole)


def test_wrong_input_is_named():
    plan = Plan.from_owners(torch.tensor([[0, 0, 2]], device=DEVICE), 2, fused)
    with pytest.raises(ValueError, match=r"x is \(1, 3, 4\) of torch.float64: it must be"):
        plan.merge(torch.zeros(1, 3, 4, dtype=torch.float64, device=DEVICE))


def test_operators_are_registered_as_torch_wants_them():
    grid = Grid(8, 16)
    features = features_of(grid).to(DEVICE)
    key = torch.tensor(7, device=DEVICE)
    window = fused.match_windows(features, key, 8, 16, 2, 2, 4, 4, 20)
    rows, members, starts, log_sizes = window
    merged = fused.merge(features, rows, members, starts)
    assert merged.shape == (2, 128 - 2 * 20, 6) and log_sizes.shape == merged.shape[:2]
    for operator, arguments in (
        (fused.match_windows, (features, key, 8, 16, 2, 2, 4, 4, 20)),
        (fused.match_windows, (features, None, 8, 16, 2, 2, 4, 4, 20)),
        (fused.merge, (features, rows, members, starts)),
        (fused.merge_keys, (features, rows, members, starts)),
        (fused.add_change, (features, merged, 2 * merged, rows)),
        (fused.widen, (features, merged, merged, log_sizes, 2, 1.5, 2.0)),
    ):
        checks = torch.library.opcheck(operator, arguments)
        assert set(checks.values()) == {"SUCCESS"}


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


def python(script, **environment):
    """What a script prints in a fresh interpreter with the pack on its path."""
    path = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{script}"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_without_triton_there_is_torch_and_a_reason():
    told = python(
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from tome_nodes.ops import resolve\n"
        "print(*resolve('auto', torch.device('cuda'), torch.float16))"
    )
    assert told.startswith("torch ") and "triton" in told


def test_importing_the_pack_leaves_triton_and_the_host_alone():
    told = python(
        "import tome_nodes.strategies, tome_nodes.scopes, tome_nodes.ops\n"
        "print([name for name in ('triton', 'comfy') if name in sys.modules])"
    )
    assert told.strip() == "[]"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tome_nodes.ops import kernels

def compile(kernel, tokens, indices, **constants):
    types = {"log_sizes": "*fp32", "scale": "fp32", "constant": "fp32"}
    types |= {**dict.fromkeys(tokens, f"*{dtype}"), **dict.fromkeys(indices, "*i64")}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values)
    binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    print(architecture, dtype, kernel.fn.__name__, len(binary.asm["cubin"]) > 0)

plan = ["rows", "members", "starts"]
window = dict(SY=2, SX=4, HIGH=8, WIDE=4, TOKENS=256, CELLS=32, ALL_CHANNELS=320, CHANNELS=32)
for architecture in (80, 90):
    for dtype in ("fp16", "bf16", "fp32"):
        compile(kernels.match_windows, ["features"], ["key", *plan], RANDOM=True, **window)
        compile(kernels.match_windows, ["features"], plan, key=None, RANDOM=False, **window)
        compile(kernels.merge, ["x", "means"], plan, SLOTS=8, CHANNELS=64)
        for channels in (320, 1280):
            padded = dict(ALL_CHANNELS=channels, CHANNELS=512 if channels == 320 else 2048)
            compile(kernels.merge_keys, ["x", "means", "keys"], plan, SLOTS=2, **padded)
        changed = ["x", "before", "after", "result"]
        compile(kernels.add_change, changed, plan, TOKENS=8, CHANNELS=64)
        heads = dict(CHANNELS=40, WIDE=48, PADDED=64)
        wide = [*"qkv", "wide_q", "wide_k", "wide_v", "log_sizes"]
        compile(kernels.widen, wide, [], ROWS=8, **heads)
"""


def test_kernels_compile_for_gpus_that_are_not_there(tmp_path):
    file = tmp_path / "compile.py"
    file.write_text(COMPILE, encoding="utf-8")
    told = python(
        f"import runpy; runpy.run_path({str(file)!r})",
        TRITON_CACHE_DIR=str(tmp_path),
        HOME=str(tmp_path),
        PATH="/usr/bin:/bin",
    )
    assert told.splitlines() == [
        f"{architecture} {dtype} {kernel} True"
        for architecture in (80, 90)
        for dtype in ("fp16", "bf16", "fp32")
        for kernel in (*["match_windows"] * 2, "merge", *["merge_keys"] * 2, "add_change", "widen")
    ]
