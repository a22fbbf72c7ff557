"""An exact denoiser in place of a network: it tells right from wrong without training.

Pictures are normal around a mean that depends on the prompt, with a spectrum like photos have.
The best guess of such a picture under noise is Wiener's filter.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from torch import Tensor

_VARIANCE = 0.8
"""The mean variance of a picture around its mean."""

_CONTRAST = 0.7
"""How large a mean is, relative to the deviations from it."""

_WEAKENED = 0.7
"""The share of the mean that is left where a node of guidance weakens the network."""

_BY_WEIGHTS, _BY_CONTROL = 1, 2
"""The seeds of the pictures that weights and a ControlNet add to the mean of a prompt."""


@cache
def _spectrum(high: int, wide: int, power: float) -> Tensor:
    """The variance of each frequency, as a multiple of their mean; (high, wide), float32."""
    rows, columns = torch.fft.fftfreq(high)[:, None], torch.fft.fftfreq(wide)
    frequency = (rows**2 + columns**2).sqrt().clamp_min(0.5 / max(high, wide))
    falling = frequency**-power
    return falling / falling.mean()


@cache
def mean(seed: int, shape: tuple[int, ...]) -> Tensor:
    """The mean picture of a prompt; of ``shape``, float32."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return _CONTRAST * _filtered(noise, (_VARIANCE * _spectrum(*shape[-2:], 2.0)).sqrt())


def denoised(
    latent: Tensor, centre: Tensor, noise: float, variance: Tensor | float, power: float = 2.0
) -> Tensor:
    """The best guess of the picture in a latent of a flow.

    Args:
        latent: ``(1 - noise)`` times the picture and ``noise`` times normal noise.
        centre: the mean of such pictures.
        noise: the noise level, from 0 to 1.
        variance: the variance of such pictures around their mean, over all frequencies.
        power: how fast the variance falls with the frequency.
    """
    share = 1 - noise
    of_frequency = variance * _spectrum(*latent.shape[-2:], power)
    gain = share * of_frequency / (share**2 * of_frequency + noise**2)
    return centre + _filtered(latent - share * centre, gain)


def denoised_one_of(
    latent: Tensor, centres: Sequence[Tensor], noise: float, variance: float, power: float
) -> Tensor:
    """The same where the mean is one of several, each as likely as the others.

    ``latent`` is ``[1, channels, high, wide]``, as is each of the means.
    """
    of_frequency = variance * _spectrum(*latent.shape[-2:], power)
    of_latent = (1 - noise) ** 2 * of_frequency + noise**2
    off = torch.fft.fft2(latent - (1 - noise) * torch.cat([*centres]), norm="ortho")
    likely = (-0.5 * off.abs().square() / of_latent).flatten(1).sum(1).softmax(0)
    guesses = torch.cat([denoised(latent, centre, noise, variance, power) for centre in centres])
    return torch.tensordot(likely, guesses, 1)[None]


def _filtered(picture: Tensor, gain: Tensor) -> Tensor:
    return torch.fft.ifft2(torch.fft.fft2(picture) * gain).real


class Denoiser:
    """Answers in place of the network of a flow.

    Its answer depends on everything that changes a network: prompts, a ControlNet, weights that a
    hook changes, blocks that a node of guidance replaces, and attention that it patches.
    """

    def __init__(self, model: ModelPatcher, weight: str):
        """Answer for ``model``, whose parameter ``weight`` hooks may change."""
        self._network = model.model.diffusion_model
        self._weight = weight
        self._before = self._fingerprint()

    def answer(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Tensor:
        """Wrap the network, which never runs."""
        given = inspect.signature(executor.original).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        x: Tensor = given["x"]
        options: Mapping[str, Any] = given["transformer_options"]
        noise = float(options["sigmas"].max())
        return (x - self._picture(x, noise, given, options)) / noise

    def _picture(
        self, latent: Tensor, noise: float, given: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Tensor:
        """The best guess of the picture in a latent of a flow at a noise level."""
        prompts: Tensor = given["context"]
        centres = self._centres(prompts, given.get("control"), (1, *latent.shape[1:]))
        centres = _patched(centres, options)
        # Without a prompt, the differences between prompts count as deviations.
        is_any = (prompts == 0).flatten(1).all(1).reshape(-1, *[1] * (latent.ndim - 1))
        variance = _VARIANCE * (1 + _CONTRAST**2 * is_any)
        # No transformer of the host reads the other kinds, such as PAG's.
        if options.get("patches_replace", {}).get("dit"):
            return denoised(latent, _WEAKENED * centres, noise, variance, power=2.5)
        return denoised(latent, centres, noise, variance)

    def _centres(self, prompts: Tensor, control: Any, shape: tuple[int, ...]) -> Tensor:
        """The mean picture of each sample."""
        centres = torch.cat([mean(_seed(text), shape) * bool(text.any()) for text in prompts])
        centres = centres + (self._fingerprint() - self._before) * mean(_BY_WEIGHTS, shape)
        return centres + control["input"][0] * mean(_BY_CONTROL, shape) if control else centres

    def _fingerprint(self) -> float:
        """A number that changes with the weights."""
        return float(self._network.get_parameter(self._weight).detach().mean())


def instead_of_network(model: ModelPatcher, denoiser: Denoiser) -> ModelPatcher:
    """A clone of a model where a denoiser answers, inside the wrappers it has so far."""
    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "denoiser", denoiser.answer)
    return clone


def _patched(centres: Tensor, options: Mapping[str, Any]) -> Tensor:
    """What patches of attention make of the means, as if a mean were an output of attention."""
    tokens = centres.flatten(2).transpose(1, 2)
    for patch in options.get("patches", {}).get("attn1_output_patch", ()):
        tokens = patch(tokens.contiguous(), dict(options))
    return tokens.transpose(1, 2).reshape(centres.shape)


def _seed(prompt: Tensor) -> int:
    return abs(int(100 * prompt.float().sum()))
