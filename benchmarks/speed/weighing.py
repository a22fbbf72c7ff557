"""The ways to weigh merged keys in attention, at the lengths and widths of published models."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import comfy.ops
import torch
from comfy.ldm.modules.attention import attention_pytorch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.rounds import interleaved
from benchmarks.speed import checks
from benchmarks.speed.measure import Stopwatch
from benchmarks.speed.record import Record
from tome_nodes.ops import Operations, operations
from tome_nodes.patching import key_weights
from tome_nodes.patching.key_weights import Variant

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH

WARM, ROUNDS = 3, 7


@dataclass(frozen=True)
class Shape:
    """An attention whose keys merge.

    Attributes:
        name: where it is.
        batch: number of samples.
        queries: of each.
        keys: those left of as many.
        heads: of queries and keys.
        channels: of a head.
        dtype: in which its model runs.
    """

    name: str
    batch: int
    queries: int
    keys: int
    heads: int
    channels: int
    dtype: torch.dtype


HALF, BRAIN = torch.float16, torch.bfloat16
SHAPES = (
    Shape("SDXL 1024", 2, 4096, 2048, 10, 64, HALF),
    Shape("SD 1.5 1024", 2, 16384, 8192, 8, 40, HALF),
    Shape("Flux 1024", 1, 4608, 2560, 24, 128, BRAIN),
    Shape("Wan 1.3B 480p", 1, 32760, 16380, 12, 128, BRAIN),
    Shape("SDXL 1024, second level", 2, 1024, 512, 20, 64, HALF),
    Shape("SD 1.5 512", 2, 4096, 2048, 8, 40, HALF),
    Shape("SD 1.5 1024, second level", 2, 4096, 2048, 8, 80, HALF),
    Shape("SD 1.5 1024, third level", 2, 1024, 512, 8, 160, HALF),
    Shape("SDXL 2048", 2, 16384, 8192, 10, 64, HALF),
    Shape("Z-Image 2048", 1, 16416, 8224, 30, 128, BRAIN),
    Shape("SD 1.5 2048", 2, 65536, 32768, 8, 40, HALF),
    Shape("Wan 14B 720p", 1, 75600, 37800, 40, 128, BRAIN),
)
"""The most important first."""

DRY_SHAPES = (
    Shape("heads of 40", 2, 96, 48, 2, 40, torch.float32),
    Shape("heads of 128", 1, 64, 40, 2, 128, torch.bfloat16),
)

KINDS: Mapping[str, tuple[bool, Variant | None, Sequence[SDPBackend]]] = {
    "all keys, flash": (False, None, (FLASH,)),
    "all keys, cuDNN": (False, None, (CUDNN,)),
    "unweighted, flash": (True, None, (FLASH,)),
    "unweighted, cuDNN": (True, None, (CUDNN,)),
    "channels, flash": (True, Variant.CHANNELS, (FLASH,)),
    "channels, cuDNN": (True, Variant.CHANNELS, (CUDNN,)),
    "mask, cuDNN": (True, Variant.MASK, (CUDNN,)),
    "mask, efficient": (True, Variant.MASK, (EFFICIENT,)),
    "kernel": (True, Variant.KERNEL, (FLASH,)),
}
"""What is timed: whether keys merge, how they are weighed, and which of PyTorch's attentions runs.

