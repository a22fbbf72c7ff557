"""The models of the runs: small ones of ComfyUI's own classes."""

import importlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import comfy.sd
from comfy.model_patcher import ModelPatcher
from compatibility.neighbours import ALL, BY_NAME
from models.checkpoints import write_checkpoint
from models.comfyui import KINDS, UNETS, Tiny, build, sample
from torch import Tensor

from tome_nodes.comfyui.nodes import ToMePatchModel, ToMeRemovePatch, ToMeReport

from .draws import Draw, Traits

_UNSUITABLE = {"ConditioningSetArea", "ModelMergeSimple", "ModelMergeBlocks"}
"""Nodes that need a picture of one size or a second model."""


class Merging:
    """Our part of a run, as users reach it; tests put a faulty one in its place."""

    def patch(self, model: ModelPatcher, settings: Mapping[str, Any]) -> ModelPatcher:
        return ToMePatchModel.execute(model, **settings).result[0]

    def remove(self, model: ModelPatcher) -> ModelPatcher:
        return ToMeRemovePatch.execute(model).result[0]

    def report(
        self, model: ModelPatcher, samples: Tensor, image: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor:
        return ToMeReport.execute(model, {"samples": samples}, image, **inputs).result[0]


@dataclass(frozen=True)
class Model:
    """A model of ComfyUI, on which nodes are put."""

    kind: str
    tiny: Tiny
    traits: Traits
    patcher: ModelPatcher

    def prepared(self, draw: Draw, merging: Merging | None) -> ModelPatcher:
        def others(model: ModelPatcher) -> ModelPatcher:
            for name in draw.neighbours:
                model = BY_NAME[name].patch(model, self.kind)
            return model

        def ours(model: ModelPatcher) -> ModelPatcher:
            for settings in ({}, draw.settings) if draw.replaced else (draw.settings,):
                model = merging.patch(model, settings) if merging else model
            return model

        model = self.patcher.clone()
        for put in (others, ours) if draw.others_first else (ours, others):
            model = put(model)
        if draw.removed and merging is not None:
            model = merging.remove(model)
        return model.clone() if draw.cloned else model

    def sample(
        self, prepared: ModelPatcher, draw: Draw, at_step: Callable[..., None] | None = None
    ) -> Tensor:
        arguments = dict(draw.sampling)
        # So that the levels of a UNet below the first have tokens to merge, too.
        factor = 2 if self.kind in UNETS else 1
        size = self.tiny.size(*(factor * side for side in arguments.pop("size")))
        arguments["picture"] = float(arguments.get("denoise", 1) < 1)
        for name in draw.neighbours:
            arguments |= BY_NAME[name].sampling(prepared, self.kind)
        return sample(prepared, self.tiny, size, callback=at_step, **arguments)


def _traits(kind: str, weight: float) -> Traits:
    nodes = tuple(
        node.name
        for node in ALL
        if node.guider is None and not node.is_slow and node.name not in _UNSUITABLE
        if not node.only or kind in node.only
    )
    if kind in UNETS:
        skips = kind == "sdxl"
        return Traits(weight, patches=150, worth=8, neighbours=nodes, skips=skips)
    return Traits(weight, neighbours=nodes, skips=True)


_WEIGHTS = {"sd15": 4.0, "sd2": 1.0, "sdxl": 4.0, "x4_upscaler": 1.0, "flux": 3.0, "wan21": 3.0}
_WEIGHTS |= dict.fromkeys(("sd3", "qwen_image", "z_image", "krea2", "ltxav", "minimax_h3"), 1.0)
TRAITS: Mapping[str, Traits] = {kind: _traits(kind, weight) for kind, weight in _WEIGHTS.items()}


def model_of(kind: str, traits: Traits) -> Model:
    return Model(kind, KINDS[kind], traits, build(KINDS[kind]))


def all_models() -> dict[str, Model]:
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "sd15.ckpt", "sd15", levels=1, unet_only=True)
        loaded = comfy.sd.load_diffusion_model(str(path))
    rarely = Traits(weight=0.3, patches=36, worth=8)
    return {
        "sd15 from a file": Model("sd15", replace(UNETS["sd15"], text=768), rarely, loaded),
        **{kind: model_of(kind, traits) for kind, traits in TRAITS.items()},
    }


def load_nodes() -> None:
    """Import what would otherwise be imported in the middle of the runs: the server, the nodes."""
    importlib.import_module("server")
    for neighbour in ALL:
        if neighbour.is_of_the_host:
            importlib.import_module(neighbour.source.removesuffix(".py").replace("/", "."))
