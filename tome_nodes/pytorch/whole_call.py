"""A call of a transformer as what maps a noisy latent to the denoised one.

So the transformer can run as a whole on merged tokens: its latent is averaged before it, and the
denoised one after it (:mod:`tome_nodes.patching.whole_model`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip

from ..merging.layout import Picture
from ..patching.whole_model import WholeModel
from .latents import Latents
from .transformer_records import WholeTransformer

_CACHED = "as a cache keeps what blocks did from step to step"
_ELSEWHERE = "as its picture is found in other blocks than usual"
_PARALLEL = "as several devices share the tokens"
_OF_OTHER_KIND = "as it is called with {}"

_LEAST_NOISE = 1e-6
"""The share of noise in a latent that has none, which the answer is divided by."""


def why_in_modules(
    record: WholeTransformer,
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


def noise_share(record: WholeTransformer, timestep: float) -> float:
    """The share of noise in a latent at a timestep of a transformer; never 0."""
    clean, noise = record.timesteps
    return max((timestep - clean) / (noise - clean), _LEAST_NOISE)


class WholeCall:
    """One call of a transformer, which predicts a flow."""

    def __init__(
        self,
        record: WholeTransformer,
        network: nn.Module,
        arguments: Mapping[str, Any],
        latents: Latents,
        pictures: Sequence[Picture],
    ):
        """Prepare a call.

        Args:
            record: of the transformer.
            network: the transformer.
            arguments: those of the call, by name, the latents first.
            latents: the first of these.
            pictures: those in the sequence, the latent first.
        """
        self._record, self._latents = record, latents
        self._name = next(iter(arguments))
        self._grid = pictures[0].grid
        config: Any = network.config
        self._channels = config.get("out_channels") or config["in_channels"]
        if latents.are_tokens:
            self._channels *= config["patch_size"] ** 2
        self._timestep = timestep_of(arguments)

    # Of what surrounds the transformer's forward, torch.compile traces nothing.
    @skip
    def run(
        self,
        whole: WholeModel,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What the transformer returns, on merged tokens.

        Args:
            whole: merges them.
            forward: calls the transformer without merging.
            args: those of the call.
            kwargs: the same by name.
        """
        latent, noisy, entering = self._entering(whole)
        if args:
            result = forward(entering, *args[1:], **kwargs)
        else:
            result = forward(**{**kwargs, self._name: entering})
        leaving = self._leaving(whole, latent, noisy, result)
        return forward(*args, **kwargs) if leaving is None else leaving

    @torch.compiler.disable
    def _entering(self, whole: WholeModel) -> tuple[Tensor, Tensor, Any]:
        """The latent of the call, the same with merged tokens, and that as it is passed."""
        latent = self.latent
        noisy = whole.entering(latent)
        return latent, noisy, self._latents.with_latent(noisy, self._grid)

    @torch.compiler.disable
    def _leaving(self, whole: WholeModel, latent: Tensor, noisy: Tensor, result: Any) -> Any:
        """What the transformer returns; None if it has to run on all tokens.

        Args:
            whole: merged the tokens.
            latent: that of the call.
            noisy: the same with merged tokens.
            result: what the transformer returned for that.
        """
        of_noisy = self.denoised(noisy, result)
        denoised = whole.leaving(latent, of_noisy)
        if denoised is None:
            return None
        return result if denoised is of_noisy else self.returned(latent, denoised, result)

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
        clean, noise = self._record.timesteps
        timestep = torch.as_tensor(self._timestep, device=latent.device, dtype=torch.float32)
        timestep = timestep.reshape(len(timestep), -1).amax(1) if timestep.ndim > 1 else timestep
        share = ((timestep - clean) / (noise - clean)).clamp_min(_LEAST_NOISE)
        direction = 1.0 if noise > clean else -1.0
        return direction * share.reshape(-1, *[1] * (latent.ndim - 1))
