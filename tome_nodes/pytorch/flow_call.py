"""View a transformer's call as a map from a noisy latent to the denoised one, to forecast that."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..merging.layout import Grid
from .latents import Latents


@dataclass(frozen=True)
class Flow:
    """How the transformers of one class predict a flow: the latent's change as timesteps grow.

    Attributes:
        clean: the timestep of a latent without noise.
        noise: the timestep of pure noise.
        side: if the transformer gets tokens, the side of the square of latent pixels in a token.
    """

    clean: float
    noise: float
    side: int = 1


_FLOWS: Mapping[str, Flow] = {
    "FluxTransformer2DModel": Flow(0.0, 1.0, side=2),
    "Flux2Transformer2DModel": Flow(0.0, 1.0, side=2),
    "SD3Transformer2DModel": Flow(0.0, 1000.0),
    "QwenImageTransformer2DModel": Flow(0.0, 1.0, side=2),
    "ZImageTransformer2DModel": Flow(1.0, 0.0),
    "Lumina2Transformer2DModel": Flow(1.0, 0.0),
    "WanTransformer3DModel": Flow(0.0, 1000.0),
    "LTXVideoTransformer3DModel": Flow(0.0, 1000.0),
    "HunyuanVideoTransformer3DModel": Flow(0.0, 1000.0),
}
"""The flows by the names of diffusers' classes."""

_OF_OTHER_FORM = ("additional_t_cond", "kv_cache_mode")
"""Arguments that change the form of the answer: it then holds more than the latent, as in
Qwen-Image-Layered, or leaves something out, as when Flux.2 keeps the keys of references."""

_LEAST_NOISE = 1e-6
"""Stands for a noise share of 0, because :meth:`FlowCall.returned` divides by the share."""


def flow_of(network: nn.Module, arguments: Mapping[str, Any]) -> Flow | None:
    """How a transformer predicts a flow when called with these arguments, None if unknown."""
    if any(arguments.get(name) is not None for name in _OF_OTHER_FORM):
        return None
    kinds: Any = type(network).__mro__
    own = next(kind for kind in kinds if kind.__module__.startswith("diffusers."))
    return _FLOWS.get(own.__name__)


def timestep_of(arguments: Mapping[str, Any]) -> Any:
    """The timestep among the arguments of a transformer, 0 if it has none."""
    named = (arguments[name] for name in ("timestep", "t", "timesteps") if name in arguments)
    return next(named, 0)


def noise_share(flow: Flow, timestep: Tensor) -> Tensor:
    """The share of noise in a latent at some timesteps, in the shape of these; never 0."""
    return ((timestep.float() - flow.clean) / (flow.noise - flow.clean)).clamp_min(_LEAST_NOISE)


class FlowCall:
    """One call of a transformer that predicts a flow."""

    def __init__(
        self,
        flow: Flow,
        network: nn.Module,
        arguments: Mapping[str, Any],
        latents: Latents,
        grid: Grid,
    ):
        """Prepare a call.

        Args:
            flow: how the transformer predicts it.
            network: the transformer.
            arguments: the arguments of the call, by name. The first one holds the latents.
            latents: the latents in it.
            grid: the grid of the latent's tokens.
        """
        self._flow, self._latents = flow, latents
        self._grid = grid
        config: Any = network.config
        self._channels = config.get("out_channels") or config["in_channels"]
        if latents.are_tokens:
            self._channels *= config["patch_size"] ** 2
        self._timestep = timestep_of(arguments)

    @property
    def latent(self) -> Tensor:
        """The noisy latent of the call."""
        return self._latent(self._latents)

    def denoised(self, noisy: Tensor, result: Any) -> Tensor:
        """The denoised latent that follows from what the transformer returned for a noisy one."""
        return noisy - self._noise(noisy) * self._latent(self._answer(result))

    def returned(self, latent: Tensor, denoised: Tensor, like: Any) -> Any:
        """The answer of the transformer from which ``denoised`` would follow for a noisy latent.

        It has the form of ``like``, an answer of the transformer.
        """
        flow = (latent - denoised) / self._noise(latent)
        sample = self._answer(like).with_latent(flow, self._grid)
        if isinstance(like, tuple):
            return sample, *like[1:]
        return replace(like, sample=sample)

    def _answer(self, result: Any) -> Latents:
        """The latents in what the transformer returned."""
        return replace(self._latents, value=result[0])

    def _latent(self, latents: Latents) -> Tensor:
        return latents.latent(self._grid, self._channels, self._flow.side)

    def _noise(self, latent: Tensor) -> Tensor:
        """The factor that makes the answer the noise in a latent; never 0."""
        timestep = torch.as_tensor(self._timestep, device=latent.device)
        timestep = timestep.reshape(len(timestep), -1).amax(1) if timestep.ndim > 1 else timestep
        share = noise_share(self._flow, timestep).reshape(-1, *[1] * (latent.ndim - 1))
        return share if self._flow.noise > self._flow.clean else -share
