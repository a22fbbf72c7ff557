"""The models of the runs: small ones of ComfyUI's own classes."""

import importlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
from comfy.model_patcher import ModelPatcher
from compatibility.neighbours import ALL, BY_NAME
from models.checkpoints import write_checkpoint
from models.comfyui import KINDS, UNETS, Tiny, build, sample
from torch import Tensor

from tome_nodes.comfyui.nodes import ToMePatchModel, ToMeRemovePatch, ToMeReport

from .draws import Draw, Traits
from .traces import state_of_modules, state_of_patcher

AtStep = Callable[[int], None]
"""Called after each step with its number, from 1."""

_UNSUITABLE = {"ConditioningSetArea", "ModelMergeSimple", "ModelMergeBlocks"}
"""Nodes that need a picture of one size or a second model."""


class Merging:
    """Our part of a run, as users reach it; tests put a faulty one in its place."""

    def patch(self, model: ModelPatcher, settings: Mapping[str, Any]) -> ModelPatcher:
        """A model of ComfyUI with our node."""
        return ToMePatchModel.execute(model, **settings).result[0]

    def remove(self, model: ModelPatcher) -> ModelPatcher:
        """A model of ComfyUI without our node."""
        return ToMeRemovePatch.execute(model).result[0]

    def report(
        self, model: ModelPatcher, samples: Tensor, image: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor:
        """The picture that the report node makes of a run."""
        return ToMeReport.execute(model, {"samples": samples}, image, **inputs).result[0]


class Model:
    """A model of ComfyUI, on which nodes are put.

    Args:
        kind: its name among those that other nodes know.
        traits: what may be drawn for it.
        tiny: its inputs, those of the kind if None.
        patcher: the model, built if None.
    """

    def __init__(
        self,
        kind: str,
        traits: Traits,
        tiny: Tiny | None = None,
        patcher: ModelPatcher | None = None,
    ) -> None:
        self.traits = traits
        self._kind = kind
        self._tiny = tiny or KINDS[kind]
        self.patcher = patcher or build(self._tiny)

    def state(self) -> dict[str, Any]:
        """What can be put on the model, and could be left there."""
        patcher = state_of_patcher(self.patcher)
        return state_of_modules(self.patcher.model) | {
            f"patcher.{name}": value for name, value in patcher.items()
        }

    def prepared(self, draw: Draw, merging: Merging | None) -> ModelPatcher:
        """The model with what a draw puts on it; without our part if ``merging`` is None."""

        def others(model: ModelPatcher) -> ModelPatcher:
            for name in draw.neighbours:
                model = BY_NAME[name].patch(model, self._kind)
            return model

        def ours(model: ModelPatcher) -> ModelPatcher:
            if merging is None:
                return model
            if draw.replaced:
                model = merging.patch(model, {})
            return merging.patch(model, draw.settings)

        model = self.patcher.clone()
        for node in (others, ours) if draw.others_first else (ours, others):
            model = node(model)
        if draw.removed and merging is not None:
            model = merging.remove(model)
        return model.clone() if draw.cloned else model

    def sample(self, prepared: ModelPatcher, draw: Draw, at_step: AtStep) -> Tensor:
        """A sampling run."""
        arguments = asdict(draw.sampling)
        # So that the levels of a UNet below the first have tokens to merge, too.
        factor = 2 if self._kind in UNETS else 1
        high, wide = (factor * side for side in arguments.pop("size"))
        arguments["picture"] = 0.0 if draw.sampling.denoise == 1 else 1.0
        for name in draw.neighbours:
            arguments |= BY_NAME[name].sampling(prepared, self._kind)
        return sample(
            prepared,
            self._tiny,
            self._tiny.size(high, wide),
            callback=lambda step, *_: at_step(step + 1),
            **arguments,
        )


def _from_file() -> ModelPatcher:
    """A UNet as ComfyUI's loader makes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "sd15.ckpt", "sd15", levels=1, unet_only=True)
        return comfy.sd.load_diffusion_model(str(path))


def _traits(kind: str, weight: float) -> Traits:
    nodes = tuple(
        each.name
        for each in ALL
        if each.guider is None and not each.is_slow and each.name not in _UNSUITABLE
        if not each.only or kind in each.only
    )
    if kind in UNETS:
        return Traits(weight, patches=150, worth=8, neighbours=nodes)
    return Traits(weight, neighbours=nodes, is_forecast=True)


_WEIGHTS = {"sd15": 4.0, "sd2": 1.0, "sdxl": 4.0, "x4_upscaler": 1.0, "flux": 3.0, "wan21": 3.0}
_WEIGHTS |= dict.fromkeys(("sd3", "qwen_image", "z_image", "krea2", "ltxav", "minimax_h3"), 1.0)
TRAITS: Mapping[str, Traits] = {kind: _traits(kind, weight) for kind, weight in _WEIGHTS.items()}
"""What may be drawn for the kinds of models of ComfyUI."""


def all_models() -> dict[str, Model]:
    """Every model of the runs by name."""
    published = replace(UNETS["sd15"], text=768)
    rarely = Traits(weight=0.3, patches=36, worth=8)
    return {
        "sd15 from a file": Model("sd15", rarely, published, _from_file()),
        **{kind: Model(kind, traits) for kind, traits in TRAITS.items()},
    }


def load_nodes() -> None:
    """Import what would otherwise be imported in the middle of the runs: the server, the nodes."""
    importlib.import_module("server")
    for neighbour in ALL:
        if neighbour.is_of_the_host:
            importlib.import_module(neighbour.source.removesuffix(".py").replace("/", "."))


def release() -> None:
    """Have ComfyUI take patches of weights off its models, and keep none of them loaded."""
    comfy.model_management.unload_all_models()
    comfy.model_management.cleanup_models()
