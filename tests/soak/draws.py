"""What a run does, drawn from a seed and the run's number alone, so that each can be repeated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tome_nodes.settings.config import OPTIONS, ToMeConfig
from tome_nodes.settings.options import FRAME, LEVEL, STEP, VIEW, Option, OptionError
from tome_nodes.settings.presets import CUSTOM, FREE, PRESETS, settings_of

SAMPLERS = (
    *("euler", "euler_ancestral", "heun", "dpmpp_2m", "dpmpp_sde"),
    *("ddim", "uni_pc", "lcm", "res_multistep"),
)
SCHEDULERS = ("normal", "simple", "sgm_uniform", "karras")

_LEAST = 4
"""Side of the smallest pictures, in patches."""

FAULTS = ("exception", "interrupt", "keyboard interrupt")


@dataclass(frozen=True)
class Traits:
    """What may be drawn for a model.

    Attributes:
        weight: how often it is drawn, relative to the others.
        patches: the most patches of a picture.
        worth: side of a picture in patches from which presets merge it.
        neighbours: the other nodes that may be beside ours.
        has_nodes: whether nodes are put on it, as on all models of ComfyUI.
    """

    weight: float = 1.0
    patches: int = 324
    worth: int = 16
    neighbours: tuple[str, ...] = ()
    has_nodes: bool = True


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
class Beside:
    """A second model that samples while the first does.

    Attributes:
        in_thread: whether it does so in a thread of its own, else between two steps.
        merges: whether it merges tokens.
        draw: its model, settings and sampling.
    """

    in_thread: bool
    merges: bool
    draw: "Draw"


@dataclass(frozen=True)
class Draw:
    """A run.

    Attributes:
        settings: inputs of the node.
        neighbour: another node on the model, None if there is none.
        lora: whether a LoRA is on the model.
        others_first: whether these two come before our node.
        replaced: whether our node was on the model before, with its default settings.
        cloned: whether a clone of the patched model is sampled.
        removed: whether merging is taken off again before the model is sampled.
        report: inputs of the report node, None if there is none.
        fault: what goes wrong, None if nothing does.
        beside: a second model, None if there is none.
    """

    number: int
    model: str
    settings: Mapping[str, Any]
    sampling: Sampling
    neighbour: str | None = None
    lora: bool = False
    others_first: bool = False
    replaced: bool = False
    cloned: bool = False
    removed: bool = False
    report: Mapping[str, Any] | None = None
    fault: Fault | None = None
    beside: Beside | None = None


def draw(seed: int, number: int, models: Mapping[str, Traits]) -> Draw:
    """The run of a number: the same for the same seed, number and models."""
    random = Random(f"{seed}/{number}")
    main = _plain(random, number, models)
    traits = models[main.model]
    if not traits.has_nodes:
        return replace(main, cloned=random.random() < 0.2, fault=_fault(random, main.sampling))
    if random.random() < 0.08:
        return replace(main, beside=_beside(random, main, models))
    return replace(
        main,
        neighbour=random.choice(traits.neighbours) if random.random() < 0.4 else None,
        lora=random.random() < 0.15,
        others_first=random.random() < 0.5,
        replaced=random.random() < 0.1,
        cloned=random.random() < 0.2,
        removed=random.random() < 0.08,
        report=_report(random) if random.random() < 0.3 else None,
        fault=_fault(random, main.sampling),
    )


def _plain(random: Random, number: int, models: Mapping[str, Traits]) -> Draw:
    (model,) = random.choices([*models], [traits.weight for traits in models.values()])
    drawn = settings(random)
    traits = models[model]
    by_preset = drawn["preset"] != CUSTOM and traits.worth**2 <= traits.patches
    least = traits.worth if by_preset and random.random() < 0.7 else _LEAST
    return Draw(number, model, drawn, _sampling(random, least, traits.patches))


def _beside(random: Random, main: Draw, models: Mapping[str, Traits]) -> Beside:
    others = {name: traits for name, traits in models.items() if traits.has_nodes}
    # ComfyUI cannot load a clone of a model while it samples with another.
    del others[main.model]
    other = _plain(random, main.number, others)
    return Beside(random.random() < 0.5, random.random() < 0.7, other)


def settings(random: Random) -> dict[str, Any]:
    """Inputs of the node that it accepts: a preset with the options it leaves free, or all."""
    while True:
        preset = random.choice([*PRESETS, *[CUSTOM] * 8])
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
        steps=random.choice((1, 2, 2, 3)),
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
