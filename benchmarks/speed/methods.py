"""The methods to compare on UNets. Each makes a patched clone of a ComfyUI model."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import comfy.ops
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from comfy_extras.nodes_hypertile import HyperTile
from comfy_extras.nodes_tomesd import TomePatchModel
from torch.nn.attention import SDPBackend

from benchmarks.others import ONCE, ToDoStrategy, TomesdStrategy
from benchmarks.patches import Patch, node
from tome_nodes.comfyui.attachment import attach
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of

RATIO = 0.5
"""The share of the tokens that others' methods merge; ToDo's is always 0.75."""


def preset(name: str) -> Patch:
    """What the node does to a model under a preset."""
    return partial(attach, config=ToMeConfig(**settings_of(name, {})))


def methods(max_downsample: int | str, on_gpu: bool) -> Mapping[str, Patch]:
    """All methods by the names that tables give them.

    Args:
        max_downsample: the levels at which tomesd and ToDo merge.
        on_gpu: whether presets are also measured with cuDNN's attention first.
    """
    peers: dict[str, Any] = {"max_downsample": max_downsample, "min_tokens": 1, **ONCE}
    tomesd = ToMeConfig(ratio=RATIO, **peers)
    todo = ToMeConfig(ratio=0.75, attn_tokens="k,v", **peers)
    presets = {name: preset(name) for name in ("balanced", "fast")}
    plain: dict[str, Patch] = {"unpatched": lambda model: model}
    by_cudnn = {
        f"{name}, cuDNN first": partial(_cudnn_first, patch)
        for name, patch in (plain | presets).items()
    }
    return {
        **plain,
        **presets,
        "core TomePatchModel": node(TomePatchModel, ratio=RATIO),
        "tomesd": partial(attach, config=tomesd, make_strategy=TomesdStrategy),
        "ToDo": partial(attach, config=todo, make_strategy=ToDoStrategy),
        "HyperTile": node(HyperTile, tile_size=256, swap_size=2, max_depth=0, scale_depth=False),
        **(by_cudnn if on_gpu else {}),
    }


def _cudnn_first(patch: Patch, model: ModelPatcher) -> ModelPatcher:
    """A method where PyTorch tries cuDNN's attention first.

    The host asks for flash attention first, which takes twice as long on some cards.
    """
    clone = patch(model).clone()
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "cudnn", _with_cudnn_first)
    return clone


def _with_cudnn_first(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
    first = SDPBackend.CUDNN_ATTENTION
    others = [backend for backend in comfy.ops.SDPA_BACKEND_PRIORITY if backend != first]
    with mock.patch.object(comfy.ops, "SDPA_BACKEND_PRIORITY", [first, *others]):
        return executor(*args, **kwargs)
