"""Two more UNets on crops of photos, whose deeper levels decide what is where.

The first, in SDXL's layout, is the UNet of :mod:`benchmarks.fidelity.denoiser` without attention
at the first level and with more of it at the last, trained further: what the first level did, the
deeper ones have to learn. The second, in the layout of SD 1.5, is the first with attention at all
levels, trained further again. Their weights are not in the repository; ``python3 dev.py bench
--train`` makes them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comfy.model_base import ModelType
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from benchmarks.fidelity import denoiser, weights
from tools.environment import ROOT

PHOTOS = ("astronaut", "chelsea", "coffee")
"""The photos of the denoiser that scikit-image brings."""


@dataclass(frozen=True)
class Layout:
    """A UNet and the pictures it paints.

    Attributes:
        name: of the model whose layout it has.
        scale: the tokens of the latent along one unit of a crop's side.
        unet: what differs from the denoiser's UNet.
    """

    name: str
    scale: int
    unet: dict[str, Any]

    @property
    def weights(self) -> Path:
        """The file with the trained weights; git ignores it."""
        return ROOT / "demo" / f"trial-{self.name}.pt"

    def begin(self) -> dict[str, Tensor]:
        """The weights from which training begins, by name; new blocks have none."""
        trained = LAYOUTS["sdxl"].weights
        if self.name != "sdxl" and trained.exists():
            return _average(trained)
        # At the last level, attention comes before what scales up.
        return {
            name.replace("output_blocks.1.1.conv", "output_blocks.1.2.conv"): weight
            for name, weight in weights.load(denoiser.WEIGHTS).items()
        }

    @property
    def config(self) -> dict[str, Any]:
        return {**denoiser.UNET, **self.unet}

    def load(self) -> ModelPatcher:
        """The trained model.

        Raises:
            SystemExit: if it has not been trained.
        """
        if not self.weights.exists():
            raise SystemExit(
                f"{self.weights} is missing; python3 dev.py bench --train {self.name} makes it"
            )
        settings = denoiser.Settings({**self.config, "dtype": torch.float32})
        model = denoiser.OfCrops(settings, ModelType.V_PREDICTION)
        return denoiser.ready(model, _average(self.weights))


def _average(file: Path) -> dict[str, Tensor]:
    """The averaged weights of a training."""
    found: dict[str, Tensor] = torch.load(file, weights_only=True)["average"]
    return found


LAYOUTS = {
    "sdxl": Layout(
        "sdxl",
        scale=2,
        unet={"transformer_depth": [0, 1, 2], "transformer_depth_output": [0, 0, 1, 1, 2, 2]},
    ),
    "sd15": Layout(
        "sd15",
        scale=1,
        unet={"transformer_depth": [1, 1, 2], "transformer_depth_output": [1, 1, 1, 1, 2, 2]},
    ),
}
