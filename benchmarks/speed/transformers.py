"""Whole sampling runs of transformers of published width, in the host's sampler."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from timeit import timeit
from typing import Any, NamedTuple

import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from models.comfyui import TINY, build_class
from torch import Tensor, nn

from benchmarks.rounds import interleaved
from benchmarks.speed.figures import Row
from benchmarks.speed.record import Record
from tome_nodes.comfyui.attachment import attach
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of

STEPS, FEWER = 8, 6
"""Steps of a run, and of a plain run that takes as long as the preset's."""

ROUNDS = (2, 5)
"""The least and the most rounds of a run."""

_ROUNDS_SECONDS = 10.0
_RUN_SECONDS = 60.0


class Model(NamedTuple):
    """A transformer of one block.

    Attributes:
        tiny: its name among the tiny models.
        stack: the name of its list of blocks.
        text: channels of the prompt.
        settings: the settings of the published model that differ from the tiny one's.
    """

    tiny: str
    stack: str
    text: int
    settings: Mapping[str, Any]


def _wan(width: int, hidden: int, heads: int) -> Model:
    """A block of Wan; ``hidden`` is the width of its feed-forward network."""
    settings = {"dim": width, "ffn_dim": hidden, "num_heads": heads, "num_layers": 1}
    return Model("wan21", "blocks", 64, {**settings, "text_dim": 64})


_Z_IMAGE = {
    "dim": 3840,
    "n_layers": 1,
    "n_refiner_layers": 0,
    "n_heads": 30,
    "n_kv_heads": 30,
    "multiple_of": 256,
    "cap_feat_dim": 64,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "time_scale": 1000.0,
}
_FLUX = {
    "vec_in_dim": 64,
    "context_in_dim": 64,
    "hidden_size": 3072,
    "mlp_ratio": 4.0,
    "num_heads": 24,
    "depth": 0,
    "depth_single_blocks": 1,
    "axes_dim": [16, 56, 56],
}
MODELS = {
    "Z-Image": Model("z_image", "layers", 64, _Z_IMAGE),
    "Flux": Model("flux", "single_blocks", 64, _FLUX),
    "Wan 14B": _wan(5120, 13824, 40),
    "Wan 1.3B": _wan(1536, 8960, 12),
    "tiny Z-Image": Model("z_image", "layers", TINY["z_image"].text, {}),
}
"""The models, in their published widths except for the last."""


@dataclass(frozen=True)
class Run:
    """A run of a model of some depth.

    Attributes:
        model: its name in :data:`MODELS`.
        size: the size of the picture or video, in words.
        latent: channels, frames if it is a video, height and width.
        layers: the number of blocks, which share their weights.
    """

    model: str
    size: str
    latent: tuple[int, ...]
    layers: int


RUNS = (
    Run("Z-Image", "1024x1024", (16, 128, 128), 30),
    Run("Flux", "1024x1024", (16, 128, 128), 38),
    Run("Wan 1.3B", "480p, 81 frames", (16, 21, 60, 104), 10),
    Run("Z-Image", "2048x2048", (16, 256, 256), 10),
    Run("Flux", "2048x2048", (16, 256, 256), 10),
    Run("Wan 14B", "480p, 81 frames", (16, 21, 60, 104), 4),
)
"""Runs on a GPU, the most important first; Z-Image has its published depth."""
DRY_RUNS = (Run("tiny Z-Image", "320x256", (16, 40, 32), 3),)


def run(record: Record, runs: Sequence[Run]) -> None:
    """Measure all runs for which there is time."""
    for case in runs:
        title = f"{case.model}, {case.size}, {case.layers} blocks, {STEPS} steps"
        record.compare(title, _RUN_SECONDS, partial(_measure, record, case))


def _measure(record: Record, case: Run) -> dict[str, Row]:
    """Seconds of a run: unpatched, with the defaults, with merging, and in fewer steps."""
    dtype = torch.bfloat16 if record.device.type == "cuda" else torch.float32
    plain = _load(MODELS[case.model], case.layers, dtype)
    settings = settings_of("balanced", {})
    merging = settings | {"forecast": False, "min_tokens": 1}
    patched = {
        "balanced": settings,
        "keys 0.6": merging,
        "keys 0.75": merging | {"ratio": 0.75},
    }
    ways = {
        "unpatched": (plain, STEPS),
        **{name: (attach(plain, ToMeConfig(**own)), STEPS) for name, own in patched.items()},
        f"{FEWER} steps": (plain, FEWER),
    }
    inputs = _inputs(MODELS[case.model], case.latent)
    runs = {name: partial(_sampled, *way, *inputs) for name, way in ways.items()}
    # The first runs load the model and show whether the preset does anything.
    expected = runs["unpatched"]()
    for name in patched:
        if torch.equal(runs[name](), expected):
            raise RuntimeError(f"{name} did nothing")
    # Results are on the CPU, so the GPU has finished.
    timed = {name: partial(timeit, run, number=1) for name, run in runs.items()}
    least, most = ROUNDS
    seconds = interleaved(timed, most, record.pace(least, _ROUNDS_SECONDS))
    return {name: {"seconds": taken} for name, taken in seconds.items()}


def _load(model: Model, layers: int, dtype: torch.dtype) -> ModelPatcher:
    """The model with random weights and this many blocks."""
    tiny = TINY[model.tiny]
    loaded = build_class(tiny.name, {**tiny.settings, **model.settings}, dtype)
    network = loaded.model.diffusion_model
    setattr(network, model.stack, _repeated(getattr(network, model.stack)[-1], layers))
    # The host would count shared weights once per block.
    loaded.size = sum(weight.nbytes for weight in loaded.model.parameters())
    return loaded


def _repeated(block: nn.Module, layers: int) -> nn.ModuleList:
    """A stack of this many blocks, which share the weights of one.

    A model of published depth is then built quickly. An evaluation does all the work of the full
    model. It reads the weights as often, and a block has 83 MB of them or more, too much for most
    caches to keep until the next block.
    """
    shared = {id(weight): weight for weight in [*block.parameters(), *block.buffers()]}
    copies = [copy.deepcopy(block, dict(shared)) for _ in range(layers - 1)]
    return nn.ModuleList([block, *copies])


def _inputs(model: Model, latent: tuple[int, ...]) -> tuple[Tensor, Any]:
    """The noise of a latent, and a prompt as the host expects it."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(1, 64, model.text, generator=generator)
    pooled = torch.randn(1, 64, generator=generator)
    prompt = [[text, {"pooled_output": pooled}]]
    return comfy.sample.prepare_noise(torch.zeros(1, *latent), 0), prompt


def _sampled(model: ModelPatcher, steps: int, noise: Tensor, prompt: Any) -> Tensor:
    """The latent of a run without guidance, as with turbo models."""
    empty = torch.zeros_like(noise)
    given = noise, steps, 1.0, "euler", "simple", prompt, prompt, empty
    return comfy.sample.sample(model, *given, disable_pbar=True, seed=0)
