"""Evaluations of UNets, and instruments around them: a clock, counters, a memory meter."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tome_nodes.comfyui.attachment import last_run

Instrument = AbstractContextManager[Any]


class Subject:
    """A UNet and an input of one size, for cond and uncond of some pictures in one batch.

    Attributes:
        model: the unpatched model; patched models must be clones of it.
    """

    def __init__(self, model: ModelPatcher, context_channels: int, size: int, pictures: int = 1):
        self.device = model.load_device
        self.model = model.clone()
        # This wrapper comes first, so the wrappers of the methods are inside.
        self.model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "benchmark", self._evaluation)
        self._instruments: list[Instrument] = []
        self._outputs: list[Tensor] = []
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
        self._noise = draw(pictures, 4, size // 8, size // 8)
        self._prompts = [
            [[draw(1, 77, context_channels), {"pooled_output": draw(1, 1280)}]] for _ in range(2)
        ]

    def run(self, patched: ModelPatcher, *instruments: Instrument) -> list[Tensor]:
        """Sample with one evaluation within each instrument.

        Returns:
            The output of each evaluation.

        Raises:
            RuntimeError: if the host had too little memory to evaluate the batch in one piece.
        """
        self._instruments, self._outputs = list(instruments), []
        run = self._noise, len(instruments), 4.0, "euler", "normal", *self._prompts
        empty = torch.zeros_like(self._noise)
        comfy.sample.sample(patched, *run, empty, disable_pbar=True, seed=0)
        return self._outputs

    def time(self, patched: ModelPatcher, evaluations: int = 1) -> float:
        """Seconds of one evaluation, on average over this many in a row.

        On a GPU they follow another one in the same sampling run, as most evaluations do. On a CPU
        that would double the time, so the first one counts. It also creates the state of the run,
        which takes about a millisecond.
        """
        watch = Stopwatch(self.device)
        before = [nullcontext()] if self.device.type == "cuda" else []
        self.run(patched, *before, *[watch] * evaluations)
        return watch.seconds / evaluations

    def _evaluation(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        if len(self._outputs) == len(self._instruments):
            raise RuntimeError("too little memory: the host evaluates the batch in pieces")
        with self._instruments[len(self._outputs)]:
            result = executor(*args, **kwargs)
        self._outputs.append(result)
        return result


class Stopwatch:
    """Time between entry and exit, by CUDA events on a GPU. It can be entered many times."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """The sum over all entries; waits for the GPU, so call it at the end."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        if not self._on_gpu:
            return sum(end - start for start, end in pairs)
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in pairs) / 1000


class PeakMemory:
    """The peak of the bytes in tensors, minus those at entry."""

    def __init__(self, device: torch.device):
        self._device = device
        self.bytes = 0

    def __enter__(self) -> "PeakMemory":
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU],
                profile_memory=True,
                acc_events=True,
            )
            self._profiler.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
            return
        self._profiler.__exit__(*details)
        # The allocator's own records, because the profiler's public events are sums over operators.
        # Torch has no complete types for them.
        internals: Any = self._profiler.profiler
        events = internals.kineto_results.events()
        changes = [
            (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
        ]
        held = 0
        for _, change in sorted(changes, key=lambda pair: pair[0]):
            held += change
            self.bytes = max(self.bytes, held)


class Operators(TorchDispatchMode):
    """Counts the operators that would launch a kernel on a GPU."""

    gpu_seconds = None

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        aliases = [returned.alias_info for returned in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        self.count += not (is_view or function._schema.name in _SILENT)
        return function(*args, **(kwargs or {}))


_SILENT = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "new_empty", "empty_strided", "_local_scalar_dense")
) | {"aten::lift_fresh", "aten::_unsafe_view", "aten::_reshape_alias"}
"""Operators that launch nothing although they return new tensors, or that only wait."""


class Kernels:
    """Counts the kernels that a GPU runs, and adds up their time."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self.count = 0
        self.gpu_seconds = 0.0

    def __enter__(self) -> "Kernels":
        self._profiler.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        torch.cuda.synchronize()
        self._profiler.__exit__(*details)
        events = [event for event in self._profiler.events() if event.device_type.name == "CUDA"]
        self.count = len(events)
        self.gpu_seconds = sum(event.time_range.elapsed_us() for event in events) / 1e6


def merged_blocks(model: ModelPatcher) -> tuple[int, int]:
    """How many blocks the last run of a model merged, out of how many."""
    run = last_run(model)
    return (0, 0) if run is None else (run.counts.merged_blocks, run.counts.blocks_present)


def merged_in_words(merged: int, blocks: int) -> str:
    """How many blocks merged, for tables: ``5/6``, or ``none``."""
    return f"{merged}/{blocks}" if merged else "none"


def launches(subject: Subject, model: ModelPatcher) -> dict[str, Any]:
    """Launches in the second evaluation of a run, and the seconds of kernels."""
    counter = Kernels() if subject.device.type == "cuda" else Operators()
    subject.run(model, nullcontext(), counter)
    return {"launches": counter.count, "gpu_seconds": counter.gpu_seconds}


def first_look(subject: Subject, model: ModelPatcher) -> tuple[Tensor, int, tuple[int, int]]:
    """The output of a first evaluation, the bytes that a second holds, and the merged blocks."""
    memory = PeakMemory(subject.device)
    output, _ = subject.run(model, nullcontext(), memory)
    return output, memory.bytes, merged_blocks(model)
