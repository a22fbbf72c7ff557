"""Kernels compile for GPUs that are not there, and one that is remembered is Triton's choice."""

import subprocess
import sys

import pytest

from tools.environment import ROOT

pytest.importorskip("triton", "3.6", reason="the kernels need Triton 3.6")
pytestmark = pytest.mark.newest_only

COMPILE = """
import torch
from benchmarks.speed.absent_gpus import Shape, compile_for
from tome_nodes.strategies.plan import Grid

# A large window with heads of 40 spills first; a small one compiles in less than half the time.
large = Shape(Grid(32, 32), 320, 8, (2, 4), torch.float16)
small = Shape(Grid(8, 8), 64, 1, (2, 2), torch.float16)
one_cell_high = Shape(Grid(2, 64), 64, 1, (2, 2), torch.float32)
for target, shapes in {
    "sm_75": [small],
    "sm_90": [large],
    "gfx942": [small, one_cell_high],
}.items():
    for made in compile_for(target, shapes):
        print(made.kernel, target, made.spilling, made.tensor_cores > 0, sep="|")
"""

TRACE = """
import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from benchmarks.speed.absent_gpus import absent_gpus
from tome_nodes.ops import reference, triton as kernels
from tome_nodes.ops.triton import merging

def run(x, key, height):
    slots, order, offsets, log_sizes = kernels.match_windows(x, key, height, 64, 2, 4, 4, 2, 38)
    means, keys = kernels.merge_keys(x, slots, order, offsets, 10, [64, 8, 8])
    held = kernels.merge(x, slots, order, offsets)
    wide = kernels.widen(x, means, keys, log_sizes.half(), 10, 1.5, 2.0)
    return kernels.add_change(x, held, 2 * held, slots), *wide

def show(graph, inputs):
    for node in graph.graph.nodes:
        if "triton_kernel" in str(node.target):
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            name = getattr(kernel, "fn", kernel).__name__
            print(name, *sorted(node.kwargs["tensors_to_clone"]))
        elif str(node.target).startswith("tome_nodes"):
            print(node.target)
    made = [node.meta["val"] for node in graph.graph.output_node().args[0]]
    return lambda *_: [torch.zeros([*map(int, x.shape)], dtype=x.dtype) for x in made]

def backend(graph, inputs):
    return aot_module_simplified(graph, inputs, fw_compiler=show)

compiled = torch.compile(run, backend=backend, fullgraph=True)
key = torch.zeros((), dtype=torch.int64)
with absent_gpus(lambda kernel: kernel) as (driver, _), torch.no_grad():
    driver.target = "sm_90"
    for batch, height, picks in ((2, 64, key), (4, 96, key), (2, 64, None), (4, 96, key)):
        x = torch.zeros(batch, 640, 64 * height, dtype=torch.float16).transpose(1, 2)
        changed, *_ = compiled(x, picks, height)
        assert changed.shape == x.shape

class Broken:
    def __getitem__(self, grid):
        raise RuntimeError("out of resource: shared memory")

merging.merge_kernel = Broken()
x, slots = torch.randn(1, 4, 8), torch.tensor([[0, 0, 1, 2]])
arguments = x, slots, torch.arange(4), torch.tensor([0, 2, 3])
expected = reference.merge(*arguments)
for _ in range(2):
    # The operator on tensors that are there, and in a compiler that traces it.
    assert torch.equal(torch.ops.tome_nodes.merge(*arguments), expected)
    assert torch.equal(torch.compile(kernels.merge, backend="aot_eager")(*arguments), expected)
"""

