"""The cost and gain of merging keys and values in transformers, at common sizes.

First one attention with heads of 128 channels, at the lengths of pictures and videos: its time with
all keys and with merged ones, and the time of matching and merging. Then one block of each model,
as wide as published, through ComfyUI's own sampler, next to what arithmetic predicts for whole
models.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.host import use_cpu  # noqa: E402

os.environ.setdefault("KINETO_LOG_LEVEL", "5")

use_cpu()

import comfy.sample  # noqa: E402
import torch  # noqa: E402
from comfy.ldm.modules.attention import attention_pytorch  # noqa: E402

from benchmarks.blocks import MODELS, Model, inputs  # noqa: E402
from benchmarks.machine import origin  # noqa: E402
from benchmarks.measure import PeakMemory  # noqa: E402
from benchmarks.rounds import interleaved  # noqa: E402
from tome_nodes.comfyui.attachment import attach  # noqa: E402
from tome_nodes.merging.grid import Grid  # noqa: E402
from tome_nodes.merging.layout import Layout  # noqa: E402
from tome_nodes.merging.plan import Plan, plans_of_sequence  # noqa: E402
from tome_nodes.ops import operations  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.strategies import make_strategy  # noqa: E402
from tools.transformers import build  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
HEADS, CHANNELS = 2, 128
SETTINGS: Mapping[str, Any] = {"strategy": "window", "attn_tokens": "k,v", "sx": 2, "sy": 4}
RATIOS = (0.5, 0.75)
WAYS: Mapping[str, Mapping[str, Any]] = {
    **{f"keys and values {ratio}": {**SETTINGS, "ratio": ratio} for ratio in RATIOS},
    "whole block 0.5": {"strategy": "window", "scope": "block", "ratio": 0.5},
}
"""What merges in a block, and how much of it."""


@dataclass(frozen=True)
class Length:
    """The sequence of an attention: the grid of a picture or video."""

    name: str
    grid: Grid


LENGTHS = (
    Length("picture, 1024x1024", Grid(64, 64)),
    Length("picture, 2048x2048", Grid(128, 128)),
    Length("video, 832x480, 81 frames", Grid(30, 52, 21)),
    Length("picture, 4096x4096", Grid(256, 256)),
)
QUICK_LENGTHS = (Length("picture, 512x512", Grid(32, 32)), Length("video", Grid(12, 20, 9)))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="dev.py bench --transformers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short sequences, about a minute")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds")
    parser.add_argument("--name", help="of the files of results")
    names = [model.name for model in MODELS]
    parser.add_argument(
        "--models", nargs="+", choices=names, help="take only the blocks of these again"
    )
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats is not allowed to be below 1")
    name = arguments.name or ("transformers-quick" if arguments.quick else "transformers")
    taken = origin("cpu", "--transformers")
    if arguments.models:
        text = (RESULTS / f"{name}.json").read_text(encoding="utf-8")
        result: dict[str, Any] = json.loads(text)
    else:
        result = {**taken, "attention": [], "blocks": []}
        for length in QUICK_LENGTHS if arguments.quick else LENGTHS:
            row = attention(length, arguments.repeats)
            result["attention"].append(row)
            print(attention_line(row), flush=True)
            write(result, name)
    for model in MODELS:
        if arguments.models and model.name not in arguments.models:
            continue
        row = block(model, arguments.repeats, arguments.quick)
        if arguments.models:
            row["origin"] = taken
        rows = {each["name"]: each for each in result["blocks"]} | {model.name: row}
        result["blocks"] = [rows[each.name] for each in MODELS if each.name in rows]
        print(block_line(row), flush=True)
        write(result, name)
    print(summary(result))
    return 0


def attention(length: Length, repeats: int) -> dict[str, Any]:
    """Time one attention with all keys and with merged ones, and the matching and merging."""
    tokens = length.grid.tokens
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, HEADS * CHANNELS, generator=generator) for _ in range(3))
    layout = Layout.filled_by(length.grid)
    runs: dict[str, Callable[[], float]] = {"all keys": _timed(partial(_attend, q, k, v))}
    shares = {}
    for ratio in RATIOS:
        match = _matcher(layout, k, ratio)
        plan = match()
        keys, values = _merge(plan, k, v)
        sizes = plan.log_sizes()
        shares[ratio] = plan.slot_count / tokens
        runs[f"match {ratio}"] = _timed(match)
        runs[f"merge {ratio}"] = _timed(partial(_merge, plan, k, v))
        runs[f"attend {ratio}"] = _timed(partial(_attend, q, keys, values, sizes))
    for run in runs.values():
        run()
    times = {name: statistics.median(taken) for name, taken in interleaved(runs, repeats).items()}
    whole = times["all keys"]
    return {
        "name": length.name,
        "tokens": tokens,
        "seconds": whole,
        "ratios": {
            str(ratio): {
                "keys": shares[ratio],
                "attention": times[f"attend {ratio}"] / whole,
                "overhead": (times[f"match {ratio}"] + times[f"merge {ratio}"]) / whole,
                "efficiency": shares[ratio]
                * whole
                / sum(times[f"{part} {ratio}"] for part in ("match", "merge", "attend")),
            }
            for ratio in RATIOS
        },
    }


def _matcher(layout: Layout, k: torch.Tensor, ratio: float) -> Callable[[], Plan]:
    strategy = make_strategy(ToMeConfig(ratio=ratio, **SETTINGS), operations("torch"))

    def match() -> Plan:
        strategy.begin(torch.zeros((), dtype=torch.int64))
        (plan,) = plans_of_sequence(layout, k, lambda own, grid: strategy.plans(own, grid, [ratio]))
        assert plan is not None, "there is enough to merge"
        return plan

    return match


def _merge(plan: Plan, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return plan.merge_keys(k, HEADS), plan.merge_values(v)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: torch.Tensor | None = None
) -> Any:
    mask = None if sizes is None else sizes[:, None, None]
    return attention_pytorch(q, k, v, HEADS, mask=mask)


def _timed(function: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            function()
        return time.perf_counter() - start

    return run


def block(model: Model, repeats: int, quick: bool) -> dict[str, Any]:
    """Time and memory of one block of a model in each way, over those of the unpatched one.

    Memory is that in bfloat16, in which people run these models.
    """
    shape = model.latent if not quick else (*model.latent[:-2], 32, 40)
    memory = {}
    for name, each in _patched(model, torch.bfloat16).items():
        with PeakMemory(torch.device("cpu")) as meter:
            sample(each, model, shape)
        memory[name] = meter.bytes
    runs = {
        name: _timed(partial(sample, each, model, shape))
        for name, each in _patched(model, torch.float32).items()
    }
    times = {name: statistics.median(taken) for name, taken in interleaved(runs, repeats).items()}
    frames = shape[1] if len(shape) == 4 else 1
    tokens = frames * (shape[-2] // 2) * (shape[-1] // 2)
    return {
        "name": model.name,
        "tokens": tokens,
        "seconds": times["unpatched"],
        "speed_up": {name: times["unpatched"] / times[name] for name in WAYS},
        "predicted": {name: model.speed_up(tokens, way) for name, way in WAYS.items()},
        "memory": {name: memory[name] / memory["unpatched"] for name in WAYS},
        "whole_model": {
            use: {
                "tokens": count,
                "attention": model.attention_share(count),
                **{name: model.speed_up(count, way) for name, way in WAYS.items()},
            }
            for use, count in model.tokens.items()
        },
    }


def _patched(model: Model, dtype: torch.dtype) -> dict[str, Any]:
    plain = build(model.kind, model.settings, dtype)
    return {
        "unpatched": plain,
        **{name: attach(plain, ToMeConfig(min_tokens=1, **way)) for name, way in WAYS.items()},
    }


def sample(patched: Any, model: Model, shape: tuple[int, ...]) -> Any:
    """One evaluation through the host's sampler."""
    noise, prompt = inputs(model, shape)
    empty = torch.zeros_like(noise)
    return comfy.sample.sample(
        patched, noise, 1, 1.0, "euler", "simple", prompt, prompt, empty, disable_pbar=True, seed=0
    )


