"""What earlier versions had and this one does not, so that what was saved with it goes on working.

All hosts read what a user gave through :func:`current`.
"""

from collections.abc import Mapping
from typing import Any

from .options import MERGE_MAP, OptionError, is_plain, shown

PRESETS: Mapping[str, str] = {"quality": "balanced"}
"""Presets that are gone, and what they are read as: it takes as long, and hardly differs."""

VIEWS: Mapping[str, str] = {"heat map": MERGE_MAP}
"""Views of ToMe Report that are gone, and what they are read as."""

OPTIONS: Mapping[str, tuple[Any, str]] = {
    "st": (
        0,
        "the number of frames decides how many frames a cell spans, as it did with 0; leave st out",
    )
}
"""Options that are gone: the default, at which they are ignored, and what to do otherwise."""

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
            default, why = OPTIONS[name]
            if not (is_plain(value) and value == default):
                raise OptionError(name, f"{name}={shown(value)} is not allowed: {why}")
        elif name == "preset" and isinstance(value, str):
            options[name] = PRESETS.get(value, value)
        else:
            options[name] = value
    return options
