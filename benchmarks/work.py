"""How much work the presets save by size, counted from the published shapes, not timed.

python3 dev.py bench --work

Writes a table and a plot of the tokens that stay to benchmarks/results/. It takes seconds.
"""

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from models.checkpoints import unet_of  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks import webp  # noqa: E402
from benchmarks.speed.figures import grid, joined  # noqa: E402
from tome_nodes.comfyui.models.unet import UNET  # noqa: E402
from tome_nodes.merging.plan import Grid  # noqa: E402
from tome_nodes.patching.blocks import Observer, PatchedModel  # noqa: E402
from tome_nodes.patching.evaluation import LEAST_SAVED  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.presets import settings_of  # noqa: E402
from tome_nodes.strategies import strategy_class  # noqa: E402
from tome_nodes.strategies.cells import (  # noqa: E402
    GROWTH_OF_KEYS,
    GROWTH_OF_KEYS_IN_FAST,
    GROWTH_OF_STACKS,
    share_of,
)

RESULTS = ROOT / "benchmarks" / "results"
MODELS = {
    "SD 1.5": ("sd15", (512, 768, 1024, 1536, 2048)),
    "SDXL": ("sdxl_base", (768, 1024, 1536, 2048)),
}
"""The published UNets, by the names of checkpoints, and the sides of pictures in pixels."""
LATENT = 8
"""Pixels along the side of a token of the latent."""


def main() -> None:
    """Write the table and the plot."""
    table = grid(
        ["model, size", "tokens of the levels", "balanced", "fast"],
        [row for name in MODELS for row in rows(name)],
    )
    parts = [
        "# Counted work by size: `python3 dev.py bench --work`",
        "Multiplications of one evaluation at `ratio` 0.6, unpatched: 1. Attention to the text and "
        "the cost of merging are left out. Where less than "
        f"{LEAST_SAVED:.0%} would be saved, nothing merges.",
        table,
        "![Tokens that stay, by the side of the map](kept-tokens.webp)",
    ]
    (RESULTS / "work.md").write_text(joined(parts), encoding="utf-8")
    plot()
    print(table)


def rows(name: str) -> list[list[str]]:
    """The rows of a model."""
    family, sides = MODELS[name]
    with torch.device("meta"):
        network = UNetModel(**unet_of(family))
    return [_row(f"{name}, {side}x{side}", network, side // LATENT) for side in sides]


def _row(name: str, network: nn.Module, side: int) -> list[str]:
    latent = Grid(side, side)
    balanced, fast = (_patched(network, preset) for preset in ("balanced", "fast"))
    levels = sorted({block.stack.level for block in fast.blocks})
    return [
        name,
        ", ".join(str(latent.downsampled(level).tokens) for level in levels),
        *(_left(model.saved(latent) or 0.0) for model in (balanced, fast)),
    ]


def _left(saved: float) -> str:
    return f"{1 - saved:.2f}" if saved >= LEAST_SAVED else f"1 (would be {1 - saved:.2f})"


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
        ("keys and values, balanced", GROWTH_OF_KEYS, "tab:blue"),
        ("keys and values, fast", GROWTH_OF_KEYS_IN_FAST, "tab:green"),
        ("whole stacks, fast", GROWTH_OF_STACKS, "tab:orange"),
    )
    for name, growth, colour in curves:
        for ratio, line in ratios.items():
            shares = [share_of(ratio, round(side) ** 2, growth) for side in sides]
            kept = [1 - min(share, most) for share in shares]
            axis.plot(sides, kept, color=colour, ls=line, label=f"{name}, ratio {ratio:g}")
    axis.set_xscale("log", base=2)
    axis.set_xticks([32, 64, 128, 256], ["32x32", "64x64", "128x128", "256x256"])
    axis.set(xlabel="tokens of the map", ylabel="share that stays", ylim=(0, 0.7))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    webp.save_figure(figure, RESULTS / "kept-tokens.webp", 110)
    plt.close(figure)


if __name__ == "__main__":
    main()
