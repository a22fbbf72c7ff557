"""Beside which other nodes does merging work, on which models?

Each node of :mod:`.neighbours` meets merging in several settings, before it and after it,
on tiny instances of ComfyUI's own model classes. With a lossless plan, which only shuffles tokens,
the result must be that of the other node alone. A second run, with the plan of the settings, tells
where merging stepped aside and why.
"""

import argparse
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import comfy.sample
import comfy.samplers
import comfyui_version
import torch
from comfy.model_patcher import ModelPatcher
from models.comfyui import KINDS, build, sample
from torch import Tensor

from benchmarks.lossless import lossless
from benchmarks.machine import origin
from benchmarks.speed.figures import grid
from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.patching.engine import MakeStrategy
from tome_nodes.report import log_line
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of
from tome_nodes.strategies import make_strategy
from tools.environment import ROOT

from .neighbours import ALL, SIDES, Neighbour

RESULTS = ROOT / "benchmarks" / "results"
STEPS = 4
RATIO = 0.5
CLOSE = 1e-4
"""The largest relative difference of results that comes of the order of sums alone."""

FAR = 5e-4
"""The smallest relative difference by which another node is said to change the result."""

COLUMNS: Mapping[str, str] = {
    "sd15": "SD 1.5",
    "sdxl": "SDXL",
    "flux": "Flux",
    "lumina2": "Lumina 2, Z-Image",
    "qwen_image": "Qwen-Image",
    "sd3": "SD3",
    "wan21": "Wan",
    "ltxv": "LTX",
}
"""The kinds of models, and what people call them."""


def _settings(preset: str, **options: Any) -> ToMeConfig:
    return ToMeConfig(**settings_of(preset, {"ratio": RATIO, **options}) | {"min_tokens": 1})


SETTINGS: Mapping[str, ToMeConfig] = {
    "balanced": _settings("balanced"),
    "all modules": _settings(
        "custom", max_downsample=2, merge_crossattn=True, merge_mlp=True, strategy="window"
    ),
    "fast": _settings("fast"),
}
"""The settings by name, in both scopes."""

ORDERS = ("ours first", "theirs first")


def meetings(neighbour: Neighbour) -> list[tuple[str, str]]:
    """The settings and orders in which a node meets merging."""
    settings = ("balanced", "fast") if neighbour.is_slow else SETTINGS
    return list(itertools.product(settings, ORDERS))


RIGHT, PARTLY, ASIDE, NONE, WRONG = "right", "partly", "steps aside", "not for this model", "wrong"
VERDICTS = (RIGHT, PARTLY, ASIDE, NONE, WRONG)
"""What can become of a cell: the third means that nothing merged, the second that not all did."""

_INTRODUCTION = f"""\
Each node met merging in {len(SETTINGS)} settings ({", ".join(SETTINGS)}), before it and after it,
on tiny models of ComfyUI's own classes. *right*: with a lossless plan, which only shuffles tokens,
and without forecasts, the result is that of the node alone, to {CLOSE:g} of its norm. *partly* and
*steps aside* are right too, but some or all blocks merge less or nothing, or no step is forecast,
and the log says so; a number leads to the settings and to the words of the log. A dash: alone, the
node fails on this class, changes nothing, or is not made for it; the JSON file has the reasons.
Nodes that compile ran with the backend *eager*, in two settings."""


@dataclass(frozen=True)
class Cell:
    """One node beside merging in one setting, on one kind of model.

    Attributes:
        verdict: one of those above.
        why: the reason, in the words of our log if merging stepped aside; empty if it is right.
    """

    verdict: str
    why: str = ""


_NOTHING = "nothing merged: "

NOBODY = Neighbour("no other node", source="")


def cell(kind: str, neighbour: Neighbour, setting: str, order: str) -> Cell:
    """One cell of the table."""
    expected = alone(kind, neighbour)
    if isinstance(expected, str):
        return Cell(NONE, expected)
    try:
        result, lines = shuffled(kind, neighbour, setting, order)
        merged, lines_of_merged = merging(kind, neighbour, setting)
    except Exception as error:
        return Cell(WRONG, _in_words(error))
    if not _difference(result, expected) < CLOSE:
        return Cell(WRONG, "the result is another one")
    if not merged.isfinite().all():
        return Cell(WRONG, "the result of merging is not finite")
    own = {
        *shuffled(kind, NOBODY, setting, ORDERS[0])[1],
        *merging(kind, NOBODY, setting)[1],
    }
    found = [each for each in dict.fromkeys((*lines, *lines_of_merged)) if each not in own]
    new = [each for each in found if _NOTHING + each not in found]
    if not new:
        return Cell(RIGHT)
    return Cell(ASIDE if new[0].startswith(_NOTHING) else PARTLY, "; ".join(new))


