"""What an option of a node is, and the options of ToMe Tune and ToMe Report.

The options of token merging itself are in :mod:`tome_nodes.settings.config`.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class OptionError(ValueError):
    """The value of an option is not allowed; the message names the option and what is allowed.

    Attributes:
        option: the name of the option at fault.
    """

    def __init__(self, option: str, sentence: str):
        super().__init__(sentence)
        self.option = option


class OptionTypeError(OptionError, TypeError):
    """An option has a value of the wrong type."""


def is_plain(value: Any) -> bool:
    """Whether a value has a type that options can have, unlike a model or tensor from a link."""
    return isinstance(value, str | int | float)


def shown(value: Any) -> str:
    """A value as error messages show it; of tensors, models and the like, only the type."""
    if value is None or is_plain(value):
        return reprlib.repr(value)
    return f"<{type(value).__name__}>"


_ACCEPTED: Mapping[type, Any] = {bool: bool, int: int, float: int | float, str: str}
_IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a name"}
"""The types that a value may have, and their names in messages, by the type of the default."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: its name everywhere.
        default: its value where none is given; its type is the option's type. A text without
            choices is a name that the host defines, such as the name of a sampler.
        text: what it does, in two sentences at most: the tooltip.
        more: what the help page adds.
        least: smallest value of a number.
        most: largest value of a number.
        step: what one click in the editor adds to a number.
        unset: a number below ``least`` that stands for the value of ``ratio``.
        choices: its allowed values if they are few. Each has a text that says what it does, for the
            list of the help page, or an empty text if there is no such list.
        advanced: whether the editor folds it away.
    """

    name: str
    default: Any
    text: str
    more: str = ""
    least: float = 0
    most: float = 0
    step: float = 1
    unset: float | None = None
    choices: Mapping[str | int, str] = field(default_factory=dict)
    advanced: bool = False

    def check(self, value: Any) -> None:
        """Raise if a value is not allowed.

        Raises:
            OptionTypeError: it has the wrong type.
            OptionError: it is out of range, NaN, or none of the choices.
        """
        kind = type(self.default)
        is_bool = isinstance(value, bool)
        if self.choices:
            # True and 1.0 are equal to 1, but they are not choices.
            if is_bool or not isinstance(value, str | int) or value not in self.choices:
                allowed = " | ".join(map(str, self.choices))
                raise self._error(OptionError, value, f"one of {allowed}")
        elif is_bool != (kind is bool) or not isinstance(value, _ACCEPTED[kind]):
            raise self._error(OptionTypeError, value, _IN_WORDS[kind])
        # NaN is not in any range.
        elif kind in (int, float) and not self.least <= value <= self.most and value != self.unset:
            allowed = f"from {self.least} to {self.most}"
            if self.unset is not None:
                allowed = f"{self.unset:g}, to keep ratio, or {allowed}"
            raise self._error(OptionError, value, allowed)

    def _error(self, kind: type[OptionError], value: Any, allowed: str) -> OptionError:
        return kind(self.name, f"{self.name}={shown(value)} is not allowed: it must be {allowed}")


MERGE_MAP, CHART = "merge map", "chart"

VIEW = Option(
    name="view",
    default=MERGE_MAP,
    choices={
        MERGE_MAP: "Each group of merged tokens in one colour, with its outline, in one "
        "step. With a picture, a group has the mean of its colours, and what was not merged is "
        "the picture as it is. Without, the colours only tell groups apart, and what was not "
        "merged is dark.",
        CHART: "For each block, the fewest tokens that it ran on, and how long it took on "
        "average. Blocks that merged are orange. If steps were skipped, a row above shows which.",
    },
    text="What to draw: merge map is each group of merged tokens in one colour in one step, chart "
    "the tokens and the time of each block.",
)

LEVEL = Option(
    name="level",
    default=-1,
    least=-1,
    most=64,
    advanced=True,
    text="Which feature maps to show in the merge map: how many times smaller than the latent they "
    "are, such as 1, 2 or 4. -1 shows the largest that were merged.",
)

FRAME = Option(
    name="frame",
    default=-1,
    least=-1,
    most=10000,
    advanced=True,
    text="Which frame of the latent of a video to show in the merge map; 1 is the first. -1 shows "
    "the one in the middle.",
)

GOAL = Option(
    name="goal",
    default="speed",
    choices={
        "speed": "At least `speed_up` times as fast as without merging, with the least change.",
        "likeness": "The highest speed with a change of at most `change`.",
    },
    advanced=True,
    text="What the settings should reach. speed: at least speed_up, with the least change to the "
    "picture; likeness: the highest speed with at most the given change.",
)

SPEED_UP = Option(
    name="speed_up",
    default=1.3,
    least=1.0,
    most=4.0,
    step=0.05,
    text="How many times as fast the model should run. 1 leaves it unpatched.",
)

CHANGE = Option(
    name="change",
    default=0.1,
    least=0.0,
    most=1.0,
    step=0.01,
    advanced=True,
    text="Under goal likeness, in place of speed_up: how much the picture may change, in standard "
    "deviations of its latent. 0 leaves the model unpatched.",
)

MEASURE_AGAIN = Option(
    name="measure_again",
    default=False,
    text="Measure even if this was measured before. What is found is kept for the same kind of "
    "model, size, steps, device and versions, so that asking for the same again takes no trials.",
)

SAMPLING = (
    Option(
        name="seed",
        default=0,
        least=0,
        most=2**64 - 1,
        text="Seed of the noise in the trials, as in the sampler.",
    ),
    Option(name="steps", default=20, least=1, most=10000, text="Steps of the sampler."),
    Option(
        name="cfg",
        default=8.0,
        least=0.0,
        most=100.0,
        step=0.1,
        text="As in the sampler; other than 1, the model runs on two prompts at once.",
    ),
    Option(name="sampler_name", default="euler", text="As in the sampler."),
    Option(name="scheduler", default="simple", text="As in the sampler."),
    Option(
        name="denoise",
        default=1.0,
        least=0.0,
        most=1.0,
        step=0.01,
        text="As in the sampler; below 1, sampling starts from the latent under some noise.",
    ),
)
"""The inputs of a sampler, as the host's KSampler has them."""

STEP = Option(
    name="step",
    default=-1,
    least=-1,
    most=10000,
    advanced=True,
    text="Which step to show in the merge map; 1 is the first. -1 shows the last that merged.",
)

TUNE_OPTIONS = (GOAL, SPEED_UP, CHANGE, *SAMPLING, MEASURE_AGAIN)

REPORT_OPTIONS = (VIEW, LEVEL, STEP, FRAME)
