"""The methods to compare: each makes a patched clone of a ComfyUI model."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
from tome_nodes.ops import reference
from tome_nodes.plan import Plan
from tome_nodes.strategies import AnyPlan, Strategy, make_strategy

Wrap = Callable[[Strategy], Strategy]

ALWAYS: dict[str, Any] = {"min_tokens": 1}
"""Settings with which maps of any size are merged."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Something to measure.

    Attributes:
        name: as tables show it.
        family: ``ideal``, ``peer`` or ``ours``.
        ideal: name of the ideal that runs the same modules on merged tokens; None where none does.
        headline: whether to measure it where there is little time.
    """

    name: str
    family: str
    ideal: str | None = None
    headline: bool = False

    def patch(self, model: ModelPatcher) -> ModelPatcher:
        """A clone that runs this method."""
        raise NotImplementedError

    def lossless(self, model: ModelPatcher) -> ModelPatcher:
        """A clone that runs this method's code and must not change what the model computes."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class HostMethod(Method):
    """A strategy on our host."""

    config: ToMeConfig
    make_strategy: Callable[[ToMeConfig], Strategy] = make_strategy

    def patch(self, model: ModelPatcher, wrap: Wrap | None = None) -> ModelPatcher:
        """``wrap`` puts something around the strategy."""
        return self._attach(model, self.config, wrap or (lambda strategy: strategy))

    def lossless(self, model: ModelPatcher) -> ModelPatcher:
        return self._attach(model, replace(self.config, **ALWAYS), LosslessStrategy)

    def always(self) -> "HostMethod":
        """The same on maps of any size."""
        return replace(self, config=replace(self.config, **ALWAYS))

    def _attach(self, model: ModelPatcher, config: ToMeConfig, wrap: Wrap) -> ModelPatcher:
        return attach(model, config, lambda config: wrap(self.make_strategy(config)))


@dataclass(frozen=True, kw_only=True)
class NodeMethod(Method):
    """A node of ComfyUI's own."""

    module: ModuleType
    inputs: dict[str, Any]
    lossless_inputs: dict[str, Any] = field(default_factory=dict)

    def patch(self, model: ModelPatcher) -> ModelPatcher:
        return self._execute(model, self.inputs)

    def lossless(self, model: ModelPatcher) -> ModelPatcher:
        return self._execute(model, self.inputs | self.lossless_inputs)

    def _execute(self, model: ModelPatcher, inputs: dict[str, Any]) -> ModelPatcher:
        async def nodes() -> list[Any]:
            return await (await self.module.comfy_entrypoint()).get_node_list()

        (node,) = asyncio.run(nodes())
        return node.EXECUTE_NORMALIZED(model=model, **inputs)[0]


