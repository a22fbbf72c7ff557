"""A call of a model, viewed as a map from a noisy latent to the denoised one."""

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

TIMESTEPS = 1000
"""The number of noise levels to assume for a UNet that does not say how many it was trained on."""


@dataclass(frozen=True, eq=False)
class ModelCall:
    """One call of a model that denoises a latent.

    Attributes:
        latent: the noisy latent in float32, ``[batch, ...]``.
        time: the timestep that the model is told, as a share of the last one of training.
        network: the model.
        others: the arguments besides the noisy latent and the timestep, by name or position.
    """

    latent: Tensor
    time: float
    network: nn.Module
    others: Mapping[Any, Any]

    @property
    def conditions(self) -> Hashable:
        """Everything besides the noise that decides the answer, as far as the call shows."""
        traits = (
            (name, _trait(given, self.is_steady(name))) for name, given in self.others.items()
        )
        return id(self.network), *traits

    def is_steady(self, name: Hashable) -> bool:
        """Whether the values of an argument have to stay the same in a run; else only its form."""
        raise NotImplementedError

    def denoised(self, result: Any, noise: float) -> Tensor | None:
        """The denoised latent that follows from what the model returned; None if it does not.

        ``noise`` is the noise level, as the scheduler has it.
        """
        raise NotImplementedError

    def returned(self, denoised: Tensor, noise: float, kind: Any) -> Any:
        """What the model would return for a denoised latent; undoes :meth:`denoised`.

        ``kind`` is the type of what it returns.
        """
        sample = self.predicted(denoised, noise)
        return (sample,) if issubclass(kind, tuple) else kind(sample=sample)

    def predicted(self, denoised: Tensor, noise: float) -> Any:
        """What the model predicts of a denoised latent: its sample, in its form and dtype."""
        raise NotImplementedError


def _trait(value: Any, by_value: bool) -> Hashable:
    """What has to stay the same of an argument from step to step.

    ``by_value`` is whether its tensors have to; else only their shapes.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), float(value.float().sum()) if by_value else None
    if isinstance(value, Mapping):
        return tuple((key, _trait(part, by_value)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(_trait(part, by_value) for part in value)
    plain: Any = value if isinstance(value, int | float | str | None) else type(value)
    return plain


def first_two_arguments(
    network: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The sample and the timestep of a UNet's call, passed by position or by name; None if missing.

    Other code may have replaced ``forward`` by a function with other argument names, or with none.
    """
    own = list(inspect.signature(type(network).forward).parameters)[1:3]
    replaced = list(inspect.signature(network.forward).parameters)[:2]
    named = [
        next((kwargs[name] for name in names if name in kwargs), None)
        for names in zip_longest(own, replaced)
    ]
    given = [*args[:2], *named[len(args) :], None, None]
    return given[0], given[1]
