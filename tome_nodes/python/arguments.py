"""The arguments of a model's call."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

TIMESTEPS = 1000
"""The number of noise levels to assume for a UNet that does not say how many it was trained on."""


Look = Callable[[Tensor], Tensor]
"""Returns a number that changes where the values of a tensor do."""


def total(tensor: Tensor) -> Tensor:
    """The sum of a tensor."""
    return tensor.sum(dtype=torch.float32)


def is_anything(tensor: Tensor) -> Tensor:
    """1 if anything in a tensor is not 0; else 0."""
    return tensor.any().float()


def traits(given: Mapping[Any, Any], look_of: Callable[[Any], Look]) -> Hashable:
    """What has to stay the same of the arguments of a call, so that the next one is alike.

    ``look_of`` returns how to look at the tensors of an argument of this name or position. The
    device is waited for once.
    """
    seen: list[Tensor] = []
    forms = tuple((name, _form(value, look_of(name), seen)) for name, value in given.items())
    if not seen:
        return forms
    return forms, *torch.stack([each.to(seen[0].device) for each in seen]).tolist()


def _form(value: Any, look: Look, seen: list[Tensor]) -> Hashable:
    if isinstance(value, Tensor):
        seen.append(look(value))
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((key, _form(part, look, seen)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(_form(part, look, seen) for part in value)
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
