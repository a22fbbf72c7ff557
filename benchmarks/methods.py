"""The methods to compare: each makes a patched clone of a ComfyUI model."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy_extras import nodes_hypertile, nodes_tomesd
from tomesd.merge import bipartite_soft_matching_random2d
from torch import Tensor

from tome_nodes.config import ToMeConfig
from tome_nodes.grid import Grid
from tome_nodes.hosts.comfyui import attach
from tome_nodes.strategies import make_strategy

Patch = Callable[[ModelPatcher], ModelPatcher]


@dataclass(frozen=True)
class CallablePlan:
    """A plan made of two functions."""

    slot_count: int
    shape: tuple[int, int]
    merge: Callable[[Tensor], Tensor]
    unmerge: Callable[[Tensor], Tensor]

    def fits(self, x: Tensor) -> bool:
        return x.shape[:2] == self.shape

    def add_change(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        return x + self.unmerge(after - before)


class TomesdStrategy:
    """The reference implementation's own functions, on our host."""

    def __init__(self, config: ToMeConfig):
        self.config = config

    def start_step(self, key: Tensor, ratio: float) -> None:
        self.generator = torch.Generator(device=key.device).manual_seed(0)

    def plan(self, features: Tensor, grid: Grid) -> CallablePlan:
        merges = int(grid.tokens * self.config.ratio)
        merge, unmerge = bipartite_soft_matching_random2d(
            features,
            grid.width,
            grid.height,
            self.config.sx,
            self.config.sy,
            merges,
            generator=self.generator,
        )
        return CallablePlan(grid.tokens - merges, features.shape[:2], merge, unmerge)


class IdealStrategy:
    """Merging at no cost: a fixed stride of the tokens stays, and one expand restores the rest."""

    def __init__(self, config: ToMeConfig):
        self.stride = round(1 / (1 - config.ratio))

    def start_step(self, key: Tensor, ratio: float) -> None:
        """Nothing is drawn."""

    def plan(self, features: Tensor, grid: Grid) -> CallablePlan:
        batch, tokens, _ = features.shape
        slots = -(-tokens // self.stride)

        def unmerge(y: Tensor) -> Tensor:
            return y[:, :, None].expand(-1, -1, self.stride, -1).flatten(1, 2)[:, :tokens]

        return CallablePlan(slots, (batch, tokens), lambda x: x[:, :: self.stride], unmerge)


def core_node(module: ModuleType, name: str, **inputs: Any) -> Patch:
    """A node of ComfyUI's own, as a method."""

    async def nodes() -> dict[str, Any]:
        extension = await module.comfy_entrypoint()
        return {node.GET_SCHEMA().node_id: node for node in await extension.get_node_list()}

    node = asyncio.run(nodes())[name]
    return lambda model: node.EXECUTE_NORMALIZED(model=model, **inputs)[0]


def ours(make_strategy: Callable[[ToMeConfig], Any] = make_strategy, **settings: Any) -> Patch:
    """Our node with these settings, or another strategy on our host."""
    return partial(attach, config=ToMeConfig(**settings), make_strategy=make_strategy)


def methods(ratio: float, max_downsample: int | str) -> dict[str, Patch]:
    """All methods by name; the ideals first, which the others' efficiency is measured by."""
    levels = {"ratio": ratio, "max_downsample": max_downsample}
    modules = {"merge_attn": True, "merge_crossattn": True, "merge_mlp": True}
    fast = {"strategy": "window", "reuse_steps": 1, **levels}
    return {
        "ideal attn": ours(IdealStrategy, **levels),
        "ideal block": ours(IdealStrategy, scope="block", **levels),
        "ideal stack": ours(IdealStrategy, scope="stack", **levels),
        "core TomePatchModel": core_node(nodes_tomesd, "TomePatchModel", ratio=ratio),
        "tomesd attn": ours(TomesdStrategy, **levels),
        "tomesd all": ours(TomesdStrategy, **levels, **modules),
        "ToDo": ours(strategy="pool", attn_tokens="k,v", **levels),
        "HyperTile": core_node(
            nodes_hypertile,
            "HyperTile",
            tile_size=256,
            swap_size=2,
            max_depth=0,
            scale_depth=False,
        ),
        "ours bipartite attn": ours(**levels),
        "ours window attn": ours(**fast),
        "ours window k,v": ours(**fast, attn_tokens="k,v"),
        "ours window all": ours(**fast, **modules),
        "ours pool attn": ours(**fast | {"strategy": "pool"}),
        "ours cluster attn": ours(**fast | {"strategy": "cluster"}),
        "ours window block": ours(**fast, scope="block"),
        "ours window stack": ours(**fast, scope="stack"),
    }


def ideal_of(name: str) -> str | None:
    """The ideal that a method of ours is measured by, None for the others."""
    if not name.startswith("ours window ") or name.endswith(("k,v", "all")):
        return None
    return f"ideal {name.rsplit(' ', 1)[1]}"
