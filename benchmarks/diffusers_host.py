"""Compare unpatched, tomesd and ours on UNets of diffusers: a table and JSON.

python3 dev.py bench --host diffusers [--device cuda] [--model sd15 sdxl] [--size 512 1024]
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import tomesd
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

import tome_nodes
from benchmarks.figures import grid, speed_up
from benchmarks.machine import origin
from benchmarks.rounds import interleaved

RESULTS = Path(__file__).parent / "results"

MODELS: Mapping[str, dict[str, Any]] = {
    "sd15": {"cross_attention_dim": 768},
    "sdxl": {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (5, 10, 20),
        "transformer_layers_per_block": (1, 2, 10),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}
"""The configurations of the real models."""

PATCHES: Mapping[str, Callable[[nn.Module, float, int], Any]] = {
    # The shallowest level at which the model has attention.
    "tomesd": lambda unet, ratio, level: tomesd.apply_patch(unet, ratio, level, use_rand=False),
    "ours": lambda unet, ratio, level: tome_nodes.apply_patch(unet, ratio, level, use_rand=False),
    "ours, window": lambda unet, ratio, level: tome_nodes.apply_patch(
        unet, ratio, level, strategy="window", reuse_steps=1
    ),
    "ours, whole blocks": lambda unet, ratio, level: tome_nodes.apply_patch(
        unet, ratio, "auto", strategy="window", reuse_steps=1, scope="stack"
    ),
}
"""Functions that patch a UNet, given the ratio and the ``max_downsample`` of plain merging."""


def main() -> None:
    """Run the benchmark that the command line asks for."""
    arguments = _arguments()
    runs = []
    for model in arguments.model:
        unet = make_unet(model, torch.device(arguments.device))
        for size in arguments.size:
            runs.append(compare(model, unet, size, arguments))
            print(table(runs[-1]), flush=True)
    result = {**origin(arguments.device, "--host", "diffusers"), "runs": runs}
    result["machine"]["diffusers"] = diffusers.__version__
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"diffusers-{arguments.device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"Written to {path.relative_to(RESULTS.parents[1])}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench --host diffusers", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--size", nargs="+", type=int, default=[512, 768, 1024], help="in pixels")
    parser.add_argument("--batch", type=int, default=1, help="pictures at once; CFG doubles them")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each method")
    arguments = parser.parse_args()
    for size in arguments.size:
        if size <= 0 or size % 64:
            parser.error(f"--size {size} is not allowed: it must be a multiple of 64")
    return arguments


def make_unet(model: str, device: torch.device) -> UNet2DConditionModel:
    """A UNet with a model's shape and random weights, in float16 on a GPU.

    Transformer blocks of one shape share their weights, so that SDXL needs little memory. The work
    is the same.
    """
    with torch.device("meta"):
        unet = UNet2DConditionModel(**MODELS[model])
    first_of_shape: dict[tuple[torch.Size, ...], nn.Module] = {}
    for block in unet.modules():
        if isinstance(block, BasicTransformerBlock):
            shape = tuple(parameter.shape for parameter in block.parameters())
            first = first_of_shape.setdefault(shape, block)
            if first is block:
                block.to_empty(device=device)
            else:
                block.load_state_dict(first.state_dict(keep_vars=True), assign=True)
    for module in unet.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                module.register_parameter(
                    name, nn.Parameter(torch.empty_like(parameter, device=device))
                )
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if parameter.ndim > 1:
                deviation = parameter[0].numel() ** -0.5
                parameter.normal_(0, deviation, generator=generator)
            else:
                parameter.fill_(name.endswith("weight"))
    return unet.to(torch.float16 if device.type == "cuda" else torch.float32).eval()


def compare(
    model: str, unet: UNet2DConditionModel, size: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """All methods on one model and size.

    Raises:
        ValueError: with the settings of tomesd, our output differs from that of tomesd.
    """
    sample, inputs = _inputs(unet, size, arguments.batch)
    device = sample.device
    level = 1 if model == "sd15" else 2

    @torch.no_grad()
    def call() -> Tensor:
        return unet(sample, torch.tensor(500, device=device), **inputs).sample

    def seconds() -> float:
        _settle(device)
        start = time.perf_counter()
        call()
        _settle(device)
        return time.perf_counter() - start

    outputs = {"unpatched": call()}
    for name, patch in PATCHES.items():
        with _patched(unet, patch, arguments.ratio, level):
            outputs[name] = call()
    errors = {name: _difference(value, outputs["unpatched"]) for name, value in outputs.items()}
    apart = _difference(outputs["ours"], outputs["tomesd"])
    # In half precision, ties between similarities are broken arbitrarily.
    if sample.dtype == torch.float32 and apart > 1e-3:
        raise ValueError(f"ours differs from tomesd by {apart:.1e} on {model} at {size}")

    def patched_seconds(patch: Callable[[nn.Module, float, int], Any]) -> float:
        with _patched(unet, patch, arguments.ratio, level):
            if device.type == "cuda":
                call()
            return seconds()

    runs = {name: partial(patched_seconds, patch) for name, patch in PATCHES.items()}
    times = interleaved({"unpatched": seconds, **runs}, arguments.repeats)
    return {
        "model": model,
        "size": size,
        "batch": len(sample),
        "ratio": arguments.ratio,
        "ours_from_tomesd": apart,
        "methods": {
            name: {"seconds": values, "error": errors[name]} for name, values in times.items()
        },
    }


def table(run: Mapping[str, Any]) -> str:
    """The figures of one model and size, in Markdown."""
    title = (
        f"{run['model']} {run['size']}x{run['size']}, batch {run['batch']}, ratio {run['ratio']}"
    )
    rows = [
        [
            name,
            f"{median(row['seconds']):.3f}",
            f"{speed_up(run, name):.2f}",
            f"{row['error']:.3f}",
        ]
        for name, row in run["methods"].items()
    ]
    return f"\n{title}\n\n" + grid(["method", "seconds", "times faster", "output error"], rows)


@contextmanager
def _patched(
    unet: nn.Module, patch: Callable[[nn.Module, float, int], Any], ratio: float, level: int
) -> Iterator[None]:
    """A UNet patched with a method inside the context."""
    patch(unet, ratio, level)
    try:
        yield
    finally:
        tomesd.remove_patch(unet)
        tome_nodes.remove_patch(unet)


def _inputs(unet: UNet2DConditionModel, size: int, batch: int) -> tuple[Tensor, dict[str, Any]]:
    """The inputs of the UNet for a picture of this size, doubled for CFG."""
    device, dtype = unet.device, unet.dtype
    generator = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    inputs: dict[str, Any] = {
        "encoder_hidden_states": noise(2 * batch, 77, unet.config.cross_attention_dim)
    }
    if unet.config.addition_embed_type == "text_time":
        sides = torch.tensor([[size, size, 0, 0, size, size]], device=device)
        inputs["added_cond_kwargs"] = {
            "text_embeds": noise(2 * batch, 1280),
            "time_ids": sides.repeat(2 * batch, 1).to(dtype),
        }
    return noise(2 * batch, 4, size // 8, size // 8), inputs


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference divided by that of ``expected``; raises if it is not finite."""
    if not actual.isfinite().all():
        raise ValueError("wrong output: not finite")
    return ((actual - expected).float().norm() / expected.float().norm()).item()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
