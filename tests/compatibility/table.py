"""What becomes of our node beside another node?

Each node of :mod:`.neighbours` meets ours, before it and after it, on tiny models of ComfyUI's own
classes; the page that is written says how.
"""

import argparse
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import comfy.sample
import comfy.samplers
import comfyui_version
import torch
from comfy.model_patcher import ModelPatcher
from models.comfyui import KINDS, UNETS, build, sample
from torch import Tensor

from benchmarks.lossless import lossless
from benchmarks.machine import origin
from benchmarks.speed.figures import grid
from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.run import log_line
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.policy import PLAIN
from tome_nodes.settings.presets import settings_of
from tome_nodes.strategies import make_strategy
from tools.environment import ROOT

from .neighbours import ALL, SIDES, Neighbour

RESULTS = ROOT / "benchmarks" / "results"
CLOSE = 1e-4
"""The largest relative difference of results that comes of the order of sums alone."""

FAR = 5e-4
"""The smallest relative difference by which another node is said to change the result."""

COLUMNS: Mapping[str, str] = {"sd15": "SD 1.5", "sdxl": "SDXL", "flux": "Flux"}
"""The kinds of models, and what people call them."""


def _settings(preset: str, **options: Any) -> ToMeConfig:
    return ToMeConfig(
        **settings_of(preset, {"ratio": 0.5, **options}) | {"min_tokens": 1, "policy": PLAIN}
    )


SETTINGS: Mapping[str, ToMeConfig] = {
    "balanced": _settings("balanced"),
    "all modules": _settings(
        "custom", max_downsample=2, merge_crossattn=True, merge_mlp=True, strategy="window"
    ),
    "fast": _settings("fast"),
}


def settings_on(kind: str, neighbour: Neighbour) -> list[str]:
    """The settings under which a node meets ours; forecasts have but one."""
    if kind not in UNETS:
        return ["fast"]
    return ["balanced", "fast"] if neighbour.is_slow else [*SETTINGS]


RIGHT, PARTLY, ASIDE, NONE, WRONG = "right", "partly", "steps aside", "not for this model", "wrong"
VERDICTS = (RIGHT, PARTLY, ASIDE, NONE, WRONG)
"""What can become of a cell: the third means that nothing was merged or forecast, the second that
less merged."""

_INTRODUCTION = f"""\
Each node met ours, before it and after it, on tiny models of ComfyUI's own classes. In UNets tokens
merged, in {len(SETTINGS)} settings ({", ".join(SETTINGS)}). *right*: with a lossless plan, which
only shuffles tokens, the result is that of the node alone, to {CLOSE:g} of its norm. In Flux steps
were forecast. *right*: some were, and the order of the nodes does not matter. *partly* and *steps
aside* are right too, but less merged, or nothing was merged or forecast, and the log says so; a
number leads to the settings and to the words of the log. A dash: alone, the node fails on this
class, changes nothing, or is not made for it; the JSON file has the reasons. Nodes that compile ran
with the backend *eager*, in two settings."""


class Cell(NamedTuple):
    """One node beside ours in one setting, on one kind of model, and why if it is not right."""

    verdict: str
    why: str = ""


class _Run(NamedTuple):
    """A run of both nodes: is ours aside, and what does our log tell apart from how much merged?"""

    result: Tensor
    is_aside: bool
    told: Sequence[str]


NOBODY = Neighbour("no other node", source="")


def cell(kind: str, neighbour: Neighbour, setting: str) -> Cell:
    expected = alone(kind, neighbour)
    if isinstance(expected, str):
        return Cell(NONE, expected)
    try:
        runs = _runs(kind, neighbour, setting)
    except Exception as error:
        return Cell(WRONG, _in_words(error))
    if kind not in UNETS and not runs[0].is_aside:
        expected = runs[0].result
    if not all(_difference(run.result, expected) < CLOSE for run in runs[:2]):
        return Cell(WRONG, "the result is another one")
    if not all(run.result.isfinite().all() for run in runs):
        return Cell(WRONG, "the result is not finite")
    own = {line for run in _runs_of_nobody(kind, setting) for line in run.told}
    new = dict.fromkeys(line for run in runs for line in run.told if line not in own)
    if not new:
        return Cell(RIGHT)
    return Cell(ASIDE if all(run.is_aside for run in runs) else PARTLY, "; ".join(new))


def _runs(kind: str, neighbour: Neighbour, setting: str) -> list[_Run]:
    """Both nodes in both orders, merging with a lossless plan; then merging with its own."""
    make = lossless(make_strategy) if kind in UNETS else make_strategy
    runs = [_both(kind, neighbour, setting, is_last, make) for is_last in (False, True)]
    return [*runs, _both(kind, neighbour, setting, False)] if kind in UNETS else runs


# What cells share runs once.


@cache
def _runs_of_nobody(kind: str, setting: str) -> list[_Run]:
    return _runs(kind, NOBODY, setting)


@cache
def model_of(kind: str) -> ModelPatcher:
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


