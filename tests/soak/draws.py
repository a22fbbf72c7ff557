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

_LEAST = 4
"""Side of the smallest pictures, in patches."""

FAULTS = ("exception", "interrupt", "keyboard interrupt")

FORECAST_EVERY = 5
"""In one run of so many, steps are forecast beside one of these nodes, in turn."""

SITUATIONS = (
    *("ConditioningSetTimestepRange", "CFGOverride", "EasyCache", "LazyCache", "CreateHookLora"),
    *("ControlNetApplyAdvanced", "ContextWindowsManual"),
)
"""Nodes that change in the middle of a run what is forecast, or skip or split it."""


@dataclass(frozen=True)
class Traits:
    """What may be drawn for a model.

    Attributes:
        weight: how often it is drawn, relative to the others.
        patches: the most patches of a picture.
        worth: side of a picture in patches from which presets merge it.
        neighbours: the other nodes that may be beside ours.
        is_forecast: whether its steps may be forecast.
    """

    weight: float = 1.0
    patches: int = 324
    worth: int = 16
    neighbours: tuple[str, ...] = ()
    is_forecast: bool = False


@dataclass(frozen=True)
class Sampling:
    """How to sample: arguments of :func:`models.comfyui.sample`.

    Attributes:
        size: height and width of the picture in patches.
        cfg: the guidance; at 1 the negative prompt is not evaluated.
        denoise: share of the steps to run; less than 1 begins with a picture.
    """

    size: tuple[int, int]
    batch: int = 1
    steps: int = 2
    cfg: float = 4.0
    sampler: str = "euler"
    scheduler: str = "simple"
    denoise: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Fault:
    """What goes wrong in the middle of a run.

    Attributes:
        kind: one of :data:`FAULTS`.
        place: where among the model's linear layers, from 0 to 1; None is between two steps.
        call: at which call of the layer, or after which step, counted from 1.
    """

    kind: str
    place: float | None
    call: int


@dataclass(frozen=True)
class Draw:
    """A run.

    Attributes:
        settings: inputs of the node.
        neighbours: other nodes on the model.
        others_first: whether these come before our node.
        replaced: whether our node was on the model before, with its default settings.
        cloned: whether a clone of the patched model is sampled.
        removed: whether our node is taken off again before the model is sampled.
        report: inputs of the report node, None if there is none.
        fault: what goes wrong, None if nothing does.
    """

    number: int
    model: str
    settings: Mapping[str, Any]
    sampling: Sampling
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
    main = _plain(random, number, models)
    return replace(
        main,
        neighbours=_neighbours(random, models[main.model].neighbours),
        others_first=random.random() < 0.5,
        replaced=random.random() < 0.1,
        cloned=random.random() < 0.2,
        removed=random.random() < 0.08,
        report=_report(random) if random.random() < 0.3 else None,
        fault=_fault(random, main.sampling),
    )


def _forecast(random: Random, number: int, models: Mapping[str, Traits]) -> Draw:
    name = SITUATIONS[number // FORECAST_EVERY % len(SITUATIONS)]
    able = {model: each for model, each in models.items() if each.is_forecast}
    fitting = {model: each for model, each in able.items() if name in each.neighbours}
    main = _plain(random, number, fitting or able)
    sampling = replace(main.sampling, steps=8, sampler="euler", denoise=1.0)
    return replace(
        main,
        settings={"preset": random.choice(("balanced", "fast")), "ratio": random.uniform(0.3, 0.9)},
        sampling=sampling,
        neighbours=(name,) if fitting else (),
        others_first=random.random() < 0.5,
        fault=_fault(random, sampling),
    )


def _neighbours(random: Random, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(random.sample(names, min(len(names), random.choice((0, 0, 1, 1, 2)))))


def _plain(random: Random, number: int, models: Mapping[str, Traits]) -> Draw:
    (model,) = random.choices([*models], [traits.weight for traits in models.values()])
    drawn = settings(random)
    traits = models[model]
    by_preset = drawn["preset"] != CUSTOM and traits.worth**2 <= traits.patches
    least = traits.worth if by_preset and random.random() < 0.7 else _LEAST
    return Draw(number, model, drawn, _sampling(random, least, traits.patches))


def settings(random: Random) -> dict[str, Any]:
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


def _sampling(random: Random, least: int, patches: int) -> Sampling:
    most = max(least, random.choice((6, 10, 18)))
    while True:
        high, wide = random.randint(least, most), random.randint(least, most)
        if high * wide <= patches:
            break
    return Sampling(
        size=(high, wide),
        batch=random.choice((1, 1, 2)),
        # Short runs, and some that are long enough for forecasts.
        steps=random.choice((1, 2, 3, 6, 8)),
        cfg=random.choice((1.0, 4.0)),
        sampler=random.choice(SAMPLERS),
        scheduler=random.choice(SCHEDULERS),
        denoise=random.choice((1.0, 1.0, 0.6)),
        seed=random.randrange(2**32),
    )


def _report(random: Random) -> dict[str, Any]:
    return {
        "view": random.choice([*VIEW.choices]),
        "level": random.choice((int(LEVEL.least), 1, 2, 4)),
        "step": random.randint(int(STEP.least), 4),
        "frame": random.randint(int(FRAME.least), 3),
    }


def _fault(random: Random, sampling: Sampling) -> Fault | None:
    if random.random() >= 0.15:
        return None
    place = random.random() if random.random() < 0.8 else None
    return Fault(random.choice(FAULTS), place, random.randint(1, sampling.steps))
