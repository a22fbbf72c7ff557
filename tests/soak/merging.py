"""Our part of a run, as users reach it; tests put a faulty one in its place."""

from collections.abc import Mapping
from typing import Any

from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

import tome_nodes
from tome_nodes.comfyui.nodes import ToMePatchModel, ToMeRemovePatch, ToMeReport


class Merging:
    """Puts token merging on models, takes it off again, and reports on it."""

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
