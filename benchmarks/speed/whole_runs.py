"""Whole sampling runs of transformers of published width, in the host's sampler."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from models.comfyui import TINY, build_class

from benchmarks.rounds import interleaved
from benchmarks.speed.figures import speed_up
from benchmarks.speed.published import MODELS, inputs
from benchmarks.speed.record import Record
from tome_nodes.comfyui.attachment import attach
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of

LEAST_ROUNDS, ROUNDS, SECONDS = 2, 5, 60.0


@dataclass(frozen=True)
class WholeRun:
    """A run of a model with few layers.

    Attributes:
        model: its name in :data:`benchmarks.speed.published.MODELS`.
        size: that of the picture or video, in words.
        latent: channels, frames if it is a video, height and width.
        layers: the settings that say how many.
        steps: of the run.
        fewer: the steps of a plain run that takes as long as the preset's.
        tiny: name of the tiny model that takes its place, if one does.
    """

    model: str
    size: str
    latent: tuple[int, ...]
    layers: Mapping[str, int]
    steps: int
    fewer: int
    tiny: str | None = None


RUNS = (
    WholeRun("Z-Image", "1024x1024", (16, 128, 128), {"n_layers": 4}, 8, 6),
    WholeRun("Wan 1.3B", "480p, 81 frames", (16, 21, 60, 104), {"num_layers": 2}, 8, 6),
)
"""For a GPU."""
CPU_RUNS = (WholeRun("Z-Image", "512x512", (16, 64, 64), {"n_layers": 2}, 8, 6),)
QUICK_RUNS = (WholeRun("Z-Image", "256x256", (16, 32, 32), {"n_layers": 1}, 8, 6),)
DRY_RUNS = (WholeRun("Z-Image", "tiny", (16, 40, 32), {}, 8, 6, "z_image"),)


def measure(record: Record, run: WholeRun) -> dict[str, Any]:
    """Seconds of a run: unpatched, under the node's defaults, and in fewer steps."""
    model = next(each for each in MODELS if each.name == run.model)
    if run.tiny is not None:
        tiny = TINY[run.tiny]
        model = replace(model, settings=tiny.settings, text=tiny.text)
    dtype = torch.bfloat16 if record.device.type == "cuda" else torch.float32
    plain = build_class(model.kind, {**model.settings, **run.layers}, dtype)
    defaults = attach(plain, ToMeConfig(**settings_of("balanced", {})))
    ways = {
        "unpatched": (plain, run.steps),
        "the defaults": (defaults, run.steps),
        f"{run.fewer} steps": (plain, run.fewer),
    }
    noise, prompt = inputs(model, run.latent)
    timed = {name: partial(_seconds, *way, noise, prompt) for name, way in ways.items()}
    # The first run loads the model, and tells whether the preset does anything.
    answers = {name: _sampled(*way, noise, prompt) for name, way in ways.items()}
    if torch.equal(answers["unpatched"], answers["the defaults"]):
        raise RuntimeError("the defaults did nothing")
    seconds = interleaved(timed, ROUNDS, record.pace(LEAST_ROUNDS, SECONDS))
    return {
        **{"name": run.model, "size": run.size, "layers": dict(run.layers), "steps": run.steps},
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
