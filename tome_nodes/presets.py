"""Named settings: points on the front of speed against likeness in `benchmarks/FIDELITY.md`.

A preset says how to merge; how much, when and with which seed stay free.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .config import RANGES, ToMeConfig

FREE = ("ratio", "seed", "start_percent", "end_percent", "backend")
"""The options that no preset decides."""

CUSTOM = "custom"
"""The name of no preset: every option is as given."""


@dataclass(frozen=True)
class Preset:
    """How to merge.

    Attributes:
        options: those that it sets; all others except those in :data:`FREE` have their defaults.
        takes_time_of_ratio: whether a ratio stands for the time that the paper's method takes at
            it, and the keys and values that come to that time merge; see :func:`keys_to_merge`.
    """

    options: Mapping[str, Any]
    takes_time_of_ratio: bool = False

    def settings(self, free: Mapping[str, Any]) -> dict[str, Any]:
        """The options of :class:`tome_nodes.config.ToMeConfig` that it stands for.

        Args:
            free: options of those in :data:`FREE`, valid ones.
        """
        settings = {**free, **self.options}
        if self.takes_time_of_ratio:
            settings["ratio"] = keys_to_merge(ToMeConfig(**free).ratio)
        return settings


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "quality": Preset({"strategy": "window", "attn_tokens": "k,v"}),
        "balanced": Preset(
            {"strategy": "window", "attn_tokens": "k,v", "sx": 4}, takes_time_of_ratio=True
        ),
        "fast": Preset({"strategy": "window", "scope": "stack", "reuse_steps": 1}),
        "paper": Preset({"max_downsample": 1, "min_tokens": 1, "proportional_attn": False}),
    }
)
"""The presets by name."""

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
    ToMeConfig(**free)
    return PRESETS[preset].settings(free)


def keys_to_merge(ratio: float) -> float:
    """The share of keys and values alone that saves about what ``ratio`` of all tokens does.

    Attention takes time by queries times keys. Where all queries stay, fewer keys may.
    """
    return min(1 - (1 - ratio) ** _POWER, RANGES["ratio"][1])
