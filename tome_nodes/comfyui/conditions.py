"""What decides the answers of a step, besides the noise.

A forecast goes on only while it stays the same. It is read from the guider, and follows ComfyUI's
``get_area_and_mult`` and ``ControlBase.get_control``.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

_GUIDANCE = ("sampler_cfg_function", "sampler_pre_cfg_function", "sampler_post_cfg_function")
"""The model options with functions that see or change the parts of a guided answer."""


def conditions_of(guider: Any, options: Mapping[str, Any], sigma: float) -> Hashable:
    """The active conditions with their control and hooks, and the ranges of functions.

    Args:
        guider: the guider of the run, within its wrappers.
        options: the model options of the answer.
        sigma: the noise level that the model is told.
    """
    prompts: Mapping[str, Any] = getattr(guider, "conds", None) or {}
    active = [
        (name, *_of_condition(condition, sigma))
        for name, of_name in sorted(prompts.items())
        for condition in of_name or ()
        if _is_active(condition, sigma)
    ]
    return tuple(active), tuple(_ranges(options, sigma))


def names_of(conditions: Iterable[Mapping[str, Any]]) -> tuple[Hashable, ...]:
    """What tells some conditions from others."""
    return tuple(condition.get("uuid", id(condition)) for condition in conditions)


def _ranges(options: Mapping[str, Any], sigma: float) -> Iterator[Hashable]:
    """For each function with a bound on the noise, whether the noise is above it.

    Such functions guide, or change the inside of the model. Their bounds are kept nowhere but in
    what they hold, by names such as ``sigma_start``.
    """
    for function in (*_guidance(options), *_patches(options)):
        for name, value in _kept_by(function):
            if "sigma" in name:
                yield sigma >= value


def _guidance(options: Mapping[str, Any]) -> Iterator[Any]:
    for name in _GUIDANCE:
        functions = options.get(name) or ()
        yield from functions if isinstance(functions, list) else [functions]


def _patches(options: Mapping[str, Any]) -> Iterator[Any]:
    """The functions that change the inside of the model, such as those of an IP-Adapter."""
    changes = options.get("transformer_options") or {}
    for functions in (changes.get("patches") or {}).values():
        yield from functions
    for replacements in (changes.get("patches_replace") or {}).values():
        yield from replacements.values()
    if (wrapper := options.get("model_function_wrapper")) is not None:
        yield wrapper


def _kept_by(function: Any) -> Iterator[tuple[str, float]]:
    """The numbers that a function keeps: in its closure, its attributes, or given in advance."""
    owner = getattr(function, "__self__", function)
    given = function.keywords if isinstance(function, partial) else {}
    for kept in (_enclosed(function), getattr(owner, "__dict__", {}).items(), given.items()):
        for name, value in kept:
            yield from _numbers(name, value)


def _numbers(name: str, value: Any, deep: int = 2) -> Iterator[tuple[str, float]]:
    """A number by its name, or those in lists and mappings, one in another at most ``deep`` times.

    Some nodes keep all that they were given in one mapping.
    """
    if isinstance(value, int | float):
        yield name, value
    elif deep and isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(str(key), part, deep - 1)
    elif deep and isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(name, part, deep - 1)


def _enclosed(function: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of the variables that a function has from the one around it."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        # A cell is empty until its variable has a value.
        with suppress(ValueError):
            yield name, cell.cell_contents


def _of_condition(condition: Mapping[str, Any], sigma: float) -> Iterator[Hashable]:
    yield condition.get("uuid", id(condition))
    yield from _control(condition.get("control"), sigma)
    yield from _hooks(condition.get("hooks"), sigma)


def _is_active(condition: Mapping[str, Any], sigma: float) -> bool:
    start, end = condition.get("timestep_start"), condition.get("timestep_end")
    return not (start is not None and sigma > start) and not (end is not None and sigma < end)


def _control(control: Any, sigma: float) -> Iterator[Hashable]:
    """Whether the ControlNets of a chain are in their ranges, and their strengths."""
    while control is not None:
        span = getattr(control, "timestep_range", None)
        yield span is None or span[1] <= sigma <= span[0]
        yield getattr(control, "strength", None)
        control = getattr(control, "previous_controlnet", None)


def _hooks(group: Any, sigma: float) -> Iterator[Hashable]:
    """The strengths of the hooks of a group, such as a LoRA that comes in by percent."""
    for hook in getattr(group, "hooks", ()):
        keyframes = getattr(getattr(hook, "hook_keyframe", None), "keyframes", ())
        begun = [keyframe.strength for keyframe in keyframes if keyframe.start_t >= sigma]
        yield begun[-1] if begun else None
