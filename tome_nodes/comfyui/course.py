"""What decides the guided answer of a step, besides the noise: the course of a sampling run.

A forecast goes on only while it stays the same. It is read from the guider, and follows ComfyUI's
``get_area_and_mult`` and ``ControlBase.get_control``.
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any


def course_of(guider: Any, sigma: float) -> Hashable:
    """The guidance scales, the active conditions, their control, and the strengths of their hooks.

    Args:
        guider: the guider of the run, within its wrappers.
        sigma: the noise level that the model is told.
    """
    scales = [
        (name, value)
        for name, value in sorted(vars(guider).items())
        if isinstance(value, int | float)
    ]
    conditions: Mapping[str, Any] = getattr(guider, "conds", None) or {}
    active = [
        (name, *_of_condition(each, sigma))
        for name, several in sorted(conditions.items())
        for each in several or ()
        if _is_active(each, sigma)
    ]
    return tuple(scales), tuple(active)


def _of_condition(condition: Mapping[str, Any], sigma: float) -> Iterator[Hashable]:
    yield condition.get("uuid", id(condition))
    yield from _control(condition.get("control"), sigma)
    yield from _hooks(condition.get("hooks"), sigma)


def _is_active(condition: Mapping[str, Any], sigma: float) -> bool:
    start, end = condition.get("timestep_start"), condition.get("timestep_end")
    return not (start is not None and sigma > start) and not (end is not None and sigma < end)


def _control(control: Any, sigma: float) -> Iterator[Hashable]:
    """Whether each ControlNet of a chain is in its range, and its strength."""
    while control is not None:
        span = getattr(control, "timestep_range", None)
        yield span is None or span[1] <= sigma <= span[0]
        yield getattr(control, "strength", None)
        control = getattr(control, "previous_controlnet", None)


def _hooks(group: Any, sigma: float) -> Iterator[Hashable]:
    """The strength of each hook of a group, such as a LoRA that comes in by percent."""
    for hook in getattr(group, "hooks", ()):
        keyframes = getattr(getattr(hook, "hook_keyframe", None), "keyframes", ())
        begun = [each.strength for each in keyframes if each.start_t >= sigma]
        yield begun[-1] if begun else None
