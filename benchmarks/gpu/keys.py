"""The ways to weigh merged keys, and single blocks of transformers at their real lengths."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import comfy.ops
import torch
from comfy.ldm.modules.attention import attention_pytorch
from comfy.model_patcher import ModelPatcher
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks import checks
from benchmarks.blocks import MODELS, Model, inputs
from benchmarks.gpu.record import Record, say
from benchmarks.gpu.report import times_faster
from benchmarks.gpu.tried import tried
from benchmarks.measure import Evaluations, PeakMemory, Stopwatch, merged_blocks
from benchmarks.methods import ALWAYS, HostMethod, IdealStrategy
from benchmarks.rounds import interleaved
from tome_nodes.comfyui import key_weights
from tome_nodes.comfyui.key_weights import Way
from tome_nodes.ops import Operations, operations
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of
from tools.tiny_models import TINY
from tools.transformers import build

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH

WARM, LEAST_ROUNDS, ROUNDS = 3, 3, 7


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

KINDS: Mapping[str, tuple[bool, Way | None, Sequence[SDPBackend]]] = {
    "all keys, flash": (False, None, (FLASH,)),
    "all keys, cuDNN": (False, None, (CUDNN,)),
    "unweighted, flash": (True, None, (FLASH,)),
    "unweighted, cuDNN": (True, None, (CUDNN,)),
    "channels, flash": (True, Way.CHANNELS, (FLASH,)),
    "channels, cuDNN": (True, Way.CHANNELS, (CUDNN,)),
    "mask, cuDNN": (True, Way.MASK, (CUDNN,)),
    "mask, efficient": (True, Way.MASK, (EFFICIENT,)),
    "kernel": (True, Way.KERNEL, (FLASH,)),
}
"""What is timed: whether keys merge, how they are weighed, and which of PyTorch's attentions runs.

The kernel is ours, so none of PyTorch's runs there.
"""

CHECKED = 16
"""Queries whose result is compared with float64."""

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

BLOCKS = (
    ("Wan 1.3B", "480p, 81 frames", (16, 21, 60, 104)),
    ("Z-Image", "1024x1024", (16, 128, 128)),
    ("Flux", "1024x1024", (16, 128, 128)),
    ("Wan 14B", "480p, 81 frames", (16, 21, 60, 104)),
    ("Z-Image", "2048x2048", (16, 256, 256)),
    ("Flux", "2048x2048", (16, 256, 256)),
    ("Wan 14B", "720p, 81 frames", (16, 21, 90, 160)),
    ("Wan 1.3B", "720p, 81 frames", (16, 21, 90, 160)),
)
"""Models, sizes, and latents: 4,096 to 75,600 tokens. The most important first."""

DRY_BLOCKS = (
    ("Wan 1.3B", "tiny", (16, 5, 16, 20)),
    ("Z-Image", "tiny", (16, 40, 32)),
    ("Flux", "tiny", (16, 40, 32)),
)
DRY_KINDS = {"Wan 1.3B": "wan21", "Z-Image": "z_image", "Flux": "flux"}

_WAY_SECONDS = 20.0
_BLOCK_SECONDS = 45.0


def run(record: Record) -> int:
    """Measure ways and blocks in turn, as long as there is time."""
    result = record.result
    result |= {"ways": [], "blocks": []}

    def ways(shape: Shape) -> None:
        found = record.attempt(
            f"weighing, {shape.name}", _WAY_SECONDS, partial(_ways, record, shape)
        )
        if found is not None:
            result["ways"].append(found)
            say(ways_line(found))

    def block(model: Model, size: str, latent: tuple[int, ...]) -> dict[str, Any]:
        with tried(record) as found:
            return {**_block(record, model, size, latent), "tried": found}

    shapes, blocks = (DRY_SHAPES, DRY_BLOCKS) if record.is_dry else (SHAPES, BLOCKS)
    for shape in shapes[:4]:
        ways(shape)
    for name, size, latent in blocks:
        model = next(each for each in MODELS if each.name == name)
        if record.is_dry:
            tiny = TINY[DRY_KINDS[name]]
            model = replace(model, settings=tiny.settings, text=tiny.text)
        measure = partial(block, model, size, latent)
        found = record.attempt(f"block, {name} {size}", _BLOCK_SECONDS, measure)
        if found is not None:
            result["blocks"].append(found)
            say(block_line(found))
    for shape in shapes[4:]:
        ways(shape)
    return record.finish(goals(result))


def goals(result: Mapping[str, Any]) -> dict[str, Any]:
    """Times faster with preset *balanced*, and the time lost to a way that is not the fastest."""
    found: dict[str, Any] = {"ways": len(result["ways"]), "blocks": len(result["blocks"])}
    lost = [row["lost"] for row in result["ways"] if row["lost"] is not None]
    if lost:
        found["lost"] = max(lost)
    for row in result["blocks"]:
        key = f"{row['name']}_{row['tokens']}_balanced".lower().replace(" ", "_")
        found[key] = times_faster(row, "preset balanced")
    return found


def _ways(record: Record, shape: Shape) -> dict[str, Any]:
    """Time each way that works and is right."""
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
    way: Way | None,
    ops: Operations,
    allowed: Sequence[SDPBackend],
    is_dry: bool,
) -> Tensor:
    """Attention as the host calls it, in one way, by one of PyTorch's attentions."""
    with patch.object(comfy.ops, "SDPA_BACKEND_PRIORITY", [*allowed], create=is_dry):
        if log_sizes is None:
            return attention_pytorch(q, k, v, heads)
        with patch.object(key_weights, "way_of", lambda *_: way):
            mask = log_sizes[:, None, None]
            return key_weights.weighed(
                attention_pytorch, None, log_sizes, ops, None, _no_note, q, k, v, heads, mask
            )


