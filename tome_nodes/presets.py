"""Named settings: points on the front of speed against likeness in `benchmarks/FIDELITY.md`.

A preset says how to merge; how much, when and with which seed stay free.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

FREE = ("ratio", "seed", "start_percent", "end_percent", "backend")
"""The options that no preset decides."""

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "quality": {"attn_tokens": "k,v"},
        "balanced": {"strategy": "window", "attn_tokens": "k,v"},
        "fast": {"strategy": "window", "scope": "stack", "reuse_steps": 1},
        "paper": {"max_downsample": 1, "min_tokens": 1, "proportional_attn": False},
    }
)
"""The options that each sets; all others but those in :data:`FREE` have their defaults."""

CUSTOM = "custom"
"""The name of no preset: every option is as given."""


def settings_of(preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of :class:`tome_nodes.config.ToMeConfig` that a preset stands for.

    Args:
        preset: one of :data:`PRESETS`, or :data:`CUSTOM`.
        given: options; those that the preset decides do not count.

    Raises:
        ValueError: no such preset.
    """
    if preset == CUSTOM:
        return dict(given)
    if preset not in PRESETS:
        raise ValueError(
            f"preset={preset!r} is not allowed: it must be one of {[*PRESETS, CUSTOM]}"
        )
    free = {name: value for name, value in given.items() if name in FREE}
    return {**free, **PRESETS[preset]}