def attention_line(row: dict[str, Any]) -> str:
    """A row of the first table, in words."""
    parts = [
        f"{ratio}: {figures['attention']:.2f} of the time for {figures['keys']:.2f} of the keys, "
        f"matching and merging {100 * figures['overhead']:.1f} %"
        for ratio, figures in row["ratios"].items()
    ]
    return f"{row['name']} ({row['tokens']} tokens), {row['seconds']:.2f} s; " + "; ".join(parts)


def block_line(row: dict[str, Any]) -> str:
    """A row of the second table, in words."""
    parts = [
        f"{way}: {row['speed_up'][way]:.2f} times faster "
        f"({row['predicted'][way]:.2f} predicted), memory {row['memory'][way]:.2f}"
        for way in row["speed_up"]
    ]
    return f"{row['name']}, {row['tokens']} tokens, {row['seconds']:.2f} s; " + "; ".join(parts)


def summary(result: dict[str, Any]) -> str:
    """The last line: the worst case over lengths and ratios, and over blocks for memory."""
    figures = [each for row in result["attention"] for each in row["ratios"].values()]
    efficiency = min(each["efficiency"] for each in figures)
    attention = max(each["attention"] / each["keys"] for each in figures)
    memory = max(each for row in result["blocks"] for each in row["memory"].values())
    parts = [
        f"dit_efficiency={efficiency:.3f}",
        f"attention_over_share={attention:.3f}",
        f"memory={memory:.3f}",
    ]
    for tokens in (16384, 65536):
        shares = [
            each["overhead"]
            for row in result["attention"]
            if row["tokens"] == tokens
            for each in row["ratios"].values()
        ]
        if shares:
            parts.append(f"overhead_{tokens}={max(shares):.4f}")
    return "summary: " + " ".join(parts)