The kernel is ours, so none of PyTorch's runs there.
"""

CHECKED = 16
"""Queries whose result is compared with float64."""

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def measure(record: Record, shape: Shape) -> dict[str, Any]:
    """Time each way to weigh keys that works and is right."""
    ops = operations("torch" if record.is_dry else "triton")
    generator = torch.Generator(record.device).manual_seed(0)
    width = shape.heads * shape.channels

    def random(tokens: int) -> Tensor:
        x = torch.randn(shape.batch, tokens, width, generator=generator, device=record.device)
        return x.to(shape.dtype)

    q, all_keys, all_values = (random(shape.queries) for _ in range(3))
    k, v = (x[:, : shape.keys].contiguous() for x in (all_keys, all_values))
    sizes = torch.randint(1, 9, k.shape[:2], generator=generator, device=record.device)
    log_sizes = sizes.log().to(shape.dtype)
    runs: dict[str, Callable[[], Tensor]] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for name, (merges, way, allowed) in KINDS.items():
        own = (k, v) if merges else (all_keys, all_values)
        weights = None if way is None else log_sizes
        attend = partial(_attend, q, *own, shape.heads, weights, way, ops, allowed, record.is_dry)
        row = kinds[name] = {}
        try:
            out = attend()
            row["error"] = _error(out, q, *own, weights, shape.heads)
            if not row["error"] < TOLERANCES[shape.dtype]:
                raise checks.WrongOutput(f"off by {row['error']:.2g}")
        except Exception as error:
            row["refused"] = f"{type(error).__name__}: {error}".splitlines()[0]
            if isinstance(error, checks.WrongOutput):
                record.result["failed"][f"weighing, {shape.name}, {name}"] = row["refused"]
        else:
            runs[name] = attend

    def timed(attend: Callable[[], Tensor]) -> float:
        watch = Stopwatch(record.device)
        with watch:
            attend()
        return watch.seconds

    for each in runs.values():
        for _ in range(1 if record.is_dry else WARM):
            each()
    rounds = interleaved({name: partial(timed, each) for name, each in runs.items()}, ROUNDS)
    for name, seconds in rounds.items():
        kinds[name]["seconds"] = seconds
    return {
        **{"name": shape.name, "batch": shape.batch, "queries": shape.queries, "keys": shape.keys},
        **{"heads": shape.heads, "channels": shape.channels},
        "dtype": str(shape.dtype).removeprefix("torch."),
        "kinds": kinds,
        **_choice(kinds, q, shape, ops),
    }


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    log_sizes: Tensor | None,
    way: Variant | None,
    ops: Operations,
    allowed: Sequence[SDPBackend],
    is_dry: bool,
) -> Tensor:
    """Attention as the host calls it, in one way, by one of PyTorch's attentions."""
    with patch.object(comfy.ops, "SDPA_BACKEND_PRIORITY", [*allowed], create=is_dry):
        if log_sizes is None:
            return attention_pytorch(q, k, v, heads)
        with patch.object(key_weights, "variant_of", lambda *_: way):
            mask = log_sizes[:, None, None]
            # Why keys are not weighed shows in the result.
            block: Any = SimpleNamespace(ops=ops, tuner=None, note_unweighted=lambda _: None)
            return key_weights.weighed(
                block, attention_pytorch, None, log_sizes, q, k, v, heads, mask, given=mask
            )


def _error(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor | None, heads: int
) -> float:
    """Relative error of the first queries of the first sample, against float64."""
    parts = []
    # One head at a time, since double precision takes four times the memory.
    for own in zip(*(x[0].chunk(heads, 1) for x in (q[:, :CHECKED], k, v)), strict=True):
        own_q, own_k, own_v = (x.double() for x in own)
        logits = own_q @ own_k.mT * own_q.shape[-1] ** -0.5
        if log_sizes is not None:
            logits += log_sizes[0].double()
        parts.append(logits.softmax(-1) @ own_v)
    return checks.difference(out[0, :CHECKED].double(), torch.cat(parts, 1))


def _choice(
    kinds: Mapping[str, Mapping[str, Any]], q: Tensor, shape: Shape, ops: Operations
) -> dict[str, Any]:
    """Which way our code takes, which was fastest, and the share of time lost between the two."""
    capable = key_weights.capabilities(q, ops)
    way = key_weights.variant_of("attention_pytorch", shape.channels, capable)
    medians = {
        name: statistics.median(row["seconds"])
        for name, row in kinds.items()
        if KINDS[name][1] is not None and "seconds" in row
    }
    # The host asks flash first, which takes no mask; then cuDNN.
    order = ("channels, flash", "channels, cuDNN", "mask, cuDNN", "mask, efficient", "kernel")
    taken = next((name for name in order if name in medians and KINDS[name][1] is way), None)
    fastest = min(medians, key=lambda name: medians[name], default=None)
    lost = None
    if taken is not None and fastest is not None:
        lost = medians[taken] / medians[fastest] - 1
    return {"taken": taken, "fastest": fastest, "lost": lost}


def line(row: Mapping[str, Any]) -> str:
    """A shape in words: milliseconds of each way."""
    parts = [
        f"{name} {1000 * statistics.median(each['seconds']):.3f}"
        for name, each in row["kinds"].items()
        if "seconds" in each
    ]
    return f"  ms: {'; '.join(parts)}; taken: {row['taken']}, fastest: {row['fastest']}"
