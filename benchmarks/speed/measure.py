"""Evaluations of UNets, and what is measured of one."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tome_nodes.comfyui.attachment import last_run
from tome_nodes.ops.clock import Clock

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
        clock, spans = Clock(self.device), list[tuple[Any, Any]]()

        @contextmanager
        def timed() -> Iterator[None]:
            start = clock.now()
            yield
            spans.append((start, clock.now()))

        before = [nullcontext()] if self.device.type == "cuda" else []
        self.run(patched, *before, *[timed() for _ in range(evaluations)])
        clock.wait()
        return sum(clock.between(*span) for span in spans) / evaluations

    def _evaluation(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        if len(self._outputs) == len(self._instruments):
            raise RuntimeError("too little memory: the host evaluates the batch in pieces")
        with self._instruments[len(self._outputs)]:
            result = executor(*args, **kwargs)
        self._outputs.append(result)
        return result


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


def look(subject: Subject, model: ModelPatcher, expected: Tensor) -> dict[str, Any]:
    """The figures of a :data:`benchmarks.speed.figures.Row` that take no clock.

    The second evaluation of a run is counted. The error is that of the first one's output,
    compared with ``expected``.

    Raises:
        ValueError: the output is not finite.
    """
    counter = Kernels() if subject.device.type == "cuda" else Operators()
    output, _ = subject.run(model, nullcontext(), counter)
    if not output.isfinite().all():
        raise ValueError("its output is not finite")
    expected = expected.float()
    merged, blocks = merged_blocks(model)
    return {
        "launches": counter.count,
        "gpu_seconds": counter.gpu_seconds,
        "merged": f"{merged}/{blocks}" if merged else "none",
        "error": ((output.float() - expected).norm() / expected.norm()).item(),
    }


def peak_bytes(subject: Subject, model: ModelPatcher) -> int | None:
    """The most bytes in tensors during an evaluation beyond those before it; None on a CPU."""
    if subject.device.type != "cuda":
        return None
    before = 0

    @contextmanager
    def watched() -> Iterator[None]:
        nonlocal before
        torch.cuda.reset_peak_memory_stats(subject.device)
        before = torch.cuda.memory_allocated(subject.device)
        yield

    subject.run(model, nullcontext(), watched())
    return torch.cuda.max_memory_allocated(subject.device) - before
