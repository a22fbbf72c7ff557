"""Named settings: points on the front of speed against likeness in `benchmarks/FIDELITY.md`.

A preset says how to merge; how much, when and with which seed stay free.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .config import RANGES, ToMeConfig

FREE = ("ratio", "seed", "start_percent", "end_percent", "backend")
"""The options that no preset decides."""

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "quality": {"strategy": "window", "attn_tokens": "k,v"},
        "balanced": {"strategy": "window", "attn_tokens": "k,v", "sx": 4},
        "fast": {"strategy": "window", "scope": "stack", "reuse_steps": 1},
        "paper": {"max_downsample": 1, "min_tokens": 1, "proportional_attn": False},
    }
)
"""The options that each sets; all others but those in :data:`FREE` have their defaults."""

CUSTOM = "custom"
"""The name of no preset: every option is as given."""

AS_FAST = frozenset({"balanced"})
"""The presets whose ratio is that of the paper which takes as long; see :func:`keys_to_merge`."""

# Measured, see `benchmarks/FIDELITY.md`; by the count of products it would be 1.5.
_POWER = 1.45


def settings_of(preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of :class:`tome_nodes.config.ToMeConfig` that a preset stands for.

    Args:
        preset: one of :data:`PRESETS`, or :data:`CUSTOM`.
        given: options; those that the preset decides do not count.

    Raises:
        TypeError: an option that counts has the wrong type.
        ValueError: no such preset, or an option that counts is out of range.
    """
    if preset == CUSTOM:
        return dict(given)
    if preset not in PRESETS:
        raise ValueError(
            f"preset={preset!r} is not allowed: it must be one of {[*PRESETS, CUSTOM]}"
        )
    free = {name: value for name, value in given.items() if name in FREE}
    # An error is to tell the ratio as it was given.
    ratio = ToMeConfig(**free).ratio
    if preset in AS_FAST:
        free["ratio"] = keys_to_merge(ratio)
    return {**free, **PRESETS[preset]}


def keys_to_merge(ratio: float) -> float:
    """The share of keys and values alone that saves about what ``ratio`` of all tokens does.

    Attention takes time by queries times keys. Where all queries stay, fewer keys may.
    """
    return min(1 - (1 - ratio) ** _POWER, RANGES["ratio"][1])