def _no_note(_: str | None) -> None:
    """Why keys are not weighed shows in the result."""


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
    way = key_weights.way_of("attention_pytorch", shape.channels, capable)
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


def ways_line(row: Mapping[str, Any]) -> str:
    """A shape in words: milliseconds of each way."""
    parts = [
        f"{name} {1000 * statistics.median(each['seconds']):.3f}"
        for name, each in row["kinds"].items()
        if "seconds" in each
    ]
    return f"  ms: {'; '.join(parts)}; taken: {row['taken']}, fastest: {row['fastest']}"


def block_methods() -> list[HostMethod]:
    """What merges in a block, beginning with the ideals."""

    def method(name: str, family: str, config: Mapping[str, Any], **more: Any) -> HostMethod:
        return HostMethod(name=name, family=family, config=ToMeConfig(**config), **more)

    # Weights are no part of an ideal.
    even = {"proportional_attn": False, **ALWAYS}
    ideals = {"ideal k,v": {"attn_tokens": "k,v"}, "ideal block": {"scope": "block"}}
    return [
        *(
            method(name, "ideal", given | even, ideal=name, make_strategy=IdealStrategy)
            for name, given in ideals.items()
        ),
        *(
            method(f"preset {name}", "ours", settings_of(name, {}), ideal="ideal k,v")
            for name in ("quality", "balanced")
        ),
        method("balanced 0.75", "ours", settings_of("balanced", {"ratio": 0.75})),
        method(
            "balanced on torch",
            "ours",
            settings_of("balanced", {"backend": "torch"}),
            ideal="ideal k,v",
        ),
        method(
            "whole block",
            "ours",
            {"strategy": "window", "scope": "block"},
            ideal="ideal block",
        ),
    ]


def _block(record: Record, model: Model, size: str, latent: tuple[int, ...]) -> dict[str, Any]:
    """Check and time one block of a model in each way."""
    dtype = torch.float32 if record.is_dry else torch.bfloat16
    noise, prompt = inputs(model, latent)
    subject = Evaluations(
        build(model.kind, model.settings, dtype), noise, [prompt, prompt], 1.0, "simple"
    )
    memory = PeakMemory(subject.device)
    expected, _ = subject.run(subject.model, nullcontext(), memory)
    rows: dict[str, dict[str, Any]] = {
        "unpatched": {"family": "unpatched", "ideal": None, "error": 0.0}
    }
    rows["unpatched"]["peak_bytes"] = memory.bytes
    patched: dict[str, ModelPatcher] = {"unpatched": subject.model}
    refused: dict[str, str] = {}
    for method in block_methods():
        try:
            row = _checked(method, subject, expected, dtype)
        except Exception as error:
            refused[method.name] = f"{type(error).__name__}: {error}".splitlines()[0]
            name = f"block, {model.name} {size}, {method.name}"
            record.result["failed"][name] = refused[method.name]
        else:
            rows[method.name] = row
            patched[method.name] = method.patch(subject.model)
    evaluations = 1 if record.is_dry else 2

    runs = {
        name: partial(subject.time, each, evaluations=evaluations) for name, each in patched.items()
    }
    pace = record.pace(LEAST_ROUNDS, _BLOCK_SECONDS / 2)
    for name, seconds in interleaved(runs, ROUNDS, pace).items():
        rows[name]["seconds"] = seconds
    frames = latent[1] if len(latent) == 4 else 1
    tokens = frames * (latent[-2] // 2) * (latent[-1] // 2)
    return {
        **{"name": model.name, "size": size, "tokens": tokens},
        "attention_share": model.attention_share(tokens),
        "dtype": str(dtype).removeprefix("torch."),
        "refused": refused,
        "methods": rows,
    }


def _checked(
    method: HostMethod, subject: Evaluations, expected: Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """Check the wiring of a method, and note what it merges, changes and takes of memory."""
    (lossless,) = subject.run(method.lossless(subject.model), nullcontext())
    error = checks.difference(lossless, expected)
    if not error < checks.TOLERANCES[dtype]:
        raise checks.WrongOutput(f"with lossless plans it differs by {error:.2g}")
    memory = PeakMemory(subject.device)
    with merged_blocks() as blocks:
        output, _ = subject.run(method.patch(subject.model), nullcontext(), memory)
    return {
        "family": method.family,
        "ideal": method.ideal,
        "error": checks.difference(output, expected),
        "peak_bytes": memory.bytes,
        "merged": "{}/{}".format(*blocks[0]) if blocks else "none",
    }


def block_line(row: Mapping[str, Any]) -> str:
    """A block in words: milliseconds unpatched, and times faster."""
    plain = statistics.median(row["methods"]["unpatched"]["seconds"])
    parts = [
        f"{name} {times_faster(row, name):.2f}" for name in row["methods"] if name != "unpatched"
    ]
    return f"  {row['tokens']} tokens, {1000 * plain:.2f} ms; times faster: {'; '.join(parts)}"
