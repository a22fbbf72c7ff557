"""The UNets to measure: the published shapes with random weights."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.sd
from comfy.model_patcher import ModelPatcher
from models.checkpoints import write_checkpoint


@dataclass(frozen=True)
class Shape:
    """The shape of a model.

    Attributes:
        family: name of the checkpoint's family.
        options: other arguments of :func:`models.checkpoints.write_checkpoint`.
        context_channels: channels of its text tokens.
        max_downsample: the deepest level at which others' methods merge. For SD 1.5, it is the
            first level. SDXL has no attention there, and most of its blocks are at 4.
    """

    family: str
    options: Mapping[str, Any]
    context_channels: int
    max_downsample: int | str


SHAPES = {
    "sd15": Shape("sd15", {"levels": 4, "full_width": True}, 768, "auto"),
    "sdxl": Shape("sdxl_base", {"full_width": True}, 2048, 4),
    "reduced sd15": Shape("sd15", {"levels": 1}, 768, "auto"),
    "reduced sdxl": Shape("sdxl", {}, 2048, 2),
}
"""The published UNets, and small ones: the first level of SD 1.5, and an SDXL of 320 channels
throughout with depths 0, 1, 2."""


def load(name: str) -> ModelPatcher:
    """A model of one of :data:`SHAPES`, as ComfyUI loads it."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(
            Path(folder) / "unet.ckpt", shape.family, unet_only=True, **shape.options
        )
        return comfy.sd.load_diffusion_model(str(path))
