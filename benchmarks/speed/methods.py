"""The methods to compare. Each makes a patched clone of a ComfyUI model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import comfy.ops
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from comfy_extras.nodes_hypertile import HyperTile
from comfy_extras.nodes_tomesd import TomePatchModel
from tomesd.merge import bipartite_soft_matching_random2d
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.lossless import lossless
from benchmarks.patches import Patch, node
from tome_nodes.comfyui.attachment import attach
from tome_nodes.ops import TORCH, Operations
from tome_nodes.patching.engine import MakeStrategy
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.policy import PLAIN
from tome_nodes.settings.presets import settings_of
from tome_nodes.strategies import make_strategy
from tome_nodes.strategies.plan import Grid, Plan
from tome_nodes.strategies.strategy import Strategy

ALWAYS: dict[str, Any] = {"min_tokens": 1}
"""Settings that merge maps of any size."""

AS_GIVEN: dict[str, Any] = {**ALWAYS, "policy": PLAIN}
"""Settings that also merge the same share of all maps, however little that saves."""

ONCE: dict[str, Any] = {"proportional_attn": False}
"""Settings under which a merged key counts once, as others published it."""


class Method(NamedTuple):
    """A method to measure.

    Attributes:
        name: its name in the tables.
        patch: makes a clone that runs it.
        lossless: the same with lossless plans, or with settings that change nothing.
        ideal: name of the ideal that runs the same modules on merged tokens, if any.
        plans: its settings on maps of any size, and its strategy; None if it is not on our host.
    """

    name: str
    patch: Patch
    lossless: Patch
    ideal: str | None = None
    plans: tuple[ToMeConfig, MakeStrategy] | None = None


def on_host(
    name: str,
    config: ToMeConfig,
    make_strategy: MakeStrategy = make_strategy,
    ideal: str | None = None,
) -> Method:
    """A strategy on our host."""
    always = replace(config, **AS_GIVEN)
    patch = partial(attach, config=config, make_strategy=make_strategy)
    same = partial(attach, config=always, make_strategy=lossless(make_strategy))
    return Method(name, patch, same, ideal, (always, make_strategy))


def cudnn_first(method: Method) -> Method:
    """A method where PyTorch tries cuDNN's attention first, on a GPU.

    The host asks for flash attention first, which takes twice as long on some cards.
    """

    def patch(model: ModelPatcher) -> ModelPatcher:
        clone = method.patch(model)
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "cudnn", _with_cudnn_first)
        return clone

    return method._replace(name=f"{method.name}, cuDNN first", patch=patch, ideal=None)


def _with_cudnn_first(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
    first = SDPBackend.CUDNN_ATTENTION
    others = [backend for backend in comfy.ops.SDPA_BACKEND_PRIORITY if backend != first]
    with mock.patch.object(comfy.ops, "SDPA_BACKEND_PRIORITY", [first, *others]):
        return executor(*args, **kwargs)


def plan_of_functions(
    features: Tensor,
    slots: int,
    merge: Callable[[Tensor], Tensor],
    unmerge: Callable[[Tensor], Tensor],
) -> Plan:
    """A plan made of two functions, for settings under which merged keys count once.

    It does not know the slot of each token.
    """
    batch, tokens, _ = features.shape
    own = Operations(
        "functions",
        merge=lambda x, *_: merge(x),
        merge_keys=lambda x, *_: (merge(x), merge(x)),
        unmerge=lambda y, *_: unmerge(y),
        add_change=lambda x, before, after, *_: x + unmerge(after - before),
        widen=TORCH.widen,
    )
    unknown = features.new_empty((batch, tokens), dtype=torch.int64)
    return Plan(unknown, unknown, unknown, features.new_zeros(batch, slots), slots, own)


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
        sizes = grid.width, grid.height, self.config.sx, self.config.sy, merges
        functions = bipartite_soft_matching_random2d(features, *sizes, generator=self.generator)
        return plan_of_functions(features, grid.tokens - merges, *functions)


class KeepingStrategy(Strategy):
    """Keeps some tokens as they are, in place of means."""


class IdealStrategy(KeepingStrategy):
    """Merging at no cost: a fixed stride of the tokens stays, and one expand restores the rest."""

    def plan(self, features: Tensor, grid: Grid, ratio: float) -> Plan:
        stride = round(1 / (1 - ratio))

        def unmerge(y: Tensor) -> Tensor:
            return y[:, :, None].expand(-1, -1, stride, -1).flatten(1, 2)[:, : grid.tokens]

        slots = -(-grid.tokens // stride)
        return plan_of_functions(features, slots, lambda x: x[:, ::stride], unmerge)


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

        return plan_of_functions(features, frames * rows * columns, merge, unmerge)


def methods(ratio: float, max_downsample: int | str, device: torch.device) -> list[Method]:
    """All methods, the ideals before those whose efficiency refers to them.

    Args:
        ratio: the share of the tokens to merge, in every method but presets, which merge theirs.
        max_downsample: the levels at which all methods except presets and ComfyUI's node merge.
        device: where it runs; on a GPU, presets are also measured with cuDNN's attention first.
    """
    levels: dict[str, Any] = {"ratio": ratio, "max_downsample": max_downsample}
    peers = levels | ALWAYS | ONCE
    keys: dict[str, Any] = {"attn_tokens": "k,v"}
    scopes: dict[str, dict[str, Any]] = {"attn": {}, "stack": {"scope": "stack"}}
    is_on_gpu = device.type == "cuda"
    fastest = {"backend": "triton"} if is_on_gpu else {}

    def ideal(scope: str, config: dict[str, Any]) -> Method:
        name = f"ideal {scope}"
        return on_host(name, ToMeConfig(**config), IdealStrategy, name)

    def window(scope: str) -> Method:
        settings = levels | ALWAYS | scopes[scope] | fastest
        config = ToMeConfig(strategy="window", **settings)
        return on_host(f"ours window {scope}", config, ideal=f"ideal {scope}")

    def preset(name: str) -> Method:
        return on_host(f"preset {name}", ToMeConfig(**settings_of(name, {})))

    core, idle = (node(TomePatchModel, ratio=share) for share in (ratio, 0.0))
    tiles = {"swap_size": 2, "max_depth": 0, "scale_depth": False}
    # One tile as large as the picture changes nothing.
    tiled, untiled = (node(HyperTile, tile_size=side, **tiles) for side in (256, 2048))
    presets = [preset("balanced"), preset("fast")]
    plain = Method("unpatched", lambda model: model, lambda model: model)
    todo = ToMeConfig(**peers | keys | {"ratio": 0.75})
    return [
        ideal("k,v", ALWAYS | ONCE | keys | {"ratio": ratio}),
        *(ideal(scope, peers | settings) for scope, settings in scopes.items()),
        Method("core TomePatchModel", core, idle),
        on_host("tomesd attn", ToMeConfig(**peers), TomesdStrategy, "ideal attn"),
        on_host("ToDo", todo, ToDoStrategy),
        Method("HyperTile", tiled, untiled),
        *map(window, scopes),
        *presets,
        *(map(cudnn_first, (plain, *presets)) if is_on_gpu else ()),
    ]
