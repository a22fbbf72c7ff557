"""What a run does, drawn from a seed and the run's number alone, so that each can be repeated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.settings.options import FRAME, LEVEL, STEP, VIEW, Option, OptionError
from tome_nodes.settings.presets import CUSTOM, FREE, PRESETS, settings_of

SAMPLERS = ("euler", "euler_ancestral", "heun", "dpmpp_2m", "dpmpp_sde", "ddim", "uni_pc", "lcm")
SCHEDULERS = ("normal", "simple", "sgm_uniform", "karras")
FAULTS = ("exception", "interrupt", "keyboard interrupt")

FORECAST_EVERY = 5
"""In one run of so many, steps are forecast or shallow beside one of these nodes, in turn."""

SITUATIONS = (
    *("ConditioningSetTimestepRange", "CFGOverride", "EasyCache", "LazyCache", "CreateHookLora"),
    *("ControlNetApplyAdvanced", "ContextWindowsManual"),
)
"""Nodes that change in the middle of a run what is skipped, or skip or split it."""


@dataclass(frozen=True)
class Traits:
    """What may be drawn for a model: how often, relative to the others, and the rest.

    A picture has so many ``patches`` at most; from a side of ``worth`` patches on presets merge it.
    ``skips`` is whether presets skip steps of a run of 8.
    """

    weight: float = 1.0
    patches: int = 324
    worth: int = 16
    neighbours: tuple[str, ...] = ()
    skips: bool = False


@dataclass(frozen=True)
class Fault:
    """What goes wrong in the middle of a run.

    It does so at some call of a linear layer, whose place among all of them is from 0 to 1, or
    after some step, if the place is None.
    """

    kind: str
    place: float | None
    call: int


@dataclass(frozen=True)
class Draw:
    """A run.

    Its settings and its report are inputs of our nodes, its sampling arguments of
    :func:`models.comfyui.sample` with the size in patches. It may be that our node was on the model
    before, with its default settings, is taken off again, or that a clone of the model is sampled.
    """

    number: int
    model: str
    settings: Mapping[str, Any]
    sampling: Mapping[str, Any]
    neighbours: tuple[str, ...] = ()
    others_first: bool = False
    replaced: bool = False
    cloned: bool = False
    removed: bool = False
    report: Mapping[str, Any] | None = None
    fault: Fault | None = None


def draw(seed: int, number: int, models: Mapping[str, Traits]) -> Draw:
    """The run of a number: the same for the same seed, number and models."""
    random = Random(f"{seed}/{number}")
    if number % FORECAST_EVERY == 0:
        return _forecast(random, number, models)
    run = _plain(random, number, models)
    names = models[run.model].neighbours
    report = {
        "view": random.choice([*VIEW.choices]),
        "level": random.choice((int(LEVEL.least), 1, 2, 4)),
        "step": random.randint(int(STEP.least), 4),
        "frame": random.randint(int(FRAME.least), 3),
    }
    return replace(
        run,
        neighbours=tuple(random.sample(names, min(len(names), random.choice((0, 0, 1, 1, 2))))),
        others_first=random.random() < 0.5,
        replaced=random.random() < 0.1,
        cloned=random.random() < 0.2,
        removed=random.random() < 0.08,
        report=report if random.random() < 0.3 else None,
        fault=_fault(random, run.sampling["steps"]),
    )


def _forecast(random: Random, number: int, models: Mapping[str, Traits]) -> Draw:
    name = SITUATIONS[number // FORECAST_EVERY % len(SITUATIONS)]
    able = {model: traits for model, traits in models.items() if traits.skips}
    fitting = {model: traits for model, traits in able.items() if name in traits.neighbours}
    run = _plain(random, number, fitting or able)
    return replace(
        run,
        settings={"preset": random.choice(("balanced", "fast")), "ratio": random.uniform(0.3, 0.9)},
        sampling={**run.sampling, "steps": 8, "sampler": "euler", "denoise": 1.0},
        neighbours=(name,) if fitting else (),
        others_first=random.random() < 0.5,
        fault=_fault(random, 8),
    )


def _plain(random: Random, number: int, models: Mapping[str, Traits]) -> Draw:
    (model,) = random.choices([*models], [traits.weight for traits in models.values()])
    settings, traits = _settings(random), models[model]
    by_preset = settings["preset"] != CUSTOM and traits.worth**2 <= traits.patches
    least = traits.worth if by_preset and random.random() < 0.7 else 4
    most = max(least, random.choice((6, 10, 18)))
    sides = range(least, most + 1)
    sizes = [(high, wide) for high in sides for wide in sides if high * wide <= traits.patches]
    sampling = {
        "size": random.choice(sizes),
        "batch": random.choice((1, 1, 2)),
        # Short runs, and some that are long enough for forecasts.
        "steps": random.choice((1, 2, 3, 6, 8)),
        "cfg": random.choice((1.0, 4.0)),
        "sampler": random.choice(SAMPLERS),
        "scheduler": random.choice(SCHEDULERS),
        "denoise": random.choice((1.0, 1.0, 0.6)),
        "seed": random.randrange(2**32),
    }
    return Draw(number, model, settings, sampling)


def _settings(random: Random) -> dict[str, Any]:
    """Inputs of the node that it accepts: a preset with the options it leaves free, or all."""
    while True:
        preset = random.choice([*PRESETS, *[CUSTOM] * 4])
        names = OPTIONS if preset == CUSTOM else FREE
        drawn = {name: _value(random, OPTIONS[name]) for name in names if random.random() < 0.3}
        # Otherwise most of the small pictures here would not merge.
        if preset == CUSTOM and random.random() < 0.9:
            drawn["min_tokens"] = 1
        try:
            ToMeConfig(**settings_of(preset, drawn))
        except OptionError:
            continue
        return {"preset": preset, **drawn}


def _value(random: Random, option: Option) -> Any:
    if option.choices:
        return random.choice([*option.choices])
    if isinstance(option.default, bool):
        return random.random() < 0.5
    if option.unset is not None and random.random() < 0.5:
        return option.unset
    if isinstance(option.default, float):
        return random.uniform(option.least, option.most)
    # Most of the range of the wide ones means the same here.
    most = int(option.most) if random.random() < 0.2 else min(8, int(option.most))
    return random.randint(int(option.least), most)


def _fault(random: Random, steps: int) -> Fault | None:
    if random.random() >= 0.15:
        return None
    place = random.random() if random.random() < 0.8 else None
    return Fault(random.choice(FAULTS), place, random.randint(1, steps))
