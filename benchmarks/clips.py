"""How much merged keys and values change the attention of a video, and how much it flickers.

Clips are made from photos by panning and zooming. One attention with random weights runs on them
with all keys and with merged ones. It is scaled to spread about as widely as in a trained model.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.machine import origin  # noqa: E402
from benchmarks.photos import photo  # noqa: E402
from tome_nodes.merging.grid import Grid  # noqa: E402
from tome_nodes.merging.layout import Layout  # noqa: E402
from tome_nodes.merging.plan import plans_of_sequence  # noqa: E402
from tome_nodes.merging.random_picks import step_key  # noqa: E402
from tome_nodes.ops import operations  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.strategies import make_strategy  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
CLIPS = ("astronaut", "coffee", "china")
GRID = Grid(20, 28, 13)
HEADS, CHANNELS = 4, 64
NOISE_LEVELS = (0.0, 0.5)
KEYS_IN_USE = 0.1

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "cells of 2x2 within frames": {"st": 1},
    "cells of 2 in 2 frames": {"st": 2},
    "cells of 2 in 4 frames (st=0)": {},
    "cells of 2 in 6 frames": {"st": 6},
    "cells of 4 in 2 frames": {"st": 2, "sx": 4, "sy": 4},
    "cells of 4 in 4 frames": {"sx": 4, "sy": 4},
    "pooled within frames": {"strategy": "pool"},
}
RATIOS = (0.5, 0.75)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="dev.py bench --clips", description=__doc__)
    parser.add_argument("--name", default="clips", help="of the files of results")
    arguments = parser.parse_args()
    rows = []
    with torch.inference_mode():
        for noise in NOISE_LEVELS:
            attentions = [Attention(name, noise) for name in CLIPS]
            for variant, settings in VARIANTS.items():
                for ratio in RATIOS:
                    if settings.get("strategy") == "pool" and ratio != RATIOS[-1]:
                        continue
                    rows.append(row(attentions, variant, settings, ratio, noise))
                    print(rows[-1], flush=True)
    write({**origin("cpu", "--clips"), "rows": rows}, arguments.name)
    return 0


class Attention:
    """One attention over a clip."""

    def __init__(self, name: str, noise: float):
        generator = torch.Generator().manual_seed(0)

        def matrix(inputs: int) -> Tensor:
            return torch.randn(inputs, HEADS * CHANNELS, generator=generator) / math.sqrt(inputs)

        x = features(name, noise, generator)
        self.q, self.k, self.v = (x @ matrix(x.shape[2]) for _ in range(3))
        self.q = self.q * self._sharpness()
        self.expected = self._attend(self.k, self.v)

    def errors(self, settings: Mapping[str, Any], ratio: float) -> tuple[float, float, float]:
        """The share of keys left, the error of the frames, and the error of their differences."""
        config = ToMeConfig(**{"strategy": "window", "ratio": ratio, **settings})
        strategy = make_strategy(config, operations("torch"))
        strategy.begin(torch.tensor(step_key(0, 0)))
        (plan,) = plans_of_sequence(
            Layout.filled_by(GRID), self.k, lambda own, grid: strategy.plans(own, grid, [ratio])
        )
        assert plan is not None, "there is enough to merge"
        keys, values = plan.merge_keys(self.k, HEADS), plan.merge_values(self.v)
        actual = self._attend(keys, values, plan.log_sizes())
        return (
            plan.slot_count / GRID.tokens,
            relative(actual, self.expected),
            relative(differences(actual), differences(self.expected)),
        )

    def _attend(self, k: Tensor, v: Tensor, log_sizes: Tensor | None = None) -> Tensor:
        q, k, v = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (self.q, k, v))
        mask = None if log_sizes is None else log_sizes[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    def _sharpness(self) -> float:
        """The scale of the queries at which attention spreads over a tenth of the keys."""
        q, k = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k))
        q = q[:, :, ::64]
        low, high = 0.1, 30.0
        for _ in range(10):
            middle = math.sqrt(low * high)
            logs = torch.log_softmax(middle * q @ k.mT / math.sqrt(CHANNELS), 3)
            in_use = (-(logs.exp() * logs).sum(3)).exp().mean().item() / k.shape[2]
            low, high = (middle, high) if in_use > KEYS_IN_USE else (low, middle)
        return math.sqrt(low * high)


def clip(name: str) -> Tensor:
    """``[frames, 3, height, width]`` from panning and zooming into a photo."""
    pixels = photo(name, 3 * GRID.height)
    height, width = pixels.shape[1:]
    frames = []
    for index in range(GRID.frames):
        along = index / (GRID.frames - 1)
        size = 1 - 0.25 * along
        high, wide = 2.2 * GRID.height * size, 2.2 * GRID.width * size
        top, left = along * (height - high), (1 - along) * max(0.0, width - wide)
        part = pixels[:, round(top) : round(top + high), round(left) : round(left + wide)]
        frames.append(
            F.interpolate(part[None], (GRID.height, GRID.width), mode="bicubic", antialias=True)[0]
        )
    return torch.stack(frames)


def features(name: str, noise: float, generator: torch.Generator) -> Tensor:
    """``[1, tokens, channels]`` in place of what enters a block: a clip, filtered twice."""
    wide = 128

    def filters(inputs: int) -> Tensor:
        """Random filters with correlated taps, like trained ones."""
        weights = torch.randn(wide, inputs, 1, 1, generator=generator)
        return weights * (1 + torch.randn(wide, inputs, 3, 3, generator=generator))

    pixels = clip(name)
    latent = (pixels - pixels.mean((0, 2, 3), keepdim=True)) / pixels.std()
    latent = latent + noise * torch.randn(latent.shape, generator=generator)
    first = F.conv2d(latent / math.sqrt(1 + noise**2), filters(3), padding=1)
    first = first / first.std()
    second = F.conv2d(F.silu(first), filters(wide), padding=1)
    mixed = first + second / second.std()
    return F.layer_norm(mixed.permute(0, 2, 3, 1).reshape(1, GRID.tokens, wide), (wide,))


def differences(x: Tensor) -> Tensor:
    """The change from each frame to the next."""
    return x.unflatten(1, (GRID.frames, -1)).diff(dim=1)


def relative(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of ``expected``."""
    return ((actual - expected).norm() / expected.norm()).item()


def row(
    attentions: list[Attention],
    variant: str,
    settings: Mapping[str, Any],
    ratio: float,
    noise: float,
) -> dict[str, Any]:
    """The means over the clips."""
    figures = [each.errors(settings, ratio) for each in attentions]
    keys, error, changes = (sum(each) / len(figures) for each in zip(*figures, strict=True))
    return {
        "variant": variant,
        "ratio": ratio,
        "noise": noise,
        "keys": keys,
        "error": error,
        "flicker": changes / error,
        "changes": changes,
    }


def write(result: dict[str, Any], name: str) -> None:
    """Write the results, as JSON and as a table."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# Merged keys and values in video",
        "",
        f"`{result['command']}`, {result['machine']['description']}, {result['date']}.",
        "",
        f"Clips of {GRID.frames} frames of {GRID.width}x{GRID.height} tokens. *Error* is that of "
        "the attention's output; *flicker* the error of the differences between frames, over it.",
        "",
        "| cells | ratio | noise | keys left | error | flicker |",
        "|---|---|---|---|---|---|",
    ]
    for each in result["rows"]:
        lines.append(
            f"| {each['variant']} | {each['ratio']} | {each['noise']} | {each['keys']:.2f} | "
            f"{each['error']:.3f} | {each['flicker']:.2f} |"
        )
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
