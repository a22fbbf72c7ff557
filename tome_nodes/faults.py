"""What can be wrong with the inputs of the nodes, in a prompt and when a node runs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .captions import PATCH, Caption
from .config import ToMeConfig
from .hosts.comfyui import attachment, queue
from .options import OPTIONS, OptionError, OptionTypeError, told
from .presets import CUSTOM, PRESET, settings_of


def config_of(preset: str = PRESET.default, **given: Any) -> ToMeConfig:
    """The settings that the inputs of the patch node stand for.

    Raises:
        OptionError: an option is not allowed, or would not count.
    """
    # The choices of the editor are always strings.
    name = "max_downsample"
    if isinstance(given.get(name), str):
        choices = {str(choice): choice for choice in OPTIONS[name].choices}
        given[name] = choices.get(given[name], given[name])
    return ToMeConfig(**settings_of(preset, given))


def check(caption: Caption, inputs: Mapping[str, Any]) -> None:
    """Raise if a node that runs got an input that it does not have, or one of another type.

    The host compares only the types of the outputs and inputs that links join, and some outputs go
    to inputs of any type.

    Raises:
        OptionError: the message names the input, its value and what is allowed.
    """
    slots = {slot.name: slot for slot in caption.inputs}
    for name, value in inputs.items():
        if name in slots:
            slot = slots[name]
            is_left_out = value is None and slot.optional
            if not is_left_out and not _IS_OF_TYPE[slot.type](value):
                must = f"it must be of type {slot.type}"
                raise OptionTypeError(name, f"{name}={told(value)} is not allowed: {must}")
        elif name not in caption.names:
            raise OptionError(name, _unknown(caption, name, told(value)))


def find(caption: Caption, inputs: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is wrong with a node in a prompt.

    Args:
        caption: that of the node.
        inputs: its inputs. A list is a link, whose value is not known before the run.

    Returns:
        The input at fault, which may be :data:`queue.LINKS`, and an error message; None if there is
        nothing that the host would not find.
    """
    if (message := _fault_of_links(caption, inputs)) is not None:
        return queue.LINKS, message
    # The host checks the options of the other nodes well enough.
    return fault_of_options(inputs) if caption is PATCH else None


def fault_of_options(inputs: Mapping[str, Any]) -> tuple[str, str] | None:
    """The option of the patch node at fault and an error message, None if all are valid."""
    known: dict[str, Any] = {}
    for option in PATCH.options:
        if option.name not in inputs:
            continue
        value = inputs[option.name]
        if isinstance(value, list):
            if option is PRESET:
                # Any preset is possible, so only refuse what no preset allows.
                known[option.name] = CUSTOM
            continue
        if isinstance(value, dict):
            # Prompts may wrap a value like this to show that it is not a link.
            value = value.get("__value__", value)
        # The host converts values too, and reports those that it cannot convert.
        try:
            known[option.name] = value if option.choices else type(option.default)(value)
        except (TypeError, ValueError, OverflowError):
            return None
    try:
        config_of(**known)
    except OptionError as error:
        return error.option, str(error)
    return None


def _fault_of_links(caption: Caption, inputs: Mapping[str, Any]) -> str | None:
    """An error message if a node has a link too many, or a value in place of one."""
    for slot in caption.inputs:
        value = inputs.get(slot.name, [])
        is_left_out = value is None and slot.optional
        if not is_left_out and not isinstance(value, list):
            must = f"it must be a link to an output of type {slot.type}"
            return f"{slot.name}={told(value)} is not allowed: {must}"
    for name, link in queue.links(inputs).items():
        if name not in caption.names:
            return _unknown(caption, name, f"{link}")
    return None


def _unknown(caption: Caption, name: str, value: str) -> str:
    """The error message on an input that a node does not have."""
    names = ", ".join(caption.names)
    return f"{name}={value} is not allowed: {caption.name} has no such input; it has {names}"


def _is_pictures(value: Any) -> bool:
    return torch.is_tensor(value) and value.ndim == 4 and value.numel() > 0 and value.shape[-1] <= 4


_IS_OF_TYPE: Mapping[str, Callable[[Any], bool]] = {
    "MODEL": attachment.is_model,
    # Where it comes from is all that is asked of it.
    "LATENT": lambda value: True,
    "IMAGE": _is_pictures,
}
"""Whether a value is of a type of inputs."""
