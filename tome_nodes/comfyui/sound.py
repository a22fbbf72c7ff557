"""Run a model on merged tokens of its video, beside a sound that stays as it is."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..patching.whole_model import Denoise, WholeModel


def run_beside(
    whole: WholeModel, video: Tensor, denoise: Callable[[Tensor], Sequence[Tensor]]
) -> list[Tensor]:
    """The denoised video, and what was denoised with it.

    Args:
        whole: runs the model on merged tokens of its latent.
        video: the noisy one.
        denoise: maps a noisy video to the denoised one, and to whatever else the model denoises.
    """
    others: list[Tensor] = []

    def denoise_video(noisy: Tensor) -> Tensor:
        denoised, *others[:] = denoise(noisy)
        return denoised

    return [whole.run(video, denoise_video), *others]


def run_packed(whole: WholeModel, x: Tensor, shape: Sequence[int], denoise: Denoise) -> Tensor:
    """The denoised latent, of the shape of ``x``.

    Args:
        whole: runs the model on merged tokens of its latent.
        x: the noisy latent; or ``[batch, 1, values]``, those of the latent and then of the sound.
        shape: that of the latent; its batch does not count.
        denoise: the model.
    """
    if x.shape[1:] == torch.Size(shape[1:]):
        return whole.run(x, denoise)
    values = math.prod(shape[1:])

    def denoise_both(video: Tensor) -> list[Tensor]:
        out = denoise(torch.cat([video.reshape(len(x), 1, -1), x[..., values:]], -1))
        return [out[..., :values].reshape(video.shape), out[..., values:]]

    video, sound = run_beside(whole, x[..., :values].reshape(len(x), *shape[1:]), denoise_both)
    return torch.cat([video.reshape(len(x), 1, -1), sound], -1)