# What cells share runs once.


@cache
def model_of(kind: str) -> ModelPatcher:
    """The model of a kind."""
    return build(KINDS[kind])


@cache
def alone(kind: str, neighbour: Neighbour) -> Tensor | str:
    """The result of another node alone, or why there is none or it is as without the node."""
    if neighbour.only and kind not in neighbour.only:
        return "the node is not made for it"
    try:
        result = run(neighbour, neighbour.patch(model_of(kind), kind), kind)
    except Exception as error:
        return f"alone, the node fails: {_in_words(error)}"
    if not result.isfinite().all():
        return "alone, the node gives no finite result"
    if neighbour is not NOBODY and not neighbour.is_exact:
        plain = alone(kind, NOBODY)
        assert isinstance(plain, Tensor), plain
        if plain.shape == result.shape and _difference(result, plain) < FAR:
            return "alone, the node changes nothing"
    return result


@cache
def shuffled(kind: str, neighbour: Neighbour, setting: str, order: str) -> tuple[Tensor, list[str]]:
    """As :func:`_both` with a lossless plan, and without forecasts, which are not lossless."""
    config = replace(SETTINGS[setting], forecast=False)
    return _both(kind, neighbour, config, order, lossless(make_strategy))


@cache
def merging(kind: str, neighbour: Neighbour, setting: str) -> tuple[Tensor, list[str]]:
    """As :func:`_both` with the plan of the settings, in one order for both."""
    return _both(kind, neighbour, SETTINGS[setting], ORDERS[0], make_strategy)


def _both(
    kind: str, neighbour: Neighbour, config: ToMeConfig, order: str, make: MakeStrategy
) -> tuple[Tensor, list[str]]:
    """The result of another node and of merging, and what our log tells of it."""
    model = model_of(kind)
    if order == ORDERS[0]:
        both = neighbour.patch(attach(model, config, make), kind)
    else:
        both = attach(neighbour.patch(model, kind), config, make)
    result = run(neighbour, both, kind)
    return result, _log_lines(both)


Row = Mapping[str, Mapping[str, Cell]]
"""The cells of a node, by kind of model and by setting and order."""


def row_of(neighbour: Neighbour) -> Row:
    """All cells of a node."""
    return {
        kind: {
            f"{setting}, {order}": cell(kind, neighbour, setting, order)
            for setting, order in meetings(neighbour)
        }
        for kind in COLUMNS
    }