REMEMBER = """
from unittest.mock import patch

import torch
from hypothesis import given, settings, strategies as st
from triton.runtime.jit import JITFunction
from benchmarks.speed.absent_gpus import Shape, absent_gpus, launch
from tome_nodes.strategies.plan import Grid
from tome_nodes.ops import triton as kernels

class Kernel:
    def __init__(self, kernel):
        self.kernel, self.asked, self.reused = kernel, 0, []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.asked += 1
            return Compiled(self, arguments, num_warps)
        return launch

class Compiled:
    def __init__(self, kernel, arguments, warps):
        self.of, self.warps = kernel, warps
        self.chosen = self.choose(arguments)

    def choose(self, arguments):
        return self.of.kernel.warmup(*arguments, grid=(1, 1, 1), num_warps=self.warps)

    def __getitem__(self, grid):
        def launch(*arguments):
            self.of.reused.append(self.choose(arguments) is self.chosen)
        return launch

made = []

def compile_nothing(kernel, key, signature, device, *_):
    made.append(object())
    return kernel.device_caches[device][0].setdefault(key, made[-1])

def within_another(draw, shape, dtype):
    # Some begin where no wide load can, or are not contiguous.
    before, behind = draw(st.sampled_from([0, 0, 0, 1, 8])), draw(st.sampled_from([0, 0, 1, 16]))
    batch, tokens, channels = shape
    x = torch.zeros(batch, tokens, before + channels + behind, dtype=dtype)
    return x[..., before : before + channels]

@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.data())
def check(data):
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    heads, channels = draw(st.sampled_from([(1, 1), (2, 16), (2, 40), (1, 96)]))
    batch = draw(st.sampled_from([1, 2]))
    x, merged = (within_another(draw, (batch, n, heads * channels), dtype) for n in (64, 26))
    key = torch.tensor(0) if draw(st.booleans()) else None
    slots, order, offsets, log_sizes = kernels.match_windows(x, key, 8, 8, 2, 2, 4, 4, 38)
    window = (8, 8, 8) if draw(st.booleans()) else None
    kernels.merge(x, slots, order, offsets, window)
    kernels.merge_keys(x, slots, order, offsets, heads, window)
    kernels.add_change(x, merged, merged, slots)
    scale = draw(st.sampled_from([1.0, 1.5]))
    kernels.widen(x, merged, merged, log_sizes.to(dtype), heads, scale, 2.0)

without_compiler = patch.object(JITFunction, "_do_compile", compile_nothing)
with absent_gpus(Kernel) as (driver, launched), without_compiler:
    driver.target = "sm_90"
    for height in 32, 22:
        # Windows of eight by four cells, and of five by four.
        launch(Shape(Grid(height, 32), 320, 8, (2, 4), torch.float16))
        print(len(made))
    check()
    for kernel in launched:
        print(kernel.kernel.__name__, kernel.asked > 5, len(kernel.reused) > 20, all(kernel.reused))
"""

NAMES = "match_windows", "merge", "merge_windows", "add_change", "widen"
ABSENT = {("merge_windows", "sm_75")}


def lines(program, home):
    """What a program prints, in a process without the interpreter of Triton."""
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", program]
    return subprocess.check_output(command, cwd=ROOT, env=environment, text=True).splitlines()


def test_a_compiler_sees_the_kernels_and_what_they_write(tmp_path):
    """For one size; for any other, it calls operators. A kernel that fails gives way to torch."""
    of_one_size = [
        "match_windows_kernel log_sizes offsets order slot_of_token",
        "merge_windows_kernel keys means",
        "merge_kernel means",
        "widen_kernel wide_k wide_q wide_v",
        "add_change_kernel result",
    ]
    operators = "match_windows", "merge_keys", "merge", "widen", "add_change"
    of_any_size = [f"tome_nodes.{operator}.default" for operator in operators]
    assert lines(TRACE, tmp_path) == of_one_size + 2 * of_any_size


def test_triton_would_choose_what_is_remembered_and_compiles_once_for_many_sizes(tmp_path):
    """It chooses by dtypes, strides and where tensors begin, as well as by numbers."""
    of_one_size, of_two, *rows = lines(REMEMBER, tmp_path)
    assert of_one_size == of_two
    assert rows == [f"{name}_kernel True True True" for name in NAMES]


def test_kernels_compile_for_gpus_that_are_not_present(tmp_path):
    rows = [line.split("|") for line in lines(COMPILE, tmp_path)]
    assert {(kernel, target) for kernel, target, *_ in rows} == {
        (kernel, target)
        for kernel in NAMES
        for target in ("sm_75", "sm_90", "gfx942")
        if (kernel, target) not in ABSENT
    }
    assert max(int(spilling) for *_, spilling, _ in rows) <= 16
    on_tensor_cores = {kernel for kernel, *_, products in rows if products == "True"}
    assert on_tensor_cores == {"match_windows", "merge_windows"}
