"""The methods to compare. Each makes a patched clone of a ComfyUI model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy_extras.nodes_tomesd import TomePatchModel
from tomesd.merge import bipartite_soft_matching_random2d
from torch import Tensor

from benchmarks.lossless import lossless
from tome_nodes.comfyui.attachment import attach
from tome_nodes.merging.layout import Grid
from tome_nodes.merging.plan import Plan
from tome_nodes.ops import Operations
from tome_nodes.patching.engine import MakeStrategy
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of
from tome_nodes.strategies import make_strategy
from tome_nodes.strategies.strategy import Strategy

Patch = Callable[[ModelPatcher], ModelPatcher]
"""Makes a patched clone of a model."""

ALWAYS: dict[str, Any] = {"min_tokens": 1}
"""Settings that merge maps of any size."""

ONCE: dict[str, Any] = {"proportional_attn": False}
"""Settings under which a merged key counts once, as others published it."""


def node(kind: Any, **inputs: Any) -> Patch:
    """What a node of ComfyUI does to a model, given the class of the node."""
    return lambda model: kind.EXECUTE_NORMALIZED(model=model, **inputs)[0]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method to measure.

    Attributes:
        name: its name in the tables.
        family: ``ideal``, ``peer`` or ``ours``.
        ideal: name of the ideal that runs the same modules on merged tokens, if any.
    """

    name: str
    family: str
    ideal: str | None = None

    def patch(self, model: ModelPatcher) -> ModelPatcher:
        """A clone that runs this method."""
        raise NotImplementedError

    def lossless(self, model: ModelPatcher) -> ModelPatcher:
        """A clone that runs this method's code with lossless plans."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class HostMethod(Method):
    """A strategy on our host."""

    config: ToMeConfig
    make_strategy: MakeStrategy = make_strategy

    def patch(self, model: ModelPatcher) -> ModelPatcher:
        return attach(model, self.config, self.make_strategy)

    def lossless(self, model: ModelPatcher) -> ModelPatcher:
        return attach(model, self.always().config, lossless(self.make_strategy))

    def always(self) -> "HostMethod":
        """The same method on maps of any size."""
        return replace(self, config=replace(self.config, **ALWAYS))


@dataclass(frozen=True, kw_only=True)
class CoreMethod(Method):
    """ComfyUI's own node."""

    ratio: float

    def patch(self, model: ModelPatcher) -> ModelPatcher:
        return node(TomePatchModel, ratio=self.ratio)(model)

    def lossless(self, model: ModelPatcher) -> ModelPatcher:
        return replace(self, ratio=0.0).patch(model)


@dataclass(frozen=True, eq=False)
class CallablePlan(Plan):
    """A plan made of two functions, for settings under which merged keys count once."""

    slot_count: int
    shape: torch.Size
    merging: Callable[[Tensor], Tensor]
    unmerging: Callable[[Tensor], Tensor]

    def fits(self, x: Tensor) -> bool:
        return x.shape[:2] == self.shape

    def merge(self, x: Tensor) -> Tensor:
        return self.merging(x)

    def unmerge(self, y: Tensor) -> Tensor:
        return self.unmerging(y)


class TomesdStrategy(Strategy):
    """The functions of the reference implementation (tomesd), on our host."""

    def __init__(self, config: ToMeConfig, ops: Operations):
        super().__init__(config, ops)
        self.generator: torch.Generator | None = None

    def begin(self, key: Tensor) -> None:
        if self.generator is None:
            self.generator = torch.Generator(device=key.device).manual_seed(0)

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan:
        merges = int(grid.tokens * ratio)
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


class KeepingStrategy(Strategy):
    """Keeps some tokens as they are, in place of means."""


class IdealStrategy(KeepingStrategy):
    """Merging at no cost: a fixed stride of the tokens stays, and one expand restores the rest."""

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan:
        stride = round(1 / (1 - ratio))

        def unmerge(y: Tensor) -> Tensor:
            return y[:, :, None].expand(-1, -1, stride, -1).flatten(1, 2)[:, : grid.tokens]

        slots = -(-grid.tokens // stride)
        return CallablePlan(slots, features.shape[:2], lambda x: x[:, ::stride], unmerge)


class ToDoStrategy(KeepingStrategy):
    """Keeps the top left token of each 2x2 cell, as ToDo (Smith et al., IJCAI 2024) does.

    Its ratio is always 0.75. In a video, each frame is a picture of its own.
    """

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan:
        frames, height, width = grid.frames, grid.height, grid.width
        rows, columns = -(-height // 2), -(-width // 2)

        def merge(x: Tensor) -> Tensor:
            return x.unflatten(1, (frames, height, width))[:, :, ::2, ::2].flatten(1, 3)

        def unmerge(y: Tensor) -> Tensor:
            video = y.unflatten(1, (frames, rows, columns))
            video = video.repeat_interleave(2, 2).repeat_interleave(2, 3)
            return video[:, :, :height, :width].flatten(1, 3)

        return CallablePlan(frames * rows * columns, features.shape[:2], merge, unmerge)


def methods(ratio: float, max_downsample: int | str, device: torch.device) -> list[Method]:
    """All methods, the ideals before those whose efficiency refers to them.

    Args:
        ratio: the share of the tokens to merge, in every method that has this setting.
        max_downsample: the levels at which all methods except presets and ComfyUI's node merge.
        device: where it runs; on a GPU, self-attention is also measured without Triton.
    """
    levels: dict[str, Any] = {"ratio": ratio, "max_downsample": max_downsample}
    peers = levels | ALWAYS | ONCE
    keys: dict[str, Any] = {"attn_tokens": "k,v"}
    scopes: dict[str, dict[str, Any]] = {"attn": {}, "stack": {"scope": "stack"}}
    is_on_gpu = device.type == "cuda"
    fastest = {"backend": "triton"} if is_on_gpu else {}

    def on_host(name: str, family: str, config: Mapping[str, Any], **details: Any) -> HostMethod:
        return HostMethod(name=name, family=family, config=ToMeConfig(**config), **details)

    def ideal(scope: str, config: dict[str, Any]) -> HostMethod:
        name = f"ideal {scope}"
        return on_host(name, "ideal", config, make_strategy=IdealStrategy, ideal=name)

    def window(scope: str, suffix: str, backend: Mapping[str, Any]) -> HostMethod:
        config = {"strategy": "window", **levels, **scopes[scope], **backend}
        return on_host(f"ours window {scope}{suffix}", "ours", config, ideal=f"ideal {scope}")

    def preset(name: str, scope: str) -> HostMethod:
        config = settings_of(name, {"ratio": ratio})
        return on_host(f"preset {name}", "ours", config, ideal=f"ideal {scope}")

    todo = peers | keys | {"ratio": 0.75}
    own = {"make_strategy": TomesdStrategy, "ideal": "ideal attn"}
    return [
        ideal("k,v", ALWAYS | ONCE | keys | {"ratio": ratio}),
        *(ideal(scope, peers | settings) for scope, settings in scopes.items()),
        CoreMethod(name="core TomePatchModel", family="peer", ratio=ratio),
        on_host("tomesd attn", "peer", peers, **own),
        on_host("ToDo", "peer", todo, make_strategy=ToDoStrategy),
        *(window(scope, "", fastest) for scope in scopes),
        *([window("attn", " on torch", {"backend": "torch"})] if is_on_gpu else []),
        preset("balanced", "k,v"),
        preset("fast", "stack"),
    ]