@dataclass(frozen=True)
class CallablePlan:
    """A plan made of two functions."""

    slot_count: int
    shape: tuple[int, ...]
    merge: Callable[[Tensor], Tensor]
    unmerge: Callable[[Tensor], Tensor]
    log_sizes: None = None

    def merge_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (self.merge(x),) * 3

    def fits(self, x: Tensor) -> bool:
        return x.shape[:2] == self.shape

    def add_change(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        return x + self.unmerge(after - before)


class TomesdStrategy:
    """The reference implementation's own functions, on our host."""

    def __init__(self, config: ToMeConfig):
        self.config = config
        self.generator: torch.Generator | None = None

    def start_step(self, key: Tensor, ratio: float) -> None:
        if self.generator is None:
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


class LosslessStrategy:
    """Merges where another strategy does, by a plan that loses nothing: the tokens are shuffled."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy

    def start_step(self, key: Tensor, ratio: float) -> None:
        self.strategy.start_step(key, ratio)

    def plan(self, features: Tensor, grid: Grid) -> Plan | None:
        return self._shuffle(self.strategy.plan(features, grid), features, grid)

    def plans(self, features: Tensor, grid: Grid) -> tuple[Plan | None, Plan | None]:
        plan, keys_plan = self.strategy.plans(features, grid)
        return self._shuffle(plan, features, grid), self._shuffle(keys_plan, features, grid)

    def _shuffle(self, plan: AnyPlan | None, features: Tensor, grid: Grid) -> Plan | None:
        if plan is None:
            return None
        generator = torch.Generator().manual_seed(grid.tokens)
        order = torch.stack([torch.randperm(grid.tokens, generator=generator) for _ in features])
        ops = getattr(self.strategy, "ops", reference)
        return Plan.from_slots(order.to(features.device), grid.tokens, ops)


def backend_variants(device: torch.device) -> dict[str, dict[str, Any]]:
    """The backends to compare, as ``variants`` of :func:`methods`; on a CPU there is but one."""
    if device.type == "cpu":
        return {"": {}}
    return {"": {"backend": "triton"}, " on torch": {"backend": "torch"}}


def methods(
    ratio: float,
    max_downsample: int | str,
    variants: Mapping[str, Mapping[str, Any]] = {"": {}},
) -> list[Method]:
    """All methods; the ideals first, by which the others' efficiency is measured.

    Args:
        ratio: share of the tokens to merge, in every method that has such a setting.
        max_downsample: the levels at which all but the nodes of ComfyUI's own merge.
        variants: further settings in which to measure each scope of ours, by what to add to its
            name.
    """
    levels: dict[str, Any] = {"ratio": ratio, "max_downsample": max_downsample}
    every_module = {"merge_attn": True, "merge_crossattn": True, "merge_mlp": True}
    fast = {"strategy": "window", "reuse_steps": 1, **levels}
    scopes: dict[str, dict[str, Any]] = {
        "attn": {},
        "all": every_module,
        "block": {"scope": "block"},
        "stack": {"scope": "stack"},
    }

    def on_host(name: str, family: str, config: dict[str, Any], **details: Any) -> HostMethod:
        return HostMethod(name=name, family=family, config=ToMeConfig(**config), **details)

    ideals = [
        on_host(
            f"ideal {scope}",
            "ideal",
            levels | ALWAYS | settings,
            make_strategy=IdealStrategy,
            ideal=f"ideal {scope}",
            headline=scope != "all",
        )
        for scope, settings in scopes.items()
    ]
    peers = [
        NodeMethod(
            name="core TomePatchModel",
            family="peer",
            headline=True,
            module=nodes_tomesd,
            inputs={"ratio": ratio},
            lossless_inputs={"ratio": 0.0},
        ),
        *(
            on_host(
                f"tomesd {scope}",
                "peer",
                levels | ALWAYS | scopes[scope],
                make_strategy=TomesdStrategy,
                ideal=f"ideal {scope}",
                headline=True,
            )
            for scope in ("attn", "all")
        ),
        on_host("ToDo", "peer", {"strategy": "pool", "attn_tokens": "k,v", **levels, **ALWAYS}),
        NodeMethod(
            name="HyperTile",
            family="peer",
            module=nodes_hypertile,
            inputs={"tile_size": 256, "swap_size": 2, "max_depth": 0, "scale_depth": False},
            lossless_inputs={"tile_size": 2048},
        ),
    ]
    own = [
        on_host(
            f"ours window {scope}{suffix}",
            "ours",
            fast | settings | dict(variant),
            ideal=f"ideal {scope}",
            headline=scope != "all" and not suffix,
        )
        for suffix, variant in variants.items()
        for scope, settings in scopes.items()
    ]
    others = [
        on_host("ours bipartite attn", "ours", levels, ideal="ideal attn"),
        on_host("ours window k,v", "ours", fast | {"attn_tokens": "k,v"}),
        on_host("ours pool attn", "ours", fast | {"strategy": "pool"}),
        on_host("ours cluster attn", "ours", fast | {"strategy": "cluster"}, ideal="ideal attn"),
    ]
    return [*ideals, *peers, *own, *others]
