"""The kernels compile for GPUs that are not there."""

import subprocess
import sys

import pytest

from tools.environment import ROOT

pytest.importorskip("triton", reason="Triton is not made for this system")
pytestmark = pytest.mark.newest_only

COMPILE = """
import torch
from benchmarks.speed.absent_gpus import Shape, compile_for
from tome_nodes.merging.plan import Grid

# A large window with heads of 40, a grid one cell high, and float32.
shapes = [
    Shape(Grid(32, 32), 320, 8, (2, 4), torch.float16),
    Shape(Grid(2, 64), 64, 1, (2, 2), torch.bfloat16),
    Shape(Grid(16, 16), 320, 5, (4, 2), torch.float32),
]
balanced, high, single = shapes
# Kernels that take 16 bits differ most between GPUs.
for target, chosen in {"sm_75": [balanced, high], "sm_90": shapes, "gfx942": [balanced]}.items():
    for made in compile_for(target, chosen):
        print(made.kernel, target, made.spilling, made.tensor_cores > 0, sep="|")
# Windows of eight by four cells, and of five by four.
lower = Shape(Grid(22, 32), 320, 8, (2, 4), torch.float16)
print(*(len(compile_for("sm_80", sizes)) for sizes in ([balanced], [balanced, lower])))
"""


ABSENT = {("merge_windows", "sm_75")}


def test_kernels_compile_for_gpus_that_are_not_present_and_once_for_many_sizes(tmp_path):
    command = [sys.executable, "-c", COMPILE]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    output = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    *compiled, kernels = output.splitlines()
    names = "match_windows", "merge", "merge_windows", "add_change", "widen"
    rows = [line.split("|") for line in compiled]
    assert {(kernel, target) for kernel, target, *_ in rows} == {
        (kernel, target)
        for kernel in names
        for target in ("sm_75", "sm_90", "gfx942")
        if (kernel, target) not in ABSENT
    }
    assert max(int(spilling) for *_, spilling, _ in rows) <= 16
    on_tensor_cores = {kernel for kernel, *_, products in rows if products == "True"}
    assert on_tensor_cores == {"match_windows", "merge_windows"}
    of_one_size, of_two = kernels.split()
    assert of_one_size == of_two
