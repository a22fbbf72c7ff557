"""The UNets to measure: the published shapes with random weights."""

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.sd
import comfy.utils
import torch
from comfy.ldm.modules.attention import SpatialTransformer
from comfy.model_patcher import ModelPatcher
from models.checkpoints import write_checkpoint
from torch import nn

PREFIX = "model.diffusion_model."


@dataclass(frozen=True)
class Shape:
    """The shape of a model.

    Attributes:
        family: name of the checkpoint's family.
        options: other arguments of :func:`models.checkpoints.write_checkpoint`.
        context_channels: channels of its text tokens.
        max_downsample: the levels at which methods merge. For SD 1.5 this is the first level. SDXL
            has no attention there, and most of its blocks are at 4.
        note: how it differs from the published model, for tables.
    """

    family: str
    options: dict[str, Any]
    context_channels: int
    max_downsample: int | str
    note: str = ""


SHAPES = {
    "sd15": Shape("sd15", {"levels": 4, "full_width": True}, 768, "auto"),
    "sdxl": Shape("sdxl_base", {"full_width": True}, 2048, 4),
}
"""The published UNets."""

REDUCED = {
    "sd15": Shape("sd15", {"levels": 1}, 768, "auto", "first level only"),
    "sdxl": Shape("sdxl", {}, 2048, 2, "320 channels throughout, depths 0, 1, 2"),
}
"""Small versions for ``--quick`` and ``gpu 4``, merged at the level that has enough tokens at small
sizes."""


def load(shape: Shape, device: torch.device) -> ModelPatcher:
    """A model of this shape, as ComfyUI loads it.

    On a CPU the blocks of a deep stack share one set of weights, so that SDXL takes 3 GB instead
    of 10.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(
            Path(folder) / "unet.ckpt", shape.family, unet_only=True, **shape.options
        )
        if device.type == "cpu":
            return _load_with_shared_weights(path, device)
        return comfy.sd.load_diffusion_model(str(path))


def _load_with_shared_weights(path: Path, device: torch.device) -> ModelPatcher:
    weights = comfy.utils.state_dict_prefix_replace(
        comfy.utils.load_torch_file(str(path)), {PREFIX: ""}, filter_keys=True
    )
    config = comfy.model_detection.model_config_from_unet(weights, "")
    config.set_inference_dtype(torch.float32, None, device=device)
    # This reserves the weights, but touches no memory until they are loaded.
    model = config.get_model(weights, "", device=device)
    for module in model.diffusion_model.modules():
        if isinstance(module, SpatialTransformer) and len(module.transformer_blocks) > 2:
            blocks = module.transformer_blocks
            module.transformer_blocks = repeated(blocks[0], len(blocks))
    model.load_model_weights(weights, "")
    return ModelPatcher(model, load_device=device, offload_device=device)


def repeated(block: nn.Module, layers: int) -> nn.ModuleList:
    """A stack of this many blocks, which share the weights of one.

    A model of published depth is then built quickly. An evaluation does all the work of the full
    model. It reads the weights as often, and a block has 83 MB of them or more, too much for most
    caches to keep until the next block.
    """
    shared = {id(weight): weight for weight in [*block.parameters(), *block.buffers()]}
    copies = [copy.deepcopy(block, dict(shared)) for _ in range(layers - 1)]
    return nn.ModuleList([block, *copies])
