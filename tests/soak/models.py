"""The models of the runs: small ones of ComfyUI's own classes, of diffusers and of ldm."""

import copy
import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher
from compatibility.neighbours import BY_NAME
from models import ldm, pipelines
from models.checkpoints import write_checkpoint
from models.comfyui import TINY, UNETS, Tiny, build, sample
from torch import Tensor, nn

import tome_nodes
from tome_nodes.comfyui.nodes import ToMePatchModel, ToMeRemovePatch, ToMeReport

from .draws import Draw, Sampling, Traits
from .traces import state_of_modules, state_of_patcher

AtStep = Callable[[int], None]
"""Called after each step with its number, from 1."""

_ANY_MODEL = (
    *("EasyCache", "LazyCache", "APG", "TCFG", "Mahiro", "CFGZeroStar", "CFGNorm"),
    *("Epsilon Scaling", "RescaleCFG", "DifferentialDiffusion"),
)
_ANY_UNET = (
    *("HyperTile", "PatchModelAddDownscale", "PerturbedAttentionGuidance", "TomePatchModel"),
    *("SelfAttentionGuidance", "FreeU_V2", "FreSca"),
    *("UNetSelfAttentionMultiply", "UNetCrossAttentionMultiply"),
)
_NEIGHBOURS: Mapping[str, tuple[str, ...]] = {
    "flux": ("SkipLayerGuidanceDiT",),
    "sd3": ("SkipLayerGuidanceDiT",),
    **{kind: ("ContextWindowsManual",) for kind, tiny in TINY.items() if (tiny.frames or 0) > 3},
}
"""Nodes for some kinds of models."""


