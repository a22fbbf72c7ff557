"""Check the inputs of the nodes, in a prompt and when a node runs."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy_execution.graph_utils import is_link

from ..settings.config import OPTIONS, ToMeConfig
from ..settings.options import OptionError, OptionTypeError, shown
from ..settings.presets import CUSTOM, FREE, PRESET, settings_of
from .node_texts import PATCH, Caption


def config_of(settings: str | None = None, **given: Any) -> ToMeConfig:
    """The settings that the inputs of the patch node stand for.

    ``settings`` is a JSON object of options, which override ``given``. An empty text counts as not
    given, and so does "None", into which ComfyUI turns null.

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
    """The options in the input ``settings``.

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


def fault(caption: Caption, inputs: Mapping[str, Any], nodes: Collection[str]) -> str | None:
    """An error message on a node in a prompt, whose values ComfyUI has converted.

    ``nodes`` are the ids of the prompt's nodes. None if nothing is wrong, or if ComfyUI reports the
    error itself.
    """
    for slot in caption.inputs:
        value = inputs.get(slot.name)
        is_left_out = slot.name not in inputs or (value is None and slot.optional)
        if not (is_left_out or slot.is_text or is_link(value)):
            must = f"it must be a link to an output of type {slot.type}"
            return f"{slot.name}={shown(value)} is not allowed: {must}"
    for name, value in inputs.items():
        if not is_link(value):
            continue
        # ComfyUI would follow a link to an unknown input; it drops any other value.
        if name not in caption.names:
            return _unknown(caption, name, f"{value}")
        if value[0] not in nodes:
            return f"{name}={value} is not allowed: there is no node {shown(value[0])}"
    # ComfyUI checks the options of the other nodes well enough.
    return _contradiction(inputs) if caption is PATCH else None


def _contradiction(inputs: Mapping[str, Any]) -> str | None:
    names = [name for name in PATCH.names if name in inputs and name != "model"]
    known = {name: inputs[name] for name in names if not is_link(inputs[name])}
    if PRESET.name in names:
        # Any preset may come over a link, so refuse only what no preset allows.
        known.setdefault(PRESET.name, CUSTOM)
    try:
        config_of(**known)
    except OptionTypeError:
        # ComfyUI has reported it: it could not convert the value.
        return None
    except OptionError as error:
        return str(error)
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
