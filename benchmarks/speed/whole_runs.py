"""Whole sampling runs of transformers of published width, in the host's sampler."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from models.comfyui import build_class

from benchmarks.rounds import interleaved
from benchmarks.speed.figures import KEYS, speed_up
from benchmarks.speed.published import Block, deepen, inputs
from benchmarks.speed.record import Record
from tome_nodes.comfyui.attachment import attach
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of

STEPS, FEWER = 8, 6
"""Of a run, and of a plain one that takes as long as the preset's."""

LEAST_ROUNDS, ROUNDS, SECONDS = 2, 5, 10.0


@dataclass(frozen=True)
class WholeRun:
    """A run of a model of some depth.

    Attributes:
        block: the model and the size.
        stack: the name of its list of blocks.
        layers: their number.
    """

    block: Block
    stack: str
    layers: int


RUNS = (
    WholeRun(Block("Z-Image", "1024x1024", (16, 128, 128)), "layers", 30),
    WholeRun(Block("Flux", "1024x1024", (16, 128, 128)), "single_blocks", 38),
    WholeRun(Block("Wan 1.3B", "480p, 81 frames", (16, 21, 60, 104)), "blocks", 10),
    WholeRun(Block("Z-Image", "2048x2048", (16, 256, 256)), "layers", 10),
    WholeRun(Block("Flux", "2048x2048", (16, 256, 256)), "single_blocks", 10),
    WholeRun(Block("Wan 14B", "480p, 81 frames", (16, 21, 60, 104)), "blocks", 4),
)
"""For a GPU, the most important first; Z-Image at its published depth."""
CPU_RUNS = (WholeRun(Block("Z-Image", "512x512", (16, 64, 64)), "layers", 2),)
QUICK_RUNS = (WholeRun(Block("Z-Image", "256x256", (16, 32, 32)), "layers", 1),)
DRY_RUNS = (WholeRun(Block("Z-Image", "tiny", (16, 40, 32), "z_image"), "layers", 3),)


def measure(record: Record, run: WholeRun) -> dict[str, Any]:
    """Seconds of a run: unpatched, under the node's defaults, with its merging, in fewer steps."""
    model = run.block.published
    dtype = torch.bfloat16 if record.device.type == "cuda" else torch.float32
    plain = deepen(build_class(model.kind, model.settings, dtype), run.stack, run.layers)
    settings = settings_of("balanced", {})
    merging = settings | {"forecast": False}
    patched = {
        "the defaults": settings,
        KEYS: merging,
        "keys 0.75": merging | {"ratio": 0.75},
    }
    ways = {
        "unpatched": (plain, STEPS),
        **{name: (attach(plain, ToMeConfig(**each)), STEPS) for name, each in patched.items()},
        f"{FEWER} steps": (plain, FEWER),
    }
    noise, prompt = inputs(model, run.block.latent)
    timed = {name: partial(_seconds, *way, noise, prompt) for name, way in ways.items()}
    # The first runs load the model, and tell whether the preset does anything.
    expected = _sampled(plain, STEPS, noise, prompt)
    for name in patched:
        if torch.equal(_sampled(*ways[name], noise, prompt), expected):
            raise RuntimeError(f"{name} did nothing")
    seconds = interleaved(timed, ROUNDS, record.pace(LEAST_ROUNDS, SECONDS))
    return {
        **{"name": run.block.model, "size": run.block.size, "steps": STEPS},
        "layers": run.layers,
        "dtype": str(dtype).removeprefix("torch."),
        "methods": {name: {"seconds": each} for name, each in seconds.items()},
    }


def line(row: Mapping[str, Any]) -> str:
    """A run in words: seconds of the unpatched one, and times faster."""
    methods = row["methods"]
    parts = [f"{name} {speed_up(row, name):.2f}" for name in methods if name != "unpatched"]
    seconds = statistics.median(methods["unpatched"]["seconds"])
    return f"  {row['steps']} steps, {seconds:.2f} s; times faster: {'; '.join(parts)}"


def _sampled(model: ModelPatcher, steps: int, noise: torch.Tensor, prompt: Any) -> torch.Tensor:
    """The latent of a run without guidance, as turbo models take it."""
    empty = torch.zeros_like(noise)
    given = noise, steps, 1.0, "euler", "simple", prompt, prompt, empty
    return comfy.sample.sample(model, *given, disable_pbar=True, seed=0)


def _seconds(model: ModelPatcher, steps: int, noise: torch.Tensor, prompt: Any) -> float:
    """How long a run takes. Its result is on the CPU, so a GPU has ended."""
    start = time.perf_counter()
    _sampled(model, steps, noise, prompt)
    return time.perf_counter() - start