class Merging:
    """Our part of a run, as users reach it; tests put a faulty one in its place."""

    def patch(self, model: ModelPatcher, settings: Mapping[str, Any]) -> ModelPatcher:
        """A model of ComfyUI that merges tokens."""
        return ToMePatchModel.execute(model, **settings).result[0]

    def remove(self, model: ModelPatcher) -> ModelPatcher:
        """A model of ComfyUI without token merging."""
        return ToMeRemovePatch.execute(model).result[0]

    def report(
        self, model: ModelPatcher, samples: Tensor, image: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor:
        """The picture that the report node makes of a run."""
        return ToMeReport.execute(model, {"samples": samples}, image, **inputs).result[0]

    def apply_patch(self, unet: nn.Module, settings: Mapping[str, Any]) -> None:
        """Merge tokens in a UNet of diffusers or latent-diffusion."""
        tome_nodes.apply_patch(unet, **settings)

    def remove_patch(self, unet: nn.Module) -> None:
        """Take token merging off such a UNet."""
        tome_nodes.remove_patch(unet)


class Model:
    """A model, and how it is run.

    Attributes:
        traits: what may be drawn for it.
        module: what has to be as it was after a run.
    """

    traits: Traits
    module: nn.Module

    def state(self) -> dict[str, Any]:
        """What can be put on the model, and could be left there."""
        return state_of_modules(self.module)

    def prepared(self, draw: Draw, merging: Merging | None) -> AbstractContextManager[Any]:
        """The model with what a draw puts on it; without token merging if ``merging`` is None."""
        raise NotImplementedError

    def sample(self, prepared: Any, sampling: Sampling, at_step: AtStep) -> Tensor:
        """A sampling run."""
        raise NotImplementedError


class ComfyModel(Model):
    """A model of ComfyUI, on which nodes are put.

    Args:
        kind: its name among those that other nodes know, which says what is put on it.
        tiny: its inputs.
        patcher: the model, built if None.
        traits: what may be drawn for it, other than the other nodes.
    """

    def __init__(
        self, kind: str, tiny: Tiny, patcher: ModelPatcher | None = None, **traits: Any
    ) -> None:
        special = _ANY_UNET if kind in UNETS else _NEIGHBOURS.get(kind, ())
        self.traits = Traits(neighbours=(*_ANY_MODEL, *special), **traits)
        self.patcher = patcher or build(tiny)
        self.module = self.patcher.model
        self._kind = kind
        self._tiny = tiny

    def state(self) -> dict[str, Any]:
        patcher = state_of_patcher(self.patcher)
        return super().state() | {f"patcher.{name}": value for name, value in patcher.items()}

    @contextmanager
    def prepared(self, draw: Draw, merging: Merging | None) -> Iterator[ModelPatcher]:
        def others(model: ModelPatcher) -> ModelPatcher:
            for name in (["LoraLoader"] if draw.lora else []) + [draw.neighbour or ""]:
                model = BY_NAME[name].patch(model, self._kind) if name else model
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
        yield model.clone() if draw.cloned else model

    def sample(self, prepared: ModelPatcher, sampling: Sampling, at_step: AtStep) -> Tensor:
        arguments = asdict(sampling)
        # So that the levels of a UNet below the first have tokens to merge, too.
        factor = 2 if self._kind in UNETS else 1
        high, wide = (factor * side for side in arguments.pop("size"))
        return sample(
            prepared,
            self._tiny,
            self._tiny.size(high, wide),
            picture=0.0 if sampling.denoise == 1 else 1.0,
            callback=lambda step, *_: at_step(step + 1),
            **arguments,
        )


class PlainUNet(Model):
    """A UNet that is called as a module and patched in place.

    Args:
        unet: the module.
        text: channels of its prompt.
        denoise: one evaluation of the UNet or of a copy, for a picture, a timestep and a prompt.
    """

    def __init__(self, unet: nn.Module, text: int, denoise: Callable[..., Tensor]):
        self.traits = Traits(weight=2.0, patches=150, worth=8, has_nodes=False)
        self.module = unet
        self._text = text
        self._denoise = denoise

    @contextmanager
    def prepared(self, draw: Draw, merging: Merging | None) -> Iterator[nn.Module]:
        if merging is None:
            yield self.module
            return
        merging.apply_patch(self.module, draw.settings)
        try:
            yield copy.deepcopy(self.module) if draw.cloned else self.module
        finally:
            merging.remove_patch(self.module)

    @torch.no_grad()
    def sample(self, prepared: nn.Module, sampling: Sampling, at_step: AtStep) -> Tensor:
        random = torch.Generator().manual_seed(sampling.seed)
        sides = [2 * side for side in sampling.size]
        x = torch.randn(sampling.batch, 4, *sides, generator=random)
        text = torch.randn(sampling.batch, 7, self._text, generator=random)
        for step, timestep in enumerate(torch.linspace(999, 100, sampling.steps).long(), 1):
            x = x - 0.1 * self._denoise(prepared, x, timestep, text)
            at_step(step)
        return x


def unet_of_diffusers() -> PlainUNet:
    """A UNet of diffusers."""
    return PlainUNet(
        pipelines.make_unet(),
        pipelines.TEXT_CHANNELS,
        lambda unet, x, timestep, text: unet(x, timestep, encoder_hidden_states=text).sample,
    )


def unet_of_ldm() -> PlainUNet:
    """A UNet of latent-diffusion."""
    return PlainUNet(
        ldm.make_unet(num_heads=4),
        ldm.TEXT_CHANNELS,
        lambda unet, x, timestep, text: unet(x, timestep.repeat(len(x)), context=text),
    )


def transformer(kind: str) -> ComfyModel:
    """A tiny transformer."""
    return ComfyModel(kind, TINY[kind])


def _from_file() -> ModelPatcher:
    """A UNet as ComfyUI's loader makes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "sd15.ckpt", "sd15", levels=1, unet_only=True)
        return comfy.sd.load_diffusion_model(str(path))


def all_models() -> dict[str, Model]:
    """Every model of the runs by name."""
    published = replace(UNETS["sd15"], text=768)
    unets = {
        "sd15 from a file": ComfyModel(
            "sd15", published, _from_file(), worth=8, weight=0.3, patches=36
        ),
        **{
            kind: ComfyModel(kind, UNETS[kind], worth=8, weight=weight, patches=150)
            for kind, weight in {"sd15": 4.0, "sd2": 1.0, "sdxl": 4.0, "x4_upscaler": 1.0}.items()
        },
    }
    transformers = {kind: transformer(kind) for kind in TINY}
    return {**unets, **transformers, "diffusers": unet_of_diffusers(), "ldm": unet_of_ldm()}


def load_nodes() -> None:
    """Import what would otherwise be imported in the middle of the runs: the server, the nodes."""
    importlib.import_module("server")
    for neighbour in BY_NAME.values():
        if neighbour.is_of_the_host:
            importlib.import_module(neighbour.source.removesuffix(".py").replace("/", "."))


def release() -> None:
    """Have ComfyUI take patches of weights off its models, and keep none of them loaded."""
    comfy.model_management.unload_all_models()
    comfy.model_management.cleanup_models()
