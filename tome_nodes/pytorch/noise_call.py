"""View a call of a UNet of diffusers as a map from a noisy latent to the denoised one.

Whatever its scheduler keeps, a UNet gets a latent whose variance stays the same: ``picture`` times
the clean latent and ``noise`` times normal noise, where the squares of the two add up to 1.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from .. import reasons
from .model_call import TIMESTEPS, ModelCall, first_two_arguments

_PREDICTIONS = ("epsilon", "v_prediction", "sample")
"""What UNets predict: the noise, its mixture with the picture, or the picture."""

_CONTROL = (
    "down_block_additional_residuals",
    "mid_block_additional_residual",
    "down_intrablock_additional_residuals",
)
"""Arguments whose values change from step to step. Those of others have to stay."""


@dataclass(frozen=True, eq=False)
class NoiseCall(ModelCall):
    """One call of a UNet, whose latent is ``[batch, channels, height, width]``.

    A noise level is the standard deviation of the noise that is added to the picture.

    Attributes:
        prediction: what the UNet predicts, one of :data:`_PREDICTIONS`.
        dtype: the dtype of what it returns.
    """

    prediction: str
    dtype: torch.dtype

    def is_steady(self, name: Hashable) -> bool:
        return name not in _CONTROL

    def denoised(self, result: Any, noise: float) -> Tensor | None:
        sample = result[0]
        if not isinstance(sample, Tensor) or sample.shape != self.latent.shape:
            return None
        predicted = sample.float()
        if self.prediction == "sample":
            return predicted
        picture = 1 / math.sqrt(1 + noise**2)
        if self.prediction == "epsilon":
            return self.latent / picture - noise * predicted
        return picture * self.latent - noise * picture * predicted

    def predicted(self, denoised: Tensor, noise: float) -> Tensor:
        picture = 1 / math.sqrt(1 + noise**2)
        predicted = denoised
        if self.prediction == "epsilon":
            predicted = (self.latent / picture - denoised) / noise
        elif self.prediction == "v_prediction":
            predicted = (picture * self.latent - denoised) / (noise * picture)
        return predicted.to(self.dtype)


def noise_call(
    unet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], scheduler: Any
) -> NoiseCall | str:
    """A call of a UNet with some arguments, or why it cannot be forecast.

    ``scheduler`` is that of its pipeline, which says what the UNet predicts.
    """
    sample, timestep = first_two_arguments(unet, args, kwargs)
    channels = unet.config.out_channels
    is_latent = isinstance(sample, Tensor) and sample.ndim == 4 and sample.shape[1] >= channels
    if not is_latent or not isinstance(timestep, SupportsFloat):
        return reasons.OTHER_FORM
    config = getattr(scheduler, "config", {})
    prediction = config.get("prediction_type")
    if prediction not in _PREDICTIONS:
        return reasons.unknown_prediction(f"{type(unet).__name__} with {prediction}")
    given: dict[Any, Any] = {**dict(enumerate(args[2:])), **kwargs}
    others = {
        name: value
        for name, value in given.items()
        if value is not sample and value is not timestep
    }
    # Channels behind the latent say, for example, where to paint.
    others["behind"] = sample[:, channels:]
    levels = config.get("num_train_timesteps") or TIMESTEPS
    time = float(torch.as_tensor(timestep).max()) / (levels - 1)
    latent = sample[:, :channels].float()
    return NoiseCall(latent, time, unet, others, prediction, sample.dtype)
