"""Time model evaluations, check them first, and count what they launch."""

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from torch import Tensor

from tome_nodes.plan import Plan


class Clock:
    """Seconds of each model evaluation, taken around all other wrappers."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: list[float] = []

    def wrapper(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        start = time.perf_counter()
        result = executor(*args, **kwargs)
        self._settle()
        self.seconds.append(time.perf_counter() - start)
        return result

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Subject:
    """A model with an input of one size to evaluate it on."""

    def __init__(self, model: ModelPatcher, context_channels: int, size: int, batch: int):
        self.clock = Clock(model.load_device)
        self.model = model.clone()
        # First among the wrappers, so that what the methods add is inside.
        self.model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "benchmark", self.clock.wrapper)
        generator = torch.Generator().manual_seed(0)
        self._noise = torch.randn(batch, 4, size // 8, size // 8, generator=generator)
        self._prompts = [
            [
                [
                    torch.randn(1, 77, context_channels, generator=generator),
                    {"pooled_output": torch.randn(1, 1280, generator=generator)},
                ]
            ]
            for _ in range(2)
        ]

    def evaluate(self, patched: ModelPatcher) -> Tensor:
        """Denoise in one step, cond and uncond in one batch."""
        latent = torch.zeros_like(self._noise)
        return comfy.sample.sample(
            patched,
            self._noise,
            1,
            4.0,
            "euler",
            "normal",
            *self._prompts,
            latent,
            disable_pbar=True,
            seed=0,
        )

    def time(self, patched: ModelPatcher) -> float:
        """Seconds of one evaluation."""
        self.clock.seconds.clear()
        self.evaluate(patched)
        (seconds,) = self.clock.seconds
        return seconds


def difference(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; raises where that is no number."""
    if actual.shape != expected.shape or not actual.isfinite().all():
        raise ValueError(f"wrong output: shape {tuple(actual.shape)}, or not finite")
    return ((actual - expected).norm() / expected.norm()).item()


def interleaved(runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call all runs in turn, ``repeats`` times, so that noise falls on all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(run())
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": median(values), "low": low, "high": high}


@contextmanager
def stages(strategy_classes: list[type], device: torch.device) -> Iterator[dict[str, float]]:
    """Collect the seconds spent in matching, merge and unmerge; slows the run, so time it apart."""
    totals = {"matching": 0.0, "merge": 0.0, "unmerge": 0.0}

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            totals[stage] += time.perf_counter() - start
            return result

        return call

    changes = [(owner, "plan", "matching") for owner in strategy_classes]
    changes += [(Plan, "merge", "merge"), (Plan, "unmerge", "unmerge")]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for (owner, name, stage), (_, _, original) in zip(changes, originals, strict=True):
            setattr(owner, name, timed(stage, original))
        yield totals
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


@contextmanager
def merged_blocks() -> Iterator[list[int]]:
    """Collect from our log how many blocks each sampling run merged."""
    counts: list[int] = []
    log = logging.getLogger("tome_nodes")

    def note(record: logging.LogRecord) -> bool:
        if found := re.search(r"merged (\d+)/", record.getMessage()):
            counts.append(int(found[1]))
        return True

    level = log.level
    log.addFilter(note)
    log.setLevel(logging.INFO)
    try:
        yield counts
    finally:
        log.setLevel(level)
        log.removeFilter(note)


# Operators that only look at memory in another way.
VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "reshape", "expand", "select", "slice", "transpose", "unsqueeze", "permute"),
        *("t", "mT", "detach", "unflatten", "flatten", "split", "chunk", "squeeze", "empty"),
        *("movedim", "narrow", "alias", "expand_as", "item", "is_nonzero"),
    )
)


def launches(run: Callable[[], Any], device: torch.device) -> int:
    """Kernels that a run launches on a GPU; on a CPU, operators called but for views."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    if device.type == "cuda":
        return sum(event.device_type.name == "CUDA" for event in profiler.events())
    return sum(
        event.name.startswith("aten::") and event.name not in VIEWS and event.cpu_parent is None
        for event in profiler.events()
    )
