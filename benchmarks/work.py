"""How much work the presets save by size, counted from the published shapes, not timed.

python3 dev.py bench --work

Writes tables and a plot of the tokens that stay to benchmarks/results/. It takes seconds.
"""

import json
from collections.abc import Sequence

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
from tome_nodes.comfyui.models.unet import UNET, deep_layers  # noqa: E402
from tome_nodes.forecasting.samplers import SAMPLERS  # noqa: E402
from tome_nodes.forecasting.steps import (  # noqa: E402
    LONG_ON_UNET,
    is_even,
    log_snrs,
    steps_that_run,
)
from tome_nodes.patching.evaluation import Observer  # noqa: E402
from tome_nodes.patching.model import LEAST_SAVED, PatchedModel  # noqa: E402
from tome_nodes.patching.work import Work  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.presets import settings_of  # noqa: E402
from tome_nodes.skipping.plan import whole_evaluations  # noqa: E402
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
RUNS = {"8 steps": 8, "12 steps": 12, "20 steps": 20}
SECOND = "second pass"
"""The runs that are counted: their numbers of steps, and a second pass of 8."""
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
        "First of one evaluation; then of whole runs under dpmpp_2m and karras, in which steps of "
        "SDXL are shallow and steps of SD 1.5 are forecast: from noise, and a second pass of 8 "
        "steps at `denoise` 0.5 whose picture is there from the start.",
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
    one = {"balanced": balanced, "fast": fast}
    if deep := deep_layers(network):
        outer = _outer_share(network, deep, latent)
        return one | {
            f"{run}, {preset}": _with_shallow(left, outer, count)
            for run, count in {**RUNS, SECOND: 8}.items()
            for preset, left in one.items()
        }
    short = [name for name, count in RUNS.items() if count < LONG_ON_UNET]
    return {
        **one,
        **{f"{run}, {preset}": left for run in short for preset, left in one.items()},
        "20 steps, balanced": balanced * steps_run(20) / 20,
        "20 steps, fast": fast * steps_run(20) / 20,
        # balanced leaves short runs to merging.
        f"{SECOND}, balanced": balanced,
        f"{SECOND}, fast": fast * steps_run(8, is_second=True) / 8,
    }


def _with_shallow(left: float, outer: float, count: int) -> float:
    """The share of the work of a run that is left, given those of a whole and a shallow step."""
    whole = len(whole_evaluations(ToMeConfig.ratio, count))
    return (left * whole + outer * (count - whole)) / count


def _outer_share(network: nn.Module, deep: Sequence[nn.Module], latent: Grid) -> float:
    """The share of an evaluation's multiplications that a shallow one has."""
    left_out = {part for layer in deep for part in layer.modules()}
    outer = [layer for layer in UNET.layers(network) if layer[1] not in left_out]
    whole = UNET.work(network, _patched(network, "fast").blocks)
    assert whole is not None
    return Work(outer, ()).of(latent) / whole.of(latent)


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
