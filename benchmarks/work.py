"""How much work the presets save by size, counted from the published shapes, not timed.

python3 dev.py bench --work

Writes a table and a plot of the tokens that stay to benchmarks/results/. It takes seconds.
"""

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from comfy.k_diffusion.sampling import get_sigmas_karras  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from models.checkpoints import unet_of  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.speed.figures import WEBP, grid, joined  # noqa: E402
from tome_nodes.comfyui.models.unet import UNET  # noqa: E402
from tome_nodes.forecasting.samplers import SAMPLERS  # noqa: E402
from tome_nodes.forecasting.steps import is_even, log_snrs, steps_that_run  # noqa: E402
from tome_nodes.patching.evaluation import Observer  # noqa: E402
from tome_nodes.patching.model import LEAST_SAVED, PatchedModel  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.presets import settings_of  # noqa: E402
from tome_nodes.strategies import strategy_class  # noqa: E402
from tome_nodes.strategies.cells import (  # noqa: E402
    GROWTH_OF_KEYS,
    GROWTH_OF_KEYS_IN_FAST,
    GROWTH_OF_STACKS,
    share_of,
)
from tome_nodes.strategies.plan import Grid  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MODELS = {
    "SD 1.5": ("sd15", (512, 768, 1024, 1536, 2048)),
    "SDXL": ("sdxl_base", (768, 1024, 1536, 2048)),
}
"""The published UNets, by the names of checkpoints, and the sides of pictures in pixels."""
LATENT = 8
"""Pixels along the side of a token of the latent."""
LEAST_NOISE, MOST_NOISE = 0.0292, 14.6146
"""The noise levels of both models."""


def main() -> None:
    table = grid(
        [
            *("model, size", "tokens of the levels", "balanced", "fast"),
            *("20 steps, balanced", "20 steps, fast", "second pass, balanced", "second pass, fast"),
        ],
        [row for name in MODELS for row in rows(name)],
    )
    parts = [
        "# Counted work by size: `python3 dev.py bench --work`",
        "Multiplications at `ratio` 0.6, unpatched: 1. Attention to the text and the cost of "
        f"merging are left out. Where less than {LEAST_SAVED:.0%} would be saved, nothing merges. "
        "First of "
        "one evaluation; then of whole runs under dpmpp_2m and karras, which forecast some steps: "
        "20 steps from noise, and a second pass of 8 steps at `denoise` 0.5 whose "
        "picture is there from the start.",
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
    saved = [model.saved(latent) or 0.0 for model in (balanced, fast)]
    left = [1 - each if each >= LEAST_SAVED else 1.0 for each in saved]
    long, second = steps_run(20), steps_run(8, is_second=True)
    return [
        name,
        ", ".join(str(latent.downsampled(level).tokens) for level in levels),
        *map(_left, saved),
        *(f"{each * long / 20:.2f}" for each in left),
        # balanced leaves short runs to merging.
        f"{left[0]:.2f}",
        f"{left[1] * second / 8:.2f}",
    ]


def steps_run(count: int, is_second: bool = False) -> int:
    """How many steps of a run the model runs, under dpmpp_2m and karras.

    Args:
        count: the number of steps.
        is_second: whether it is a second pass, which takes the last of twice as many steps.
    """
    all_noises = get_sigmas_karras(count * (1 + is_second), LEAST_NOISE, MOST_NOISE)
    levels = log_snrs(all_noises.tolist()[-count - 1 : -1], is_flow=False)
    faster = SAMPLERS["dpmpp_2m"].faster
    running = steps_that_run(ToMeConfig.ratio, count, is_second, is_unet=True)
    uneven = {index for index in range(count) if not is_even(levels, index, faster, True)}
    return len(running | uneven)


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
    figure.savefig(RESULTS / "kept-tokens.webp", dpi=110, pil_kwargs=WEBP)
    plt.close(figure)


if __name__ == "__main__":
    main()
