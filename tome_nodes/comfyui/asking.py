"""Ask a transformer of the host that has no record where its picture is.

See :mod:`tome_nodes.patching.answer`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from comfy.model_management import InterruptProcessingException
from torch import Tensor, nn

from ..merging.picture_search import changed
from ..patching.answer import Answer, compared, form_of, kept_answer, sides_of
from ..patching.blocks import uncompiled
from ..patching.tokenwise import TokenwiseEvaluation
from .attention import OVERRIDE
from .models.base import Inputs

Evaluate = Callable[[Tensor, Mapping[str, Any], dict[str, Any]], Any]
"""Evaluates the host's model on a latent, under conditions and transformer options."""

_OTHERS = ("wrappers", "callbacks", "patches", "patches_replace", OVERRIDE)
"""Transformer options of other nodes, which have nothing to do with what is asked."""

_PLAIN = (bool, int, float, str, Tensor, list, tuple)
"""Types of transformer options that cannot be a memory of the model."""


def ask(
    model: Any,
    latent: Tensor,
    inputs: Inputs,
    others: Sequence[Tensor | None],
    options: Mapping[str, Any],
    evaluate: Evaluate,
) -> Answer:
    """Where the pictures of a model are; an earlier answer, if there is one for such inputs.

    Args:
        model: a BaseModel of the host.
        latent: as the host's model gets it; with sound, both are packed into one.
        inputs: the shape of the latent, and the conditions.
        others: what else the model gets, such as the text.
        options: the transformer options.
        evaluate: evaluates the host's model, without the wrappers of other nodes.
    """
    network = uncompiled(model.diffusion_model)
    form = form_of((inputs.shape, inputs.conditions, others))
    return kept_answer(
        network, form, lambda: _asked(model, network, latent, inputs, options, evaluate)
    )


def _asked(
    model: nn.Module,
    network: nn.Module,
    latent: Tensor,
    inputs: Inputs,
    options: Mapping[str, Any],
    evaluate: Evaluate,
) -> Answer:
    name = type(network).__name__
    if len(inputs.shape) not in (4, 5):
        return Answer(obstacle=f"a {name} makes no picture")
    own = {
        key: value
        for key, value in options.items()
        if key not in _OTHERS and isinstance(value, _PLAIN)
    }
    references = _references(inputs)

    def watched(latent: Tensor, others: Mapping[str, Any]) -> TokenwiseEvaluation:
        evaluation = _Tokenwise(model, network)
        with evaluation.installed():
            evaluate(latent, {**inputs.conditions, **others}, evaluation.options(own))
        return evaluation

    def evaluations() -> Iterator[TokenwiseEvaluation]:
        yield watched(latent, {})
        yield watched(_changed_latent(latent, inputs.shape), {})
        if references:
            yield watched(latent, _changed_all(references))

    return compared(
        name,
        lambda: [*evaluations()],
        sides_of(inputs.shape),
        [sides_of(each.shape) for value in references.values() for each in _tensors(value)],
        len(latent),
        network,
        latent.device,
        (InterruptProcessingException,),
    )


class _Tokenwise(TokenwiseEvaluation):
    """Follows attention through the transformer options."""

    unreached = (
        "does not hand the transformer options to its attention, or attends outside of its blocks"
    )

    def options(self, options: dict[str, Any], are_own: bool = False) -> dict[str, Any]:
        """Transformer options for the evaluation, or ``are_own``, for one of its blocks."""

        def override(func: Any, *args: Any, **kwargs: Any) -> Tensor:
            return self.attention(are_own, *args, **kwargs)

        return options | {OVERRIDE: override}

    def given(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = kwargs.get("transformer_options")
        if options is None:
            return kwargs
        return kwargs | {"transformer_options": self.options(options, are_own=True)}


def _references(inputs: Inputs) -> dict[str, Any]:
    """The conditions that are latents like the one that is sampled, or lists of them, by name."""
    channels = inputs.shape[1]

    def is_latent(value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.ndim in (4, 5)
            and value.shape[1] == channels
        )

    found = {}
    for name, value in inputs.conditions.items():
        each = _tensors(value)
        if each and all(map(is_latent, each)):
            found[name] = value
    return found


def _tensors(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _changed_all(references: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [changed(each) for each in value] if isinstance(value, list) else changed(value)
        for name, value in references.items()
    }


def _changed_latent(latent: Tensor, shape: Sequence[int]) -> Tensor:
    """The latent with its pixels changed, but not the sound that it is packed with."""
    if latent.ndim > 3:
        return changed(latent)
    size = prod(shape[1:])
    picture = changed(latent[..., :size].reshape(len(latent), *shape[1:]))
    return torch.cat([picture.flatten(1).view_as(latent[..., :size]), latent[..., size:]], -1)
