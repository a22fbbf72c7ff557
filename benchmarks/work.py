"""How much work the presets save by size, counted from the published shapes, not timed.

python3 dev.py bench --work

Writes tables and a plot of the tokens that stay to benchmarks/results/. It takes seconds.
"""

import json

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from models.checkpoints import unet_of  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.speed.figures import WEBP, grid, joined  # noqa: E402
from tome_nodes.comfyui.models.unet import UNET, deep_layers  # noqa: E402
from tome_nodes.merging.evaluation import Observer  # noqa: E402
from tome_nodes.merging.model import PatchedModel  # noqa: E402
from tome_nodes.merging.work import Work  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.policy import LEAST_SAVED  # noqa: E402
from tome_nodes.settings.presets import PRESETS, settings_of  # noqa: E402
from tome_nodes.skipping.plan import whole_evaluations  # noqa: E402
from tome_nodes.strategies import strategy_class  # noqa: E402
from tome_nodes.strategies.plan import Grid  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MODELS = {
    "SD 1.5": ("sd15", (512, 768, 1024, 1536, 2048)),
    "SDXL": ("sdxl_base", (768, 1024, 1536, 2048)),
}
"""The published UNets, by the names of checkpoints, and the sides of pictures in pixels."""
RUNS = {"8 steps": 8, "12 steps": 12, "20 steps": 20}
SECOND = "second pass"
"""The runs that are counted: their numbers of steps, and a second pass of 8."""
LATENT = 8
"""Pixels along the side of a token of the latent."""


def main() -> None:
    counted = {size: row for name in MODELS for size, row in rows(name).items()}
    kept = {
        size: {run: round(left, 4) for run, left in row.items()} for size, row in counted.items()
    }
    (RESULTS / "work.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    columns = [*next(iter(counted.values()))]
    table = grid(
        ["model, size", *columns],
        [[size, *map(_left, row.values())] for size, row in counted.items()],
    )
    parts = [
        "# Counted work by size: `python3 dev.py bench --work`",
        "The share of the multiplications that is left at `ratio` 0.6: first in one evaluation, "
        "then in whole runs, in which some steps are shallow, and in a second pass of 8 steps. "
        "Attention to the text and the cost of merging are left out. Where less than "
        f"{LEAST_SAVED:.0%} would be saved, nothing merges.",
        table,
        "![Tokens that stay, by the side of the map](kept-tokens.webp)",
    ]
    (RESULTS / "work.md").write_text(joined(parts), encoding="utf-8")
    plot()
    print(table)


def rows(name: str) -> dict[str, dict[str, float]]:
    """The shares of the work that are left, by the size of a model's pictures and the run."""
    family, sides = MODELS[name]
    with torch.device("meta"):
        network = UNetModel(**unet_of(family))
    return {f"{name}, {side}x{side}": _row(network, side // LATENT) for side in sides}


def _row(network: nn.Module, side: int) -> dict[str, float]:
    latent = Grid(side, side)
    patched = {preset: _patched(network, preset) for preset in ("balanced", "fast")}
    saved = {preset: model.saved(latent) or 0.0 for preset, model in patched.items()}
    whole = {preset: 1 - each if each >= LEAST_SAVED else 1.0 for preset, each in saved.items()}
    shallow = {preset: _shallow(model, latent) for preset, model in patched.items()}
    return whole | {
        f"{run}, {preset}": _of_run(model.config, count, whole[preset], shallow[preset])
        for run, count in {**RUNS, SECOND: 8}.items()
        for preset, model in patched.items()
    }


def _of_run(config: ToMeConfig, count: int, whole: float, shallow: float) -> float:
    """The share of a run's work that is left, given the shares of a whole and a shallow step."""
    # From noise to a picture; where a run begins changes which steps are whole, not how many.
    levels = [12 * index / count - 5 for index in range(count)]
    steps = len(whole_evaluations(config.shallow_ratio, levels))
    return (whole * steps + shallow * (count - steps)) / count


def _shallow(model: PatchedModel, latent: Grid) -> float:
    """The share of an evaluation's multiplications that is left in a shallow one."""
    left_out = {part for layer in deep_layers(model.model) for part in layer.modules()}
    layers = [layer for layer in UNET.layers(model.model) if layer[1] not in left_out]
    blocks = [block for block in model.blocks if block.module not in left_out]
    outer, every = UNET.work(model.model, blocks), UNET.work(model.model, model.blocks)
    assert outer is not None and every is not None
    own = Work(layers, outer.blocks)
    merges = model.too_little(latent) is None
    saved = own.saved(model.config, latent, model.least_tokens, model.deepest(latent))
    return own.of(latent) * (1 - saved * merges) / every.of(latent)


def _left(left: float) -> str:
    return "1" if left == 1 else f"{left:.2f}"


def _patched(network: nn.Module, preset: str) -> PatchedModel:
    return PatchedModel(ToMeConfig(**settings_of(preset, {})), UNET, network, Observer())


def plot() -> None:
    """Plot the share of tokens that stays by the side of a map."""
    ratios = {0.4: "--", 0.6: "-", 0.75: ":"}
    fast = ToMeConfig(**settings_of("fast", {}))
    most = strategy_class(fast).ratio_cap(fast)
    sides = np.geomspace(32, 256, 97)
    figure, axis = plt.subplots(figsize=(10, 5))
    curves = (
        ("keys and values, balanced", PRESETS["balanced"].policy.keys, "tab:blue"),
        ("keys and values, fast", fast.policy.keys, "tab:green"),
        ("whole stacks, fast", fast.policy.stacks, "tab:orange"),
    )
    for name, growth, colour in curves:
        for ratio, line in ratios.items():
            shares = [growth.share(ratio, round(side) ** 2) for side in sides]
            kept = [1 - min(share, most) for share in shares]
            axis.plot(sides, kept, color=colour, ls=line, label=f"{name}, ratio {ratio:g}")
    axis.set_xscale("log", base=2)
    axis.set_xticks([32, 64, 128, 256], ["32x32", "64x64", "128x128", "256x256"])
    axis.set(xlabel="tokens of the map", ylabel="share that stays", ylim=(0, 0.7))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(RESULTS / "kept-tokens.webp", dpi=110, pil_kwargs=WEBP)
    plt.close(figure)


if __name__ == "__main__":
    main()
