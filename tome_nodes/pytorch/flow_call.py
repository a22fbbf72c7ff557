"""A call of a transformer as what maps a noisy latent to the denoised one, which is forecast."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..merging.layout import Grid
from .latents import Latents
from .transformer_records import FlowTransformer

_CACHED = "as a cache keeps what blocks did from step to step"
_ELSEWHERE = "as its picture is found in other blocks than usual"
_PARALLEL = "as several devices share the tokens"
_OF_OTHER_KIND = "as it is called with {}"

_LEAST_NOISE = 1e-6
"""The share of noise in a latent that has none, which the answer is divided by."""


def why_in_modules(
    record: FlowTransformer,
    network: nn.Module,
    arguments: Mapping[str, Any],
    stacks: Sequence[str],
) -> str | None:
    """Why nothing wider than modules can merge in a call, None if it can.

    Args:
        record: of the transformer.
        network: the transformer.
        arguments: those of the call, by name.
        stacks: the names of the lists of blocks in whose sequences its picture was found.
    """
    if not record.blocks.keys() >= set(stacks):
        return _ELSEWHERE
    given = [name for name in record.absent if arguments.get(name) is not None]
    if given:
        return _OF_OTHER_KIND.format(given[0])
    if getattr(network, "_parallel_config", None) is not None:
        return _PARALLEL
    return _CACHED if any(map(_keeps, network.modules())) else None


def _keeps(module: nn.Module) -> bool:
    """Whether a hook of diffusers keeps what a module did, as caches do."""
    registry = getattr(module, "_diffusers_hook", None)
    return registry is not None and any(hook._is_stateful for hook in registry.hooks.values())


def timestep_of(arguments: Mapping[str, Any]) -> Any:
    """The timestep among the arguments of a transformer, 0 if it has none."""
    named = (arguments[name] for name in ("timestep", "t", "timesteps") if name in arguments)
    return next(named, 0)


def noise_share(record: FlowTransformer, timestep: Tensor) -> Tensor:
    """The share of noise in a latent at timesteps of a transformer, of their shape; never 0."""
    clean, noise = record.timesteps
    return ((timestep.float() - clean) / (noise - clean)).clamp_min(_LEAST_NOISE)


class FlowCall:
    """One call of a transformer, which predicts a flow."""

    def __init__(
        self,
        record: FlowTransformer,
        network: nn.Module,
        arguments: Mapping[str, Any],
        latents: Latents,
        grid: Grid,
    ):
        """Prepare a call.

        Args:
            record: of the transformer.
            network: the transformer.
            arguments: those of the call, by name, the latents first.
            latents: the first of these.
            grid: of the latent's tokens.
        """
        self._record, self._latents = record, latents
        self._grid = grid
        config: Any = network.config
        self._channels = config.get("out_channels") or config["in_channels"]
        if latents.are_tokens:
            self._channels *= config["patch_size"] ** 2
        self._timestep = timestep_of(arguments)

    @property
    def latent(self) -> Tensor:
        """That of the call."""
        return self._latent(self._latents)

    def denoised(self, noisy: Tensor, result: Any) -> Tensor:
        """The denoised latent, given what the transformer returned for a noisy one."""
        return noisy - self._noise(noisy) * self._latent(self._answer(result))

    def returned(self, latent: Tensor, denoised: Tensor, like: Any) -> Any:
        """What the transformer would return for a denoised latent, of the form of ``like``."""
        flow = (latent - denoised) / self._noise(latent)
        sample = self._answer(like).with_latent(flow, self._grid)
        if isinstance(like, tuple):
            return sample, *like[1:]
        return replace(like, sample=sample)

    def _answer(self, result: Any) -> Latents:
        """What the transformer returned, of the form of its latents."""
        return replace(self._latents, value=result[0])

    def _latent(self, latents: Latents) -> Tensor:
        return latents.latent(self._grid, self._channels, self._record.side)

    def _noise(self, latent: Tensor) -> Tensor:
        """By how much the answer is multiplied to give the noise in a latent; never 0."""
        timestep = torch.as_tensor(self._timestep, device=latent.device)
        timestep = timestep.reshape(len(timestep), -1).amax(1) if timestep.ndim > 1 else timestep
        share = noise_share(self._record, timestep).reshape(-1, *[1] * (latent.ndim - 1))
        clean, noise = self._record.timesteps
        return share if noise > clean else -share
