"""View a transformer's call as a map from a noisy latent to the denoised one, to forecast that.

The latent stays as the transformer gets it: as tokens, as a picture or as a video. A flow is
predicted for every one of its numbers, so nothing has to be known about its layout.
"""

import inspect
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import reasons
from .arguments import is_anything, total, traits

_FLOWS: Mapping[str, tuple[float, float]] = {
    "FluxTransformer2DModel": (0.0, 1.0),
    "Flux2Transformer2DModel": (0.0, 1.0),
    "SD3Transformer2DModel": (0.0, 1000.0),
    "QwenImageTransformer2DModel": (0.0, 1.0),
    "ZImageTransformer2DModel": (1.0, 0.0),
    "Lumina2Transformer2DModel": (1.0, 0.0),
    "WanTransformer3DModel": (0.0, 1000.0),
    "LTXVideoTransformer3DModel": (0.0, 1000.0),
    "HunyuanVideoTransformer3DModel": (0.0, 1000.0),
}
"""The classes of diffusers that predict a flow, which is how the latent changes as timesteps grow:
the timesteps of a latent without noise, and of pure noise."""

_OF_OTHER_FORM = ("additional_t_cond", "kv_cache_mode")
"""Arguments that change the form of the answer: it then holds more than the latent, as in
Qwen-Image-Layered, or leaves something out, as when Flux.2 keeps the keys of references."""

_TIMESTEP = ("timestep", "t")

_BY_VALUE = ("encoder_hidden_states", "pooled_projections", "cap_feats", "guidance")
"""Arguments whose values stay the same in a run: prompts and guidance. The values of others, such
as control, may change from step to step, unless they are 0."""


@dataclass(frozen=True, eq=False)
class FlowCall:
    """One call of a transformer that predicts a flow.

    Attributes:
        latent: the noisy latent in float32, ``[batch, tokens, channels]``, or
            ``[batch, channels, height, width]``, with frames before the height if it is a video.
        time: the share of noise in it, as the model is told.
        network: the model.
        others: the arguments besides the noisy latent and the timestep, by name.
        sign: 1, or -1 if timesteps grow as the noise falls.
        value: the argument that holds the latent.
    """

    latent: Tensor
    time: float
    network: nn.Module
    others: Mapping[str, Any]
    sign: int
    value: Any

    @property
    def conditions(self) -> Hashable:
        """Everything besides the noise that decides the answer, as far as the call shows."""
        return id(self.network), traits(
            self.others, lambda name: total if name in _BY_VALUE else is_anything
        )

    def denoised(self, result: Any, noise: float) -> Tensor:
        """The denoised latent that follows from what the model returned.

        ``noise`` is the noise level, as the scheduler has it.
        """
        sample = torch.stack(result[0]) if isinstance(result[0], list) else result[0]
        flow = sample[:, : self.latent.shape[1]].float()
        return self.latent - self.sign * noise * flow

    def returned(self, denoised: Tensor, noise: float, kind: Any) -> Any:
        """What the model would return for a denoised latent; undoes :meth:`denoised`.

        ``kind`` is the type of what it returns.
        """
        sample = self._predicted(denoised, noise)
        return (sample,) if issubclass(kind, tuple) else kind(sample=sample)

    def _predicted(self, denoised: Tensor, noise: float) -> Any:
        flow = (self.latent - denoised) / (self.sign * noise)
        if isinstance(self.value, list):
            return list(flow.to(self.value[0].dtype))
        # Pipelines drop what is returned for references.
        behind = self.value.shape[1] - flow.shape[1] if flow.ndim == 3 else 0
        return F.pad(flow, (0, 0, 0, behind)).to(self.value.dtype)


def flow_call(
    network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> FlowCall | reasons.Reason:
    """A call of a transformer of diffusers with some arguments, or why it cannot be forecast."""
    kinds: Any = type(network).__mro__
    own = next((kind for kind in kinds if kind.__module__.startswith("diffusers.")), None)
    if own is None or own.__name__ not in _FLOWS:
        return reasons.unknown_prediction(type(network).__name__)
    clean, noisy = _FLOWS[own.__name__]
    _, *names = inspect.signature(own.forward).parameters
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    value = given.get(names[0])
    latent = _latent(network, value, given)
    timestep = next((given[name] for name in _TIMESTEP if name in given), None)
    is_other = any(given.get(name) is not None for name in _OF_OTHER_FORM)
    if latent is None or timestep is None or is_other:
        return reasons.OTHER_FORM
    time = (float(torch.as_tensor(timestep).max()) - clean) / (noisy - clean)
    others = {
        name: argument for name, argument in given.items() if name not in (names[0], *_TIMESTEP)
    }
    return FlowCall(latent, time, network, others, 1 if noisy > clean else -1, value)


def _latent(network: Any, value: Any, given: Mapping[str, Any]) -> Tensor | None:
    """The noisy latent; None if it is of an unknown form.

    References behind its tokens are left out, and channels that say, for example, where to paint.
    ``value`` is the argument that holds the latent, and ``given`` all arguments by name.
    """
    if isinstance(value, list):
        shapes = {sample.shape if isinstance(sample, Tensor) else None for sample in value}
        return torch.stack(value).float() if len(shapes) == 1 and None not in shapes else None
    if not isinstance(value, Tensor):
        return None
    channels = network.config.get("out_channels") or network.config["in_channels"]
    if value.ndim == 3:
        channels *= network.config["patch_size"] ** 2
        return value[:, : _tokens(given), :channels].float()
    return value[:, :channels].float()


def _tokens(given: Mapping[str, Any]) -> int | None:
    """How many tokens the latent has, if an argument tells it apart from references behind it."""
    sizes, places = given.get("img_shapes"), given.get("img_ids")
    if sizes is not None:
        while not isinstance(sizes[0], int):
            sizes = sizes[0]
        return math.prod(sizes)
    if isinstance(places, Tensor):
        # The first coordinate counts the pictures.
        picture = places.flatten(0, -2)[: places.shape[-2], 0]
        return int((picture == picture[0]).sum())
    return None
