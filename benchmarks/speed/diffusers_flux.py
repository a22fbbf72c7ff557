"""Flux of diffusers: merged keys and values, a preset and the paper's method, at one ratio.

python3 dev.py bench --diffusers [--quick]

A pipeline with random weights samples on one thread. Only the time of that thread counts, so other
processes matter little. Each method is checked first: with lossless plans, it must sample what the
plain pipeline samples. Then the methods sample in turn.
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import torch  # noqa: E402
from diffusers import (  # noqa: E402
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from models.pipelines import TransformerCase, lively, noise  # noqa: E402
from torch import Tensor  # noqa: E402

import tome_nodes  # noqa: E402
from benchmarks.lossless import lossless  # noqa: E402
from benchmarks.rounds import interleaved  # noqa: E402
from benchmarks.speed.checks import WrongOutput, difference  # noqa: E402
from benchmarks.speed.figures import grid, joined, share_of_time  # noqa: E402
from benchmarks.speed.record import Record, say  # noqa: E402
from tome_nodes.pytorch.diffusers_transformers import DiffusersTransformers  # noqa: E402
from tome_nodes.pytorch.patched_model import Attachment  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.presets import settings_of  # noqa: E402
from tome_nodes.strategies import make_strategy  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"

RATIO = 0.5
MINUTES = 15.0
"""Nothing starts after this time."""
PLAIN = "unpatched"

# From adding in another order, over a few steps.
_ROUNDING = 1e-4

_TEXT_CHANNELS = 64


def _config(preset: str, **others: Any) -> ToMeConfig:
    return ToMeConfig(**{**settings_of(preset, {"ratio": RATIO}), **others})


METHODS: Mapping[str, ToMeConfig] = {
    "keys": _config("balanced", forecast=False),
    "preset": _config("balanced"),
    "tomesd": _config("paper"),
}
LABELS = {
    "keys": "keys and values",
    "preset": "presets balanced and fast",
    "tomesd": "q,k,v as tomesd",
}
"""The methods in words."""


def attach(case: TransformerCase, config: ToMeConfig, is_lossless: bool = False) -> None:
    """Make a pipeline merge with these settings, or run the same code with lossless plans."""
    make = lossless(make_strategy) if is_lossless else make_strategy
    # A step that is forecast has no plans.
    config = replace(config, forecast=config.forecast and not is_lossless)
    host = DiffusersTransformers()
    for network, steps in host.find(case.pipeline):
        Attachment(config, host, steps, make).attach(network)


@dataclass(frozen=True)
class Size:
    """A transformer and a picture.

    Attributes:
        name: in the table.
        heads: of attention.
        axes: the channels of a head for each axis of positions.
        dtype: of the weights.
        steps: of a run.
        rounds: timed runs of each method.
    """

    name: str
    heads: int
    axes: tuple[int, int, int]
    dtype: torch.dtype
    steps: int
    rounds: int


TINY = Size("tiny", 2, (4, 4, 8), torch.float32, 12, 5)
SIZES = (TINY, Size("published width", 24, (16, 56, 56), torch.bfloat16, 4, 3))

BLOCKS = (1, 2)
"""Double ones and single ones."""
PIXELS = 512
"""Along a side of the picture; each token has 16 by 16 of them."""
TOKENS = (PIXELS // 16) ** 2
TEXT = TOKENS // 8
"""Tokens of text, as many per token of the picture as in Flux at 1024x1024."""


def pipeline(size: Size) -> TransformerCase:
    """A pipeline with random weights, which samples a picture."""
    double, single = BLOCKS
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=sum(size.axes),
        num_attention_heads=size.heads,
        joint_attention_dim=_TEXT_CHANNELS,
        pooled_projection_dim=_TEXT_CHANNELS,
        axes_dims_rope=size.axes,
    )
    made = FluxPipeline(
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=lively(transformer).to(size.dtype),
    )
    return TransformerCase(
        made,
        TOKENS,
        prompt_embeds=noise(1, TEXT, _TEXT_CHANNELS).to(size.dtype),
        pooled_prompt_embeds=noise(1, _TEXT_CHANNELS).to(size.dtype),
        height=PIXELS,
        width=PIXELS,
    )


def check() -> None:
    """Check that each method with lossless plans samples what the plain pipeline samples.

    Raises:
        WrongOutput: if one does not, or merges nothing.
    """
    case = pipeline(TINY)
    plain = case(4)
    for name, config in METHODS.items():
        for is_lossless, low, high in ((True, 0.0, _ROUNDING), (False, _ROUNDING, 1.0)):
            attach(case, config, is_lossless)
            error = difference(case(4), plain)
            tome_nodes.remove_patch(case.pipeline)
            if not low <= error < high:
                kind = "with lossless plans" if is_lossless else "from the plain pipeline"
                raise WrongOutput(f"{LABELS[name]}: off by {error:.2g} {kind}")


def measure(record: Record, size: Size) -> dict[str, Any]:
    """Seconds of a step with each method, and how much the end of the run differs."""
    case = pipeline(size)
    latents: dict[str, Tensor] = {}

    def seconds(name: str, steps: int = size.steps) -> float:
        if name in METHODS:
            attach(case, METHODS[name])
        began = time.process_time()
        latents[name] = case(steps)
        taken = (time.process_time() - began) / steps
        if name in METHODS:
            tome_nodes.remove_patch(case.pipeline)
        return taken

    names = (PLAIN, *METHODS)
    # The first run that merges also asks the transformer where its picture is.
    for name in names[:2]:
        seconds(name, 1)
    taken = interleaved(
        {name: partial(seconds, name) for name in names}, size.rounds, record.pace(2, math.inf)
    )
    return {
        "name": size.name,
        "blocks": BLOCKS,
        "channels": size.heads * sum(size.axes),
        "tokens": TOKENS,
        "text": TEXT,
        "dtype": str(size.dtype).removeprefix("torch."),
        "steps": size.steps,
        "methods": {
            name: {"seconds": each, "error": difference(latents[name], latents[PLAIN])}
            for name, each in taken.items()
        },
    }


def page(result: Mapping[str, Any]) -> list[str]:
    """The result in paragraphs."""
    machine = result["machine"]
    parts = [
        f"# Flux of diffusers: `{result['command']}`",
        f"{machine['description']}, {result['date']}; torch {machine['torch']}. Half of the "
        "picture's tokens merge. Seconds are of the thread's own time. *Time* is the time of a "
        "step relative to the unpatched pipeline in the same round: median, lowest and highest. "
        "*Change* is the relative difference of the latent at the end of the run. **The weights "
        "are random, so it says little about pictures.** In some steps, the presets do not run "
        "the model but forecast its answer.",
        f"`{result['summary']}`",
    ]
    for row in result["sizes"]:
        double, single = row["blocks"]
        rounds = len(row["methods"][PLAIN]["seconds"])
        parts += [
            f"## {row['name'].capitalize()}: {row['channels']} channels, {row['tokens']} tokens",
            f"{double} double and {single} single blocks, {row['text']} tokens of text beside, "
            f"{row['dtype']}, {row['steps']} steps, runs of each method: {rounds}.",
            grid(
                ["method", "seconds a step", "time", "lowest", "highest", "change"],
                [_row(row, name) for name in row["methods"]],
            ),
        ]
    return parts


def _row(row: Mapping[str, Any], name: str) -> list[str]:
    own = row["methods"][name]
    rounds = zip(own["seconds"], row["methods"][PLAIN]["seconds"], strict=True)
    times = [each / plain for each, plain in rounds]
    shares = (share_of_time(row, name), min(times), max(times))
    figures = [f"{each:.2f}" for each in shares]
    label = LABELS.get(name, name)
    return [label, f"{median(own['seconds']):.3g}", *figures, f"{own['error']:.3f}"]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="dev.py bench --diffusers", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="the tiny one, one round, keep nothing"
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    folder = None if quick else RESULTS
    record = Record("diffusers-flux", "bench --diffusers", folder, MINUTES, is_dry=quick)
    found: list[dict[str, Any]] = []
    record.result["sizes"] = found
    check()
    for size in SIZES[:1] if quick else SIZES:
        record.attempt(size.name, 0.0, partial(measure, record, size), found)
    code = record.finish(
        {
            f"{row['name'].split()[0]}_{name}": share_of_time(row, name)
            for row in found
            for name in METHODS
        }
    )
    parts = page(record.result)
    record.write_page(parts)
    say(joined(parts))
    return code


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