def main() -> int:
    """Run all cells and write the table; 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(prog="dev.py compatibility", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[each.name for each in ALL])
    parser.add_argument("--name", default="compatibility", help="name of the result files")
    arguments = parser.parse_args()
    logging.getLogger("tome_nodes").setLevel(logging.ERROR)
    rows = {}
    for neighbour in ALL:
        if arguments.only is None or neighbour.name in arguments.only:
            began = time.monotonic()
            rows[neighbour.name] = row_of(neighbour)
            print(f"{neighbour.name}: {time.monotonic() - began:.0f} s", flush=True)
    result = {**origin("cpu", "compatibility"), "host": comfyui_version.__version__}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{arguments.name}.json").write_text(
        json.dumps(result | {"rows": in_short(rows)}, indent=1) + "\n", encoding="utf-8"
    )
    (RESULTS / f"{arguments.name}.md").write_text(markdown(result, rows), encoding="utf-8")
    cells = [each for row in rows.values() for by in row.values() for each in by.values()]
    counts = Counter(each.verdict for each in cells)
    print("summary: " + " ".join(f"{each.replace(' ', '_')}={counts[each]}" for each in VERDICTS))
    return int(counts[WRONG] > 0)


def in_short(rows: Mapping[str, Row]) -> dict[str, Any]:
    """The table as plain data: what all settings of a cell have in common is said once."""
    return {
        name: {
            kind: {
                ", ".join(meetings) or "all": {"verdict": cell.verdict, "why": cell.why}
                for cell, meetings in _grouped(cells).items()
            }
            for kind, cells in row.items()
        }
        for name, row in rows.items()
    }


def _grouped(cells: Mapping[str, Cell]) -> dict[Cell, list[str]]:
    """The settings and orders by their cells; none if all have the same."""
    groups: dict[Cell, list[str]] = {}
    for meeting, cell in cells.items():
        groups.setdefault(cell, []).append(meeting)
    return groups if len(groups) > 1 else {cell: [] for cell in groups}


def markdown(result: Mapping[str, Any], rows: Mapping[str, Row]) -> str:
    """The table, with the reasons below it."""
    notes: dict[str, int] = {}
    lines = [[name, *(_shown(row[kind], notes) for kind in COLUMNS)] for name, row in rows.items()]
    stand_ins = {each.name: each.source for each in ALL if not each.is_of_the_host}
    return "\n".join(
        [
            "# Beside other nodes",
            "",
            f"`{result['command']}`, ComfyUI {result['host']}, {result['machine']['description']}, "
            f"{result['date']}.",
            "",
            _INTRODUCTION,
            "",
            grid(["node", *COLUMNS.values()], lines),
            "",
            *(f"{number}. {note}" for note, number in notes.items()),
            "",
            "Stand-ins, written after what these files do to a model:",
            "",
            *(f"- {name}: `{source}`" for name, source in stand_ins.items()),
            "",
        ]
    )


def _shown(cells: Mapping[str, Cell], notes: dict[str, int]) -> str:
    """The worst of some cells in a word, with the numbers of the notes that say why."""
    groups = _grouped(cells)
    worst = max((cell.verdict for cell in groups), key=VERDICTS.index)
    if worst == NONE:
        return "-"
    numbers = []
    for cell, meetings in groups.items():
        if cell.why:
            note = f"{', '.join(_settings_of(meetings))}: {cell.why}" if meetings else cell.why
            numbers.append(str(notes.setdefault(note, len(notes) + 1)))
    return f"{worst} [{', '.join(numbers)}]" if numbers else worst


def _settings_of(meetings: Sequence[str]) -> list[str]:
    """Settings and orders in words: the order is left out where it does not matter."""
    both = {meeting.rpartition(", ")[0] for meeting in meetings}
    settings = [each for each in SETTINGS if each in both]
    if len(meetings) == len(ORDERS) * len(settings):
        return settings
    return list(meetings)


def run(neighbour: Neighbour, model: ModelPatcher, kind: str) -> Tensor:
    """Sample with a model that another node has changed, as that node wants it."""
    tiny = KINDS[kind]
    if neighbour.is_slow:
        # Otherwise graphs of other models count towards the limit.
        torch.compiler.reset()
    with torch.random.fork_rng():
        # Some nodes draw from the global generator.
        torch.manual_seed(5)
        if neighbour.guider is None:
            further: dict[str, Any] = {"steps": STEPS} | neighbour.sampling(model, kind)
            return sample(model, tiny, tiny.size(*SIDES), **further)
        guider = neighbour.guider(model, kind)
        sampling = model.get_model_object("model_sampling")
        frames = () if tiny.frames is None else (tiny.frames,)
        empty = torch.zeros(1, tiny.channels, *frames, *tiny.size(*SIDES))
        return guider.sample(
            comfy.sample.prepare_noise(empty, 1),
            empty,
            comfy.samplers.sampler_object("euler"),
            comfy.samplers.calculate_sigmas(sampling, "simple", STEPS),
            disable_pbar=True,
            seed=1,
        )


def _log_lines(model: ModelPatcher) -> list[str]:
    """What our log tells of the last run of a model, apart from what merged."""
    last = last_run(model)
    if last is None:
        raise RuntimeError("the other node has removed merging from the model")
    if last.obstacle is not None:
        return [_NOTHING + last.obstacle]
    reason = last.counts.most_common_reason
    return [*log_line.deviations(last.counts), *([] if reason is None else [reason])]


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def _in_words(error: Exception) -> str:
    """An error on one line."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line[:100]}"
