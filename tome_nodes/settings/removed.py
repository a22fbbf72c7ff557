"""What earlier versions had and this one does not, so that what was saved with it goes on working.

All hosts read what a user gave through :func:`current`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .options import OptionError, is_plain, shown

OPTIONS: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "st": (
            0,
            "the number of frames decides how many frames a cell spans, as it did with 0; leave st "
            "out",
        )
    }
)
"""Options that are gone: the default, at which each is ignored, and what to take instead."""

_INSTEAD: Mapping[tuple[str, Any], str] = MappingProxyType(
    {("scope", "block"): "stack", ("strategy", "pool"): "window", ("attn_tokens", "q"): "k,v"}
)
"""Values that are gone, by the name of their option, and what to take instead."""

_READ_AS: Mapping[tuple[str, Any], str] = MappingProxyType({("preset", "quality"): "balanced"})
"""Values that are gone, and those as which they are read: they take as long, and hardly differ."""


def current(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that may be of an earlier version, the preset among them, as this one has them.

    Raises:
        OptionError: an option or a value is gone. The message says what to take instead.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        # Other values, such as lists, may have no hash.
        known = (name, value if is_plain(value) else None)
        if name in OPTIONS:
            default, instead = OPTIONS[name]
            if not (is_plain(value) and value == default):
                raise OptionError(name, f"{name}={shown(value)} is not allowed: {instead}")
        elif known in _INSTEAD:
            raise OptionError(
                name, f"{name}={shown(value)} is gone: take {name}={_INSTEAD[known]!r} instead"
            )
        else:
            found[name] = _READ_AS.get(known, value)
    return found
