"""Compile the Triton kernels for GPUs that are not here, the way their launchers launch them.

Each launcher runs on tensors of real shapes, with Triton's own specialisation of arguments; only
the launch itself is left out. The result says what is in the machine code: instructions that spill
registers to memory, and instructions on tensor cores.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from tome_nodes.ops import triton as kernels
from tome_nodes.ops.triton import adding, matching, merging, widening, window_merging
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy
from tome_nodes.strategies.plan import Grid

TARGETS: Mapping[str, GPUTarget] = {
    **{f"sm_{number}": GPUTarget("cuda", number, 32) for number in (75, 80, 86, 89, 90, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
"""Turing, Ampere, Ada, Hopper and Blackwell; MI300 and RDNA 3."""

KERNELS = (
    (matching, "match_windows_kernel"),
    (merging, "merge_kernel"),
    (window_merging, "merge_windows_kernel"),
    (adding, "add_change_kernel"),
    (widening, "widen_kernel"),
)

BATCH = 2
"""Samples: cond and uncond."""

StandIn = TypeVar("StandIn")


@dataclass(frozen=True)
class Shape:
    """What a model merges.

    Attributes:
        grid: the grid of the tokens.
        channels: channels of a token.
        heads: heads of its attention.
        cell: height and width of a cell.
        dtype: the dtype of the tokens.
    """

    grid: Grid
    channels: int
    heads: int
    cell: tuple[int, int] = (2, 2)
    dtype: torch.dtype = torch.float16


class Compiled(NamedTuple):
    """A kernel that was compiled for a target.

    Attributes:
        kernel: its name.
        spilling: instructions that move registers to local memory and back.
        tensor_cores: instructions on tensor cores.
    """

    kernel: str
    spilling: int
    tensor_cores: int


class AbsentDriver(DriverBase):
    """A driver of GPUs that are not here; each target is one device."""

    def __init__(self) -> None:
        super().__init__()
        self.target = next(iter(TARGETS))

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.target]

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.target)

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("there is no GPU to measure on")


class _Launched:
    """Stands in for a kernel: compiles what would be launched, and remembers it."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.name = kernel.fn.__name__.removesuffix("_kernel")
        self.made: dict[int, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_only(*arguments: Any, **options: Any) -> None:
            binary = self.kernel.warmup(*arguments, grid=grid, **options)
            self.made[id(binary)] = binary

        return compile_only


@contextmanager
def absent_gpus(stand_in: Callable[[Any], StandIn]) -> Iterator[tuple[AbsentDriver, list[StandIn]]]:
    """Make the launchers launch stand-ins for kernels; yields the driver and all stand-ins."""
    launched = [stand_in(getattr(module, name)) for module, name in KERNELS]
    driver = AbsentDriver()

    def capability(_: torch.device) -> int:
        return int(driver.target.removeprefix("sm_")) if driver.target.startswith("sm_") else 0

    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        patches.enter_context(patch.dict(os.environ, TRITON_CACHE_DIR=folder))
        patches.callback(triton.runtime.driver.set_active, None)
        triton.runtime.driver.set_active(driver)
        for (module, name), kernel in zip(KERNELS, launched, strict=True):
            patches.enter_context(patch.object(module, name, kernel))
        for module in (matching, merging):
            patches.enter_context(patch.object(module, "capability", capability))
        yield driver, launched


def launch(shape: Shape) -> None:
    """Call each operation of a backend as merging calls it for this shape on a GPU."""
    x = torch.zeros(BATCH, shape.grid.tokens, shape.channels, dtype=shape.dtype)
    config = ToMeConfig(strategy="window", ratio=0.5, sy=shape.cell[0], sx=shape.cell[1])
    strategy = make_strategy(config, kernels.TRITON)
    strategy.begin(torch.tensor(7))
    plan = strategy.plan(x, shape.grid, 0.5)
    assert plan is not None
    plan.merge(x)
    for heads in {1, shape.heads}:
        plan.merge_keys(x, heads)
    # The plan was not computed, so another one of the same size takes its place.
    half = x.shape[1] // 2
    slot_of_token = torch.arange(x.shape[1]).clamp_max(half - 1).expand(BATCH, -1).contiguous()
    order = torch.arange(BATCH * x.shape[1])
    offsets = torch.arange(BATCH * half)
    merged = kernels.merge(x, slot_of_token, order, offsets)
    for heads in {1, shape.heads}:
        kernels.merge_keys(x, slot_of_token, order, offsets, heads)
    kernels.add_change(x, merged, merged, slot_of_token)
    log_sizes = torch.zeros(merged.shape[:2], dtype=shape.dtype)
    kernels.widen(x, merged, merged, log_sizes, shape.heads, 1.5, 2.0)


def compile_for(target: str, shapes: Sequence[Shape]) -> list[Compiled]:
    """Compile what these shapes launch for one of :data:`TARGETS`; raises if a compiler does."""
    with absent_gpus(_Launched) as (driver, launched):
        driver.target = target
        for shape in shapes:
            launch(shape)
        return [
            Compiled(kernel.name, *_in_machine_code(binary))
            for kernel in launched
            for binary in kernel.made.values()
        ]


def _in_machine_code(binary: Any) -> tuple[int, int]:
    """Spilling instructions, and instructions on tensor cores."""
    if code := binary.asm.get("amdgcn"):
        spilling, products = r"\sscratch_(?:load|store)", r"\sv_(?:mfma|wmma)"
        return len(re.findall(spilling, code)), len(re.findall(products, code))
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(program), "-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"\b(?:STL|LDL)\b", code)), len(re.findall(r"\s[A-Z]+MMA\.", code))
