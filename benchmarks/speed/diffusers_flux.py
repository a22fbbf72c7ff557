"""diffusers' own Flux: ToMA's method next to ours, at the same ratio, in one table.

python3 dev.py bench --diffusers [--quick]

A pipeline samples with random weights on one thread, whose own time counts, so that whatever else
runs on the machine matters little. Each method is checked first: with lossless plans it samples
what the plain pipeline does. Then all of them sample in turn. ToMA's method is written anew from
what is published of it (:mod:`benchmarks.speed.toma`); it is not ToMA's own code.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping
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
from benchmarks.speed.figures import grid as table  # noqa: E402
from benchmarks.speed.figures import share_of_time  # noqa: E402
from benchmarks.speed.record import Record, say  # noqa: E402
from benchmarks.speed.toma import (  # noqa: E402
    MakePlan,
    MergedBlocks,
    TilePlan,
    positions_of,
    tile_plan,
)
from tome_nodes.merging.layout import Grid  # noqa: E402
from tome_nodes.pytorch.diffusers_transformers import DiffusersTransformers  # noqa: E402
from tome_nodes.pytorch.patched_model import Attachment  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.presets import settings_of  # noqa: E402
from tome_nodes.strategies import make_strategy  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"

RATIO = 0.5
MINUTES = 15.0
"""After these, nothing begins."""
PLAIN = "unpatched"

# Of the sums of a few steps in another order.
_ROUNDING = 1e-4

_TEXT_CHANNELS = 64

Detach = Callable[[], None]
"""Removes a way to merge."""


@dataclass(frozen=True)
class Method:
    """A way to merge.

    Attributes:
        label: its name in the table.
        attach: has a pipeline merge so, or with ``True`` run the same code with lossless plans.
    """

    label: str
    attach: Callable[[TransformerCase, bool], Detach]


def _attach_ours(config: ToMeConfig, case: TransformerCase, is_lossless: bool) -> Detach:
    """Our patch with some settings."""
    make = lossless(make_strategy) if is_lossless else make_strategy
    # A step that is forecast has no plans.
    config = replace(config, forecast=config.forecast and not is_lossless)
    host = DiffusersTransformers()
    for network, steps in host.find(case.pipeline):
        Attachment(config, host, steps, make).attach(network)
    return partial(tome_nodes.remove_patch, case.pipeline)


def _attach_toma(case: TransformerCase, is_lossless: bool) -> Detach:
    """ToMA's method in all blocks."""
    side = math.isqrt(case.picture)
    make: MakePlan = Shuffled if is_lossless else partial(tile_plan, ratio=RATIO)
    blocks, steps = MergedBlocks(make), itertools.count()

    def begin(*_: Any) -> None:
        blocks.begin(next(steps), Grid(side, side))

    def run(
        forward: Callable[..., Any],
        hidden_states: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        plan = blocks.plan(hidden_states)
        merged = plan.merge(hidden_states)
        positions = tuple(positions_of(plan, each, 0) for each in image_rotary_emb)
        text, changed = forward(hidden_states=merged, image_rotary_emb=positions, **others)
        return text, hidden_states + plan.unmerge(changed - merged)

    network = case.transformer
    hook = network.register_forward_pre_hook(begin)
    modules = [*network.transformer_blocks, *network.single_transformer_blocks]
    for module in modules:
        module.forward = partial(run, module.forward)

    def detach() -> None:
        hook.remove()
        for module in modules:
            del module.forward

    return detach


class Shuffled(TilePlan):
    """A lossless plan in place of ToMA's: all tokens in another order."""

    def __init__(self, x: Tensor, grid: Grid, before: TilePlan | None):
        order = torch.randperm(grid.tokens, generator=torch.Generator().manual_seed(0))
        super().__init__(grid, (grid.height, grid.width), order[None], torch.empty(0))

    def merge(self, x: Tensor) -> Tensor:
        return x[:, self.destinations[0]]

    def unmerge(self, y: Tensor) -> Tensor:
        return y[:, self.destinations[0].argsort()]


def _ours(label: str, preset: str, **others: Any) -> Method:
    config = ToMeConfig(**{**settings_of(preset, {"ratio": RATIO}), **others})
    return Method(label, partial(_attach_ours, config))


METHODS: Mapping[str, Method] = {
    "toma": Method("ToMA's method, our code", _attach_toma),
    "keys": _ours("keys and values", "balanced", forecast=False),
    "preset": _ours("presets quality, balanced and fast", "balanced"),
    "tomesd": _ours("q,k,v as tomesd", "paper"),
}


@dataclass(frozen=True)
class Size:
    """A transformer and a picture.

    Attributes:
        name: in the table.
        heads: of attention.
        axes: the channels of a head for each axis of positions.
        blocks: double ones and single ones.
        pixels: along the side of the picture; each token has 16 by 16 of them.
        dtype: of the weights.
        steps: of a run.
        rounds: timed runs of each method.
    """

    name: str
    heads: int
    axes: tuple[int, int, int]
    blocks: tuple[int, int]
    pixels: int
    dtype: torch.dtype
    steps: int
    rounds: int

    @property
    def tokens(self) -> int:
        """Those of the picture."""
        return (self.pixels // 16) ** 2

    @property
    def text(self) -> int:
        """Those of text, as many for each of the picture as Flux has at 1024x1024."""
        return self.tokens // 8

    def case(self) -> TransformerCase:
        """A pipeline with random weights, which samples a picture."""
        double, single = self.blocks
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=double,
            num_single_layers=single,
            attention_head_dim=sum(self.axes),
            num_attention_heads=self.heads,
            joint_attention_dim=_TEXT_CHANNELS,
            pooled_projection_dim=_TEXT_CHANNELS,
            axes_dims_rope=self.axes,
        )
        pipeline = FluxPipeline(
            FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=None,
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=lively(transformer).to(self.dtype),
        )
        return TransformerCase(
            pipeline,
            self.tokens,
            prompt_embeds=noise(1, self.text, _TEXT_CHANNELS).to(self.dtype),
            pooled_prompt_embeds=noise(1, _TEXT_CHANNELS).to(self.dtype),
            height=self.pixels,
            width=self.pixels,
        )


TINY = Size("tiny", 2, (4, 4, 8), (1, 2), 512, torch.float32, 12, 5)
SIZES = (
    TINY,
    Size("published width", 24, (16, 56, 56), (1, 2), 512, torch.bfloat16, 4, 3),
)


def check() -> None:
    """Check that with lossless plans each method samples what the plain pipeline does.

    Raises:
        ValueError: one does not, or merges nothing.
    """
    case = TINY.case()
    plain = case(4)
    for method in METHODS.values():
        for is_lossless, low, high in ((True, 0.0, _ROUNDING), (False, _ROUNDING, 1.0)):
            detach = method.attach(case, is_lossless)
            error = difference(case(4), plain)
            detach()
            if not low <= error < high:
                kind = "with lossless plans" if is_lossless else "from the plain pipeline"
                raise ValueError(f"{method.label} is off by {error:.2g} {kind}")


def difference(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference divided by that of ``expected``."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def measure(record: Record, size: Size) -> dict[str, Any]:
    """Seconds of a step with each method, and by how much the end of the run differs."""
    case = size.case()
    latents: dict[str, Tensor] = {}

    def seconds(name: str, steps: int = size.steps) -> float:
        detach = METHODS[name].attach(case, False) if name != PLAIN else None
        began = time.process_time()
        latents[name] = case(steps)
        taken = (time.process_time() - began) / steps
        if detach is not None:
            detach()
        return taken

    names = (PLAIN, *METHODS)
    # The first that merges also asks the transformer where its picture is.
    for name in names[:2]:
        seconds(name, 1)
    taken = interleaved(
        {name: partial(seconds, name) for name in names}, size.rounds, record.pace(2, math.inf)
    )
    return {
        "name": size.name,
        "blocks": size.blocks,
        "channels": size.heads * sum(size.axes),
        "tokens": size.tokens,
        "text": size.text,
        "dtype": str(size.dtype).removeprefix("torch."),
        "steps": size.steps,
        "methods": {
            name: {"seconds": each, "error": difference(latents[name], latents[PLAIN])}
            for name, each in taken.items()
        },
    }


def page(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    machine = result["machine"]
    parts = [
        f"# Flux of diffusers: `{result['command']}`",
        f"{machine['description']}, {result['date']}; torch {machine['torch']}. Half of the "
        "picture's tokens merge. Seconds are those of the thread. *Time* is that of a step over "
        "the unpatched pipeline's in the same round: median, lowest and highest. *Change* is the "
        "relative difference of the latent at the end of the run. **The weights are random, so it "
        "says little of pictures.**",
        "ToMA's method is written anew from what is published of it; it is not ToMA's own code, "
        "and `benchmarks/speed/toma.py` says what had to be assumed. All blocks merge under it in "
        "all steps. The presets do not run the model in some steps, but forecast its answer.",
        f"`{result['summary']}`",
    ]
    for row in result["sizes"]:
        double, single = row["blocks"]
        rounds = len(row["methods"][PLAIN]["seconds"])
        parts += [
            f"## {row['name'].capitalize()}: {row['channels']} channels, {row['tokens']} tokens",
            f"{double} double and {single} single blocks, {row['text']} tokens of text beside, "
            f"{row['dtype']}, {row['steps']} steps, runs of each method: {rounds}.",
            table(
                ["method", "seconds a step", "time", "lowest", "highest", "change"],
                [_row(row, name) for name in row["methods"]],
            ),
        ]
    return "\n\n".join(parts) + "\n"


def _row(row: Mapping[str, Any], name: str) -> list[str]:
    label = PLAIN if name == PLAIN else METHODS[name].label
    own = row["methods"][name]
    rounds = zip(own["seconds"], row["methods"][PLAIN]["seconds"], strict=True)
    times = [each / plain for each, plain in rounds]
    shares = (share_of_time(row, name), min(times), max(times))
    figures = [f"{each:.2f}" for each in shares]
    return [label, f"{median(own['seconds']):.3g}", *figures, f"{own['error']:.3f}"]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="dev.py bench --diffusers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the tiny one, in one round")
    arguments = parser.parse_args()
    command = " ".join(["python3 dev.py bench --diffusers", *sys.argv[1:]])
    name = "diffusers-flux-quick" if arguments.quick else "diffusers-flux"
    record = Record(name, command, RESULTS, MINUTES, "cpu", arguments.quick)
    record.result["sizes"] = []
    check()
    for size in SIZES[:1] if arguments.quick else SIZES:
        found = record.attempt(size.name, 0.0, partial(measure, record, size))
        if found is not None:
            record.result["sizes"].append(found)
    code = record.finish(
        {
            f"{row['name'].split()[0]}_{name}": share_of_time(row, name)
            for row in record.result["sizes"]
            for name in METHODS
        }
    )
    text = page(record.result)
    (record.folder / f"{name}.md").write_text(text, encoding="utf-8")
    say(text)
    return code


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
