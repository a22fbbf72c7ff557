"""Check the inputs of the nodes, in a prompt and when a node runs."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy_execution.graph_utils import is_link

from ..settings.config import OPTIONS, ToMeConfig
from ..settings.options import OptionError, OptionTypeError, shown
from ..settings.presets import CUSTOM, FREE, PRESET, settings_of
from .node_texts import PATCH, Caption

LINKS = "links"
"""The made-up input at which ComfyUI reports a faulty link.

ComfyUI reports errors only at inputs that ``validate_inputs`` takes. It cannot take an unknown
input; and if it took a required one, ComfyUI would report that together with any other.
"""


def config_of(settings: str | None = None, **given: Any) -> ToMeConfig:
    """The settings that the inputs of the patch node stand for.

    ``settings`` is a JSON object of options, which override ``given``. An empty text counts as not
    given, and so does "None", which ComfyUI makes of null.

    Raises:
        OptionError: an option is not allowed, or would have no effect.
    """
    if settings is None or (isinstance(settings, str) and settings.strip() in ("", "None")):
        return _config_of(**given)
    options = _options_in(settings)
    if "preset" in options:
        # It decides all options that are not free.
        given = {name: value for name, value in given.items() if name in FREE}
    try:
        return _config_of(**{**given, **options})
    except OptionError as error:
        raise OptionError("settings", f"settings={shown(settings)}: {error}") from error


def _options_in(settings: str) -> dict[str, Any]:
    """The options in the input settings.

    Raises:
        OptionError: it is not a JSON object, or has an option that the node does not have.
    """
    try:
        options = json.loads(settings) if isinstance(settings, str) else None
    except (ValueError, RecursionError) as error:
        raise _fault_of_settings(settings, f"it is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise _fault_of_settings(settings, "it must be a JSON object of inputs by name")
    names = [option.name for option in PATCH.options]
    for name in options:
        if name not in names:
            raise _fault_of_settings(settings, f"there is no {name}; there are {', '.join(names)}")
    return options


def _fault_of_settings(settings: str, why: str) -> OptionError:
    return OptionError("settings", f"settings={shown(settings)} is not allowed: {why}")


def _config_of(preset: str = PRESET.default, **given: Any) -> ToMeConfig:
    # In the editor, all choices are strings.
    name = "max_downsample"
    if isinstance(given.get(name), str):
        choices = {str(choice): choice for choice in OPTIONS[name].choices}
        given[name] = choices.get(given[name], given[name])
    return ToMeConfig(**settings_of(preset, given))


def check(caption: Caption, inputs: Mapping[str, Any]) -> None:
    """Check that a running node got only inputs that it has, all of the right type.

    ComfyUI checks only that the types of a link's two ends fit, and some outputs fit any input.

    Raises:
        OptionError: an input is unknown or of another type. The message names the input, its value
            and what is allowed.
    """
    slots = {slot.name: slot for slot in caption.inputs}
    for name, value in inputs.items():
        if name in slots:
            slot = slots[name]
            is_left_out = value is None and slot.optional
            if not is_left_out and not _IS_OF_TYPE[slot.type](value):
                must = f"it must be of type {slot.type}"
                raise OptionTypeError(name, f"{name}={shown(value)} is not allowed: {must}")
        elif name not in caption.names:
            raise OptionError(name, _unknown(caption, name, shown(value)))


def options_of(caption: Caption, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a running node by name, from all of its inputs, which it checks.

    Raises:
        OptionError: as :func:`check`, or an option is not allowed.
    """
    check(caption, inputs)
    options = {option.name: inputs.get(option.name, option.default) for option in caption.options}
    for option in caption.options:
        option.check(options[option.name])
    return options


def fault(caption: Caption, inputs: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is wrong with a node in a prompt, where an input that is a list is a link.

    Returns the input at fault, which may be :data:`LINKS`, and an error message; None if ComfyUI
    itself finds all faults, or there are none.
    """
    message = _fault_of_links(caption, inputs)
    if message is not None:
        return LINKS, message
    # ComfyUI checks the options of the other nodes well enough.
    if caption is PATCH:
        try:
            config_of(**_known(inputs))
        except OptionError as error:
            return error.option, str(error)
    return None


def _known(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of the patch node whose values are known before the run."""
    known = {}
    if not isinstance(settings := _unwrapped(inputs.get("settings", [])), list):
        known["settings"] = settings
    for option in PATCH.options:
        value = _unwrapped(inputs.get(option.name, option.default))
        if not isinstance(value, list):
            # ComfyUI converts values too, and reports what it cannot convert.
            with suppress(TypeError, ValueError, OverflowError):
                known[option.name] = value if option.choices else type(option.default)(value)
        elif option is PRESET:
            # Any preset may arrive, so refuse only what no preset allows.
            known[option.name] = CUSTOM
    return known


def _unwrapped(value: Any) -> Any:
    """The value of an input; a prompt may wrap it to show that it is not a link."""
    return value.get("__value__", value) if isinstance(value, dict) else value


def _fault_of_links(caption: Caption, inputs: Mapping[str, Any]) -> str | None:
    """An error message if a node has a link to no input, or a value where a link belongs."""
    for slot in caption.inputs:
        value = inputs.get(slot.name, [])
        is_left_out = value is None and slot.optional
        if not (is_left_out or slot.is_text or isinstance(value, list)):
            must = f"it must be a link to an output of type {slot.type}"
            return f"{slot.name}={shown(value)} is not allowed: {must}"
    for name, value in inputs.items():
        if is_link(value) and name not in caption.names:
            return _unknown(caption, name, f"{value}")
    return None


def _unknown(caption: Caption, name: str, value: str) -> str:
    """The error message on an input that a node does not have."""
    names = ", ".join(caption.names)
    return f"{name}={value} is not allowed: {caption.name} has no such input; it has {names}"


def _is_pictures(value: Any) -> bool:
    return torch.is_tensor(value) and value.ndim == 4 and value.numel() > 0 and value.shape[-1] <= 4


_IS_OF_TYPE: Mapping[str, Callable[[Any], bool]] = {
    "MODEL": lambda value: isinstance(value, ModelPatcher),
    "STRING": lambda value: isinstance(value, str),
    # Of a latent, only its origin in the workflow matters.
    "LATENT": lambda value: True,
    "CONDITIONING": lambda value: isinstance(value, list),
    "IMAGE": _is_pictures,
}
"""Checks whether a value is of a type, by :attr:`Slot.type`."""
