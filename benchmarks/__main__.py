"""Compare the methods on real UNet shapes: a table, JSON and plots.

python3 dev.py bench [--quick] [--device cuda] [--model sd15 sdxl] [--size 512 1024]
"""

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.environment import comfyui_directory  # noqa: E402

sys.path.insert(0, str(comfyui_directory()))

from comfy.cli_args import args as host_arguments  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
CONTEXT_CHANNELS = {"sd15": 768, "sdxl": 2048}
SLOPE_SIDES = (32, 64, 128, 256)


def main() -> None:
    """Run the benchmark that the command line asks for."""
    arguments = _arguments()
    host_arguments.cpu = arguments.device == "cpu"
    host_arguments.use_pytorch_cross_attention = True

    import torch

    from benchmarks import report

    slope, matching = matching_slope(torch.device(arguments.device))
    print(f"matching, window: log-log slope {slope:.2f} from 1024 to 65536 tokens", flush=True)
    runs = []
    for model in arguments.model:
        for size in arguments.size:
            runs.append(compare(model, size, arguments))
            print(report.table(runs[-1]), flush=True)
    result = {
        "date": date.today().isoformat(),
        "machine": machine(arguments.device),
        "command": "python3 dev.py bench " + " ".join(sys.argv[1:]),
        "matching_ms": matching,
        "slope": slope,
        "runs": runs,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = f"{'quick' if arguments.quick else 'full'}-{arguments.device}"
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report.plot(result, RESULTS / f"{name}.png")
    print(report.summary(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one level of SD 1.5, a small SDXL")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", nargs="+", choices=CONTEXT_CHANNELS, default=[*CONTEXT_CHANNELS])
    parser.add_argument("--size", nargs="+", type=int, help="sides of the pictures, in pixels")
    parser.add_argument("--batch", type=int, default=1, help="pictures at once; CFG doubles them")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each method")
    arguments = parser.parse_args()
    if arguments.size is None:
        arguments.size = [384] if arguments.quick else [512, 768, 1024, 1536, 2048]
    return arguments


def machine(device: str) -> dict[str, Any]:
    """What the figures were taken on."""
    import torch

    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "system": platform.system(),
    }


def matching_slope(device: Any) -> tuple[float, dict[int, float]]:
    """How the time of window matching grows with the tokens: its log-log slope, and the times."""
    import torch

    from benchmarks.measure import interleaved
    from tome_nodes.config import ToMeConfig
    from tome_nodes.grid import Grid
    from tome_nodes.strategies import make_strategy

    strategy = make_strategy(ToMeConfig(strategy="window"))
    strategy.start_step(torch.zeros((), dtype=torch.int64, device=device), 0.5)

    def run(side: int) -> float:
        features = torch.randn(2, side * side, 320, device=device)
        strategy.plan(features, Grid(side, side))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        strategy.plan(features, Grid(side, side))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    seconds = interleaved({side: (lambda side=side: run(side)) for side in SLOPE_SIDES}, 5)
    best = {side * side: min(values) for side, values in seconds.items()}
    x, y = [math.log(tokens) for tokens in best], [math.log(value) for value in best.values()]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )
    return slope, {tokens: value * 1000 for tokens, value in best.items()}


def compare(family: str, size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All methods on one model and size; raises before timing one that gives a wrong output."""
    import comfy.sd
    import torch

    from benchmarks.measure import (
        Subject,
        difference,
        interleaved,
        launches,
        merged_blocks,
        spread,
        stages,
    )
    from benchmarks.methods import ideal_of, methods
    from tome_nodes.strategies.cells import CellStrategy
    from tools.checkpoints import write_checkpoint

    options: dict[str, Any] = {"full_width": not arguments.quick}
    if family == "sd15":
        options["levels"] = 1 if arguments.quick else 4
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "unet.ckpt", family, unet_only=True, **options)
        model = comfy.sd.load_diffusion_model(str(path))
    subject = Subject(model, CONTEXT_CHANNELS[family], size, arguments.batch)
    expected = subject.evaluate(subject.model)
    deepest = 4 if family == "sdxl" else "auto"
    patched = {
        name: patch(subject.model) for name, patch in methods(arguments.ratio, deepest).items()
    }
    errors = {name: difference(subject.evaluate(each), expected) for name, each in patched.items()}
    for name, error in errors.items():
        if error >= 1:
            raise ValueError(f"{name} gives a wrong output: it differs by {error:.2f}")
    device = model.load_device
    seconds = interleaved(
        {
            name: (lambda each=each: subject.time(each))
            for name, each in {"unpatched": subject.model, **patched}.items()
        },
        arguments.repeats,
    )
    with stages([CellStrategy], device) as split:
        split["model"] = subject.time(patched["ours window attn"])
    plain_launches = launches(lambda: subject.evaluate(subject.model), device)
    with merged_blocks() as blocks:
        subject.evaluate(patched["ours window attn"])
    rows = {
        name: {"seconds": spread(values), "error": errors.get(name, 0.0)}
        for name, values in seconds.items()
    }
    for name in rows:
        if ideal_of(name):
            more = launches(lambda name=name: subject.evaluate(patched[name]), device)
            rows[name]["launches_per_block"] = (more - plain_launches) / blocks[0]
    memory = None
    if device.type == "cuda":
        memory = {}
        for name, each in {"unpatched": subject.model, **patched}.items():
            torch.cuda.reset_peak_memory_stats(device)
            subject.evaluate(each)
            memory[name] = torch.cuda.max_memory_allocated(device)
    return {
        "model": family + (" (reduced)" if arguments.quick else ""),
        "size": size,
        "batch": 2 * arguments.batch,
        "ratio": arguments.ratio,
        "stages_window_attn": split,
        "peak_memory_bytes": memory,
        "methods": rows,
    }


if __name__ == "__main__":
    main()
