"""Named settings, compared for speed and likeness in `benchmarks/FIDELITY.md`.

A preset decides how to merge. The user still chooses how much, when and with which seed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import OPTIONS
from .options import Option, OptionError, is_plain, shown
from .policy import LEAST_SAVED, PLAIN, Growth, Policy

FREE = ("ratio", "start_percent", "end_percent", "seed", "backend")
"""The options that no preset decides."""

CUSTOM = "custom"
"""The choice of no preset: every option is as given."""


@dataclass(frozen=True)
class Preset:
    """How to merge.

    Attributes:
        text: what it does, in a sentence.
        options: the options that it sets. All others have their defaults, except those in
            :data:`FREE`.
        policy: what it decides beyond the options.
    """

    text: str
    options: Mapping[str, Any]
    policy: Policy = PLAIN


_LARGE = 64 * 64
"""From this many tokens on, a feature map is large."""

_LARGER_CELLS = ((2, 4), (4, 4), (4, 8), (8, 8))

PRESETS: Mapping[str, Preset] = {
    "balanced": Preset(
        "In a UNet, merges keys and values of self-attention, and skips some steps in runs of 5 "
        "or more. Closest to the plain model.",
        {"strategy": "window", "attn_tokens": "k,v", "sx": 4, "forecast": True},
        Policy(
            keys=Growth(0.76, _LARGE),
            larger_cells=_LARGER_CELLS,
            keys_down_to=math.inf,
            deeper_from=_LARGE,
            least_saved=LEAST_SAVED,
            shallow=0.75,
            more="fast",
        ),
    ),
    "fast": Preset(
        "In a UNet, merges more keys and values and, in smaller maps, whole stacks of blocks; also "
        "skips more steps: saves most, and is what to take for SDXL and for a second pass.",
        {"strategy": "window", "scope": "stack", "attn_tokens": "k,v", "forecast": True},
        Policy(
            keys=Growth(1.0, 32 * 32),
            stacks=Growth(0.2, _LARGE),
            larger_cells=_LARGER_CELLS,
            # At these levels, merging whole stacks would change pictures most.
            keys_down_to=2,
            deeper_from=0,
            least_saved=LEAST_SAVED,
        ),
    ),
    "paper": Preset(
        "As the paper's own code, tomesd, does it: queries, keys and values alike, at the "
        "largest maps only, so nothing on SDXL; in a transformer, keys and values only.",
        {"max_downsample": 1, "min_tokens": 1, "proportional_attn": False},
    ),
}
"""The presets by name. Their figures are in benchmarks/FIDELITY.md."""

PRESET = Option(
    name="preset",
    default="balanced",
    choices={
        **{name: preset.text for name, preset in PRESETS.items()},
        CUSTOM: "As the other inputs say.",
    },
    text="How to save time: balanced is closest to the plain picture, fast saves most and is what "
    "SDXL needs, paper does as tomesd does. Under these only ratio, start_percent, end_percent, "
    "seed and backend count; under custom every input does.",
    more="In a transformer, such as Flux, Qwen-Image or Wan, balanced and fast are the same. An "
    "input that would not count is refused, unless it is at its default. The editor hides it and "
    "does not send it.",
)
"""The choice of a preset."""

_DEFAULTS: Mapping[str, Any] = {name: option.default for name, option in OPTIONS.items()}


def settings_of(
    preset: str, given: Mapping[str, Any], defaults: Mapping[str, Any] = _DEFAULTS
) -> dict[str, Any]:
    """The settings of :class:`tome_nodes.settings.config.ToMeConfig` that a preset stands for.

    Args:
        preset: one of :data:`PRESETS`, or :data:`CUSTOM`.
        given: options by name. Those that the preset decides must have their defaults.
        defaults: the values of options that the user did not set.

    Raises:
        OptionError: there is no such preset, or ``given`` sets an option that it decides.
    """
    PRESET.check(preset)
    if preset == CUSTOM:
        return {**given}
    for name, value in given.items():
        if name not in FREE and not (is_plain(value) and value == defaults[name]):
            raise OptionError(
                name,
                f"{name}={shown(value)} does not count under preset={preset!r}, which decides it: "
                f"leave {name} out, or set preset to {CUSTOM!r}",
            )
    free = {name: value for name, value in given.items() if name in FREE}
    return {**free, **PRESETS[preset].options, "policy": PRESETS[preset].policy}
