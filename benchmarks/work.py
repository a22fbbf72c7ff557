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


def rows(name: str) -> dict[str, dict[str, float]]:
    """The shares of the work that are left, by the size of a model's pictures and the run."""
    family, sides = MODELS[name]
    with torch.device("meta"):
        network = UNetModel(**unet_of(family))
    return {f"{name}, {side}x{side}": _row(network, side // LATENT) for side in sides}


def _row(network: nn.Module, side: int) -> dict[str, float]:
    latent = Grid(side, side)
    saved = [_patched(network, preset).saved(latent) or 0.0 for preset in ("balanced", "fast")]
    balanced, fast = (1 - each if each >= LEAST_SAVED else 1.0 for each in saved)
    long, second = steps_run(20) / 20, steps_run(8, is_second=True) / 8
    return {
        "balanced": balanced,
        "fast": fast,
        "20 steps, balanced": balanced * long,
        "20 steps, fast": fast * long,
        # balanced leaves short runs to merging.
        "second pass, balanced": balanced,
        "second pass, fast": fast * second,
    }


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
