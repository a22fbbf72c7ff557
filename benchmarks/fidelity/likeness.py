"""How alike neighbouring tokens of a judge are, and their keys, by noise level and block.

    python -m benchmarks.fidelity.likeness [--pictures 2]

The likeness is the cosine of tokens side by side, minus that of tokens far apart, over one minus
the latter: 0 is no more alike than any two tokens, 1 is the same.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.host import use_cpu

if __name__ == "__main__":
    use_cpu()

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fidelity import latents, scene_transformer, scenes
from benchmarks.speed.figures import grid

LEVELS = (0.9, 0.6, 0.3, 0.05)
"""The noise levels."""


def main() -> None:
    """Print the table for scenes of the held-out captions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=2)
    arguments = parser.parse_args()
    model = scene_transformer.trained().requires_grad_(False)
    first = scene_transformer.HELD_OUT
    seeds = range(first, first + arguments.pictures)
    made, prompts = scenes.scenes(seeds, scene_transformer.SIDE)
    print(table(model, latents.encode(made), prompts))


def table(model: nn.Module, latent: Tensor, prompts: Tensor) -> str:
    """The likeness in some blocks at each noise level, and that of the noisy latents themselves."""
    rows: dict[str, list[str]] = {}
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(latent.shape, generator=generator)
    for level in LEVELS:
        noisy = (1 - level) * latent + level * noise
        patches = F.pixel_unshuffle(noisy, scene_transformer.PATCH).permute(0, 2, 3, 1)
        rows.setdefault("latent", []).append(f"{likeness(patches):.2f}")
        for name, tokens in features(model, noisy, level, prompts).items():
            rows.setdefault(name, []).append(f"{likeness(tokens):.2f}")
    head = ["noise level", *(f"{level:g}" for level in LEVELS)]
    return grid(head, [[name, *cells] for name, cells in rows.items()])


def features(model: Any, noisy: Tensor, level: float, prompts: Tensor) -> Mapping[str, Tensor]:
    """Tokens and keys of the single-stream blocks, ``[batch, rows, columns, channels]`` by name."""
    side = noisy.shape[-1] // scene_transformer.PATCH
    found: dict[str, Tensor] = {}

    def keep(name: str, picked: int, _module: nn.Module, inputs: Any, outputs: Any = None) -> None:
        values = (inputs if outputs is None else outputs)[picked]
        if values.ndim == 4:
            values = values.transpose(1, 2).flatten(2)
        found[name] = values[:, prompts.shape[1] :].unflatten(1, (side, side)).clone()

    handles = []
    for index in range(0, len(model.single_blocks), 2):
        block = model.single_blocks[index]
        take = partial(keep, f"tokens of block {index + 1}", 0)
        handles.append(block.register_forward_pre_hook(take))
        take = partial(keep, f"keys of block {index + 1}", 1)
        handles.append(block.norm.register_forward_hook(take))
    try:
        model(noisy, torch.full((len(noisy),), level), prompts)
    finally:
        for handle in handles:
            handle.remove()
    return found


def likeness(tokens: Tensor) -> float:
    """How alike neighbours are in ``[batch, rows, columns, channels]``; see the module."""
    units = F.normalize(tokens, dim=-1)

    def apart(rows: int, columns: int) -> float:
        moved = units.roll((rows, columns), (1, 2))[:, rows:, columns:]
        return (moved * units[:, rows:, columns:]).sum(-1).mean().item()

    near = (apart(0, 1) + apart(1, 0)) / 2
    far = apart(tokens.shape[1] // 2, tokens.shape[2] // 2)
    return (near - far) / (1 - far)


if __name__ == "__main__":
    main()
