"""How the cost of matching grows with the number of tokens."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.measure import Stopwatch
from benchmarks.rounds import interleaved
from tome_nodes.merging.grid import Grid
from tome_nodes.patching.engine import make_engine
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy

SIDES = (32, 64, 128, 256)
"""Sides of the maps, in tokens: 1,024 to 65,536 of them."""

CHANNELS = 320
REPEATS = 5


@torch.no_grad()
def matching_seconds(device: torch.device) -> dict[str, dict[int, float]]:
    """Seconds of matching, a merge and an unmerge by number of tokens, the best of several runs.

    Matching is that of the strategies whose cost should not grow with the square of the tokens. The
    merge and unmerge use the window strategy's plan. Two samples in single precision.
    """
    sizes = {side: torch.randn(2, side * side, CHANNELS, device=device) for side in SIDES}
    key = torch.zeros((), dtype=torch.int64, device=device)

    def timed(function: Callable[..., Any], *arguments: Any) -> float:
        function(*arguments)
        watch = Stopwatch(device)
        with watch:
            function(*arguments)
        return watch.seconds

    runs = {}
    for side, features in sizes.items():
        grid = Grid(side, side)
        for name in ("window", "cluster"):
            config = ToMeConfig(strategy=name)
            strategy = make_engine(config, make_strategy, device, features.dtype).strategy
            strategy.begin(key)
            runs[name, side] = partial(timed, strategy.plan, features, grid, 0.5)
            if name == "window":
                plan = strategy.plan(features, grid, 0.5)
                assert plan is not None, "half of any of these maps merges"
                runs["merge", side] = partial(timed, plan.merge, features)
                runs["unmerge", side] = partial(timed, plan.unmerge, plan.merge(features))
    best: dict[str, dict[int, float]] = {}
    for (name, side), seconds in interleaved(runs, REPEATS).items():
        best.setdefault(name, {})[side * side] = min(seconds)
    return best


def log_log_slope(points: Mapping[int, float]) -> float:
    """Slope of the least-squares line through the logarithms: 1 is linear, 2 quadratic growth."""
    x = [math.log(each) for each in points]
    y = [math.log(each) for each in points.values()]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    rise = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return rise / sum((a - mean_x) ** 2 for a in x)
