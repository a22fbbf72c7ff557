"""The UNet of stickers in SD 1.5's layout, grown from the one in SDXL's.

As in SD 1.5, each level has two residual blocks on the way down and three on the way up, and all of
them attend. What is new adds nothing at first, so the grown UNet paints what the other one paints
until training goes on. The first input block and the last output block have 0.06 of the
multiplications at 32x32 tokens and 0.095 at 64x64; in SD 1.5 at 512x512, they have 0.079. The
levels with most tokens have 0.45 at 64x64 tokens; in SD 1.5, they have 0.38.

Its weights are not in the repository; ``python3 dev.py bench --train stickers_sd15`` makes them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from benchmarks.fidelity import denoiser, sticker_unet
from tools.environment import ROOT

STATE = ROOT / "demo" / "stickers-sd15.pt"
"""The file of the training; git ignores it."""

UNET: dict[str, Any] = {
    **sticker_unet.UNET,
    "num_res_blocks": [2, 2, 2],
    "transformer_depth": [1, 1, 2, 1, 2, 1],
    "transformer_depth_output": [1, 1, 1, 2, 1, 2, 2, 1, 2],
}

_BLOCKS = {
    "input_blocks": {0: 0, 1: 1, 2: 3, 3: 4, 4: 6, 5: 7},
    "output_blocks": {0: 0, 1: 2, 2: 3, 3: 5, 4: 6, 5: 8},
}
"""The index of each block of the smaller UNet, and the index that it gets here."""

_NEW = 1, 4, 7
"""The new output blocks. Their residual blocks have a skip connection with weights."""


def load() -> ModelPatcher:
    """The trained UNet as a ComfyUI model.

    Raises:
        SystemExit: it has not been trained.
    """
    if not STATE.exists():
        raise SystemExit(f"{STATE} is missing; python3 dev.py bench --train stickers_sd15 makes it")
    trained = torch.load(STATE, weights_only=True)["average"]
    return denoiser.ready(sticker_unet.untrained(UNET), trained)


def grow(unet: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with which a UNet of this layout does what the smaller one does with its own.

    Args:
        unet: an untrained UNet of this layout.
        weights: the weights of the smaller one, by name.
    """
    grown = {name: weight.clone() for name, weight in unet.state_dict().items()}
    for name, weight in weights.items():
        side, _, rest = name.partition(".")
        index, _, part = rest.partition(".")
        moved = f"{side}.{_BLOCKS[side][int(index)]}.{part}" if side in _BLOCKS else name
        assert grown[moved].shape == weight.shape, name
        grown[moved] = weight
    for new in _NEW:
        # Pass on what comes up; what comes from the way down counts once it has been trained.
        passed = grown[f"output_blocks.{new}.0.skip_connection.weight"].zero_()
        passed[:, : len(passed), 0, 0] = torch.eye(len(passed))
        grown[f"output_blocks.{new}.0.skip_connection.bias"].zero_()
    return grown
