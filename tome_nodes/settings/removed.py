"""What earlier versions had and this one does not, so that what was saved with it goes on working.

All hosts read what a user gave through :func:`current`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .options import MERGE_MAP, OptionError, is_plain, shown

PRESETS: Mapping[str, str] = {"quality": "balanced"}
"""Presets that are gone, and what they are read as: it takes as long, and hardly differs."""

VIEWS: Mapping[str, str] = {"heat map": MERGE_MAP}
"""Views of ToMe Report that are gone, and what they are read as."""


@dataclass(frozen=True)
class Removed:
    """An option that is gone.

    Attributes:
        default: the value at which it is ignored.
        followed_by: the option after it in workflow files, a switch where it was a number.
        why: why other values are not allowed.
    """

    default: int
    followed_by: str
    why: str


OPTIONS: Mapping[str, Removed] = {
    "st": Removed(
        0,
        "use_rand",
        "the number of frames decides how many frames a cell spans, as it did with 0",
    ),
    "refresh_steps": Removed(
        0,
        "forecast",
        "no step runs on all tokens any more; instead, preset fast merges only keys and values in "
        "the largest maps",
    ),
}
"""Options that are gone, in the order of workflow files."""

_INSTEAD: Mapping[str, Mapping[str, str]] = {
    "scope": {"block": "stack"},
    "strategy": {"pool": "window"},
    "attn_tokens": {"q": "k,v"},
}
"""By option, the values that are gone, and what to take instead."""


def current(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that may be of an earlier version, the preset among them, as this one has them.

    Raises:
        OptionError: an option or a value is gone. The message says what to take instead.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        # Values of other types, such as lists, may have no hash.
        instead = _INSTEAD.get(name, {}).get(value) if isinstance(value, str) else None
        if instead is not None:
            raise OptionError(
                name, f"{name}={shown(value)} is gone: take {name}={instead!r} instead"
            )
        if name in OPTIONS:
            gone = OPTIONS[name]
            if not (is_plain(value) and value == gone.default):
                raise OptionError(
                    name,
                    f"{name}={shown(value)} is not allowed: {gone.why}; leave {name} out",
                )
        elif name == "preset" and isinstance(value, str):
            options[name] = PRESETS.get(value, value)
        else:
            options[name] = value
    return options