def _both(
    kind: str, neighbour: Neighbour, setting: str, is_last: bool, make: Any = make_strategy
) -> _Run:
    """A run of both nodes; ours is put on the model last or first."""
    if is_last:
        both = attach(neighbour.patch(model_of(kind), kind), SETTINGS[setting], make)
    else:
        both = neighbour.patch(attach(model_of(kind), SETTINGS[setting], make), kind)
    result = run(neighbour, both, kind)
    last = last_run(both)
    if last is None:
        raise RuntimeError("the other node has removed ours from the model")
    if last.nothing is not None:
        unskipped = None if last.unskipped is None else last.unskipped.reason
        return _Run(result, True, [str(last.unmerged or unskipped)])
    reason = last.counts.most_common_reason
    return _Run(
        result, False, [*log_line.deviations(last.counts), *([str(reason)] if reason else [])]
    )


def run(neighbour: Neighbour, model: ModelPatcher, kind: str) -> Tensor:
    """Sample with a model that another node has changed, as that node wants it."""
    tiny, steps = KINDS[kind], 4 if kind in UNETS else 8
    if neighbour.is_slow:
        # Otherwise graphs of other models count towards the limit.
        torch.compiler.reset()
    with torch.random.fork_rng():
        # Some nodes draw from the global generator.
        torch.manual_seed(5)
        if neighbour.guider is None:
            further: dict[str, Any] = {"steps": steps} | neighbour.sampling(model, kind)
            return sample(model, tiny, tiny.size(*SIDES), **further)
        guider = neighbour.guider(model, kind)
        sampling = model.get_model_object("model_sampling")
        empty = torch.zeros(1, tiny.channels, *tiny.size(*SIDES))
        noise, euler = comfy.sample.prepare_noise(empty, 1), comfy.samplers.sampler_object("euler")
        sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", steps)
        return guider.sample(noise, empty, euler, sigmas, disable_pbar=True, seed=1)


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def _in_words(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line[:100]}"


Row = Mapping[str, Mapping[str, Cell]]


def main() -> int:
    """Run all cells and write the table; 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(prog="dev.py compatibility", description=__doc__)
    parser.parse_args()
    logging.getLogger("tome_nodes").setLevel(logging.ERROR)
    rows: dict[str, Row] = {}
    for node in ALL:
        rows[node.name] = {
            kind: {setting: cell(kind, node, setting) for setting in settings_on(kind, node)}
            for kind in COLUMNS
        }
        print(node.name, flush=True)
    result = {**origin("cpu", "compatibility"), "host": comfyui_version.__version__}
    short = {name: {kind: in_short(row[kind]) for kind in row} for name, row in rows.items()}
    text = json.dumps(result | {"rows": short}, indent=1) + "\n"
    (RESULTS / "compatibility.json").write_text(text, encoding="utf-8")
    (RESULTS / "compatibility.md").write_text(markdown(result, rows), encoding="utf-8")
    columns = (cells for row in rows.values() for cells in row.values())
    counts = Counter(cell.verdict for cells in columns for cell in cells.values())
    words = (f"{verdict.replace(' ', '_')}={counts[verdict]}" for verdict in VERDICTS)
    print(" ".join(["summary:", *words]))
    return int(counts[WRONG] > 0)


def in_short(cells: Mapping[str, Cell]) -> dict[str, list[str]]:
    """Verdicts and reasons by the settings that have them in common."""
    return {
        ", ".join(setting for setting in cells if cells[setting] == cell): [cell.verdict, cell.why]
        for cell in dict.fromkeys(cells.values())
    }


def markdown(result: Mapping[str, Any], rows: Mapping[str, Row]) -> str:
    """The table, with the reasons below it."""
    notes: dict[str, int] = {}
    lines = [[name, *(shown(row[kind], notes) for kind in COLUMNS)] for name, row in rows.items()]
    stand_ins = [node for node in ALL if not node.is_of_the_host]
    parts = [
        "# Beside other nodes",
        f"`{result['command']}`, ComfyUI {result['host']}, {result['machine']['description']}, "
        f"{result['date']}.",
        _INTRODUCTION,
        grid(["node", *COLUMNS.values()], lines),
        "\n".join(f"{number}. {note}" for note, number in notes.items()),
        "Stand-ins, written after what these files do to a model:",
        "\n".join(f"- {node.name}: `{node.source}`" for node in stand_ins),
    ]
    return "\n\n".join(parts) + "\n"


def shown(cells: Mapping[str, Cell], notes: dict[str, int]) -> str:
    """The worst of some cells in a word, with the numbers of the notes that say why."""
    worst = max((cell.verdict for cell in cells.values()), key=VERDICTS.index)
    if worst == NONE:
        return "-"
    told = [f"{settings}: {why}" for settings, (_, why) in in_short(cells).items() if why]
    numbers = [str(notes.setdefault(note, len(notes) + 1)) for note in told]
    return f"{worst} [{', '.join(numbers)}]" if numbers else worst