def write(result: dict[str, Any], name: str) -> None:
    """Write the results so far, as JSON and as tables."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# Merging in transformers",
        "",
        f"`{result['command']}`, {result['machine']['description']}, {result['date']}.",
        "",
        "One attention with two heads of 128. *Attention* is its time over that with all keys; "
        "*overhead* that of matching and merging, over the same.",
        "",
        "| sequence | tokens | ratio | keys | attention | overhead |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["attention"]:
        for ratio, each in row["ratios"].items():
            lines.append(
                f"| {row['name']} | {row['tokens']} | {ratio} | {each['keys']:.2f} | "
                f"{each['attention']:.2f} | {100 * each['overhead']:.1f} % |"
            )
    if result["blocks"]:
        lines += [
            "",
            "One block as wide as published. *Predicted* is what arithmetic allows; *memory* is "
            "the peak in bfloat16 over the unpatched one's.",
            "",
            "| model | tokens | merged | times faster | predicted | memory |",
            "|---|---|---|---|---|---|",
        ]
        for row in result["blocks"]:
            for way in row["speed_up"]:
                lines.append(
                    f"| {row['name']} | {row['tokens']} | {way} | {row['speed_up'][way]:.2f} | "
                    f"{row['predicted'][way]:.2f} | {row['memory'][way]:.2f} |"
                )
        lines += [
            f"\nTaken again: {row['name']}, with `{again['command']}`, "
            f"{again['machine']['description']}, {again['date']}."
            for row in result["blocks"]
            if (again := row.get("origin"))
        ]
        lines += [
            "",
            "Whole models, by arithmetic: the share of attention in the products of all blocks, "
            "and how many times faster an evaluation is where merging costs nothing.",
            "",
            "| model | size | tokens | attention | " + " | ".join(WAYS) + " |",
            "|---|---|---|---|" + "---|" * len(WAYS),
        ]
        for row in result["blocks"]:
            for use, each in row["whole_model"].items():
                gains = " | ".join(f"{each[way]:.2f}" for way in WAYS)
                lines.append(
                    f"| {row['name']} | {use} | {each['tokens']} | "
                    f"{100 * each['attention']:.0f} % | {gains} |"
                )
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
