"""Ask a ComfyUI transformer without a record where its pictures are.

See :mod:`tome_nodes.patching.answer`.
"""

from collections.abc import Callable, Mapping, Sequence
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
"""Evaluates ComfyUI's model, given a latent, conditions and transformer options."""

_OF_OTHER_NODES = ("wrappers", "callbacks", "patches", "patches_replace", OVERRIDE)
"""Transformer options that hold code of other nodes; the question leaves them out."""

_PLAIN = (bool, int, float, str, Tensor, list, tuple)
"""Types of transformer options in which a model cannot keep state from call to call."""


def ask(
    model: Any,
    latent: Tensor,
    inputs: Inputs,
    others: Sequence[Tensor | None],
    options: Mapping[str, Any],
    evaluate: Evaluate,
) -> Answer:
    """Where the pictures of a model are; an earlier answer, if one is kept for such inputs.

    Args:
        model: a BaseModel of ComfyUI.
        latent: the latent as the model gets it, packed together with sound if there is any.
        inputs: the shape of the latent, and the conditions.
        others: what else the model gets, such as the text.
        options: the transformer options.
        evaluate: evaluates the model, without the wrappers of other nodes.
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
        if key not in _OF_OTHER_NODES and isinstance(value, _PLAIN)
    }
    references = _references(inputs)

    def watched(latent: Tensor, others: Mapping[str, Any]) -> TokenwiseEvaluation:
        evaluation = _Tokenwise(model, network)
        with evaluation.installed():
            evaluate(latent, {**inputs.conditions, **others}, evaluation.options(own))
        return evaluation

    def evaluations() -> list[TokenwiseEvaluation]:
        found = [watched(latent, {}), watched(_changed_latent(latent, inputs.shape), {})]
        if references:
            found.append(watched(latent, _changed_all(references)))
        return found

    return compared(
        name,
        evaluations,
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
        """Transformer options under which attention is followed.

        ``are_own`` tells whether they are for one block, or for the whole evaluation.
        """

        def override(func: Any, *args: Any, **kwargs: Any) -> Tensor:
            return self.attention(are_own, *args, **kwargs)

        return options | {OVERRIDE: override}

    def given(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = kwargs.get("transformer_options")
        if options is None:
            return kwargs
        return kwargs | {"transformer_options": self.options(options, are_own=True)}


def _references(inputs: Inputs) -> dict[str, Any]:
    """The reference pictures among the conditions, by name.

    They are latents, or lists of latents, with as many channels as the sampled one.
    """
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
    """The latent with changed pixels; sound that is packed with it stays as it is."""
    if latent.ndim > 3:
        return changed(latent)
    size = prod(shape[1:])
    picture = changed(latent[..., :size].reshape(len(latent), *shape[1:]))
    return torch.cat([picture.flatten(1).view_as(latent[..., :size]), latent[..., size:]], -1)
