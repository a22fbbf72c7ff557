"""Forecasts along curves in few steps, against the line, fewer steps and caches.

python3 dev.py bench --few-steps [--only few few_8 image_dpmpp_2m ...]

Each run paints twelve scenes or eight, one by one. Neither the judges have them, nor was the rule
of ``tome_nodes/skipping/course.py`` found on them: they have other palettes or pairs of references,
and other noise. Errors are over pixels, from the run of all steps. Results are kept in
benchmarks/results/few-steps.json, and a page is made of them. It takes half an hour on one thread.
"""

import argparse
import json
from collections.abc import Mapping
from copy import copy
from typing import Any
from unittest.mock import patch

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import torch  # noqa: E402

from benchmarks.fidelity import scene_transformer, shares  # noqa: E402
from benchmarks.fidelity.judges import BENCHES, EditJudge, FlowJudge  # noqa: E402
from benchmarks.fidelity.meter import Meter  # noqa: E402
from benchmarks.fidelity.options import Option, preset  # noqa: E402
from benchmarks.fidelity.pictures import rms  # noqa: E402
from benchmarks.machine import origin  # noqa: E402
from benchmarks.speed.figures import joined  # noqa: E402
from tome_nodes.skipping import forecasts  # noqa: E402
from tome_nodes.skipping.course import STRAIGHT  # noqa: E402
from tools.figures import few_steps  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
RUNS: Mapping[str, tuple[str, int, int, Mapping[str, str]]] = {
    "few": ("few", 4, 12, {}),
    "few_8": ("few", 8, 12, {}),
    "few_multistep": ("few_multistep", 8, 12, {}),
    "image_dpmpp_2m": ("image", 8, 12, {"sampler": "dpmpp_2m"}),
    "image_res_multistep": ("image", 8, 12, {"sampler": "res_multistep"}),
    "video_multistep": ("video_multistep", 8, 8, {}),
    "edit": ("edit", 8, 8, {}),
}
"""Judge, numbers of steps and scenes (fewer of those that take long), and what is changed."""
_SEED = 20_000
"""The seed of the first scene's noise; judges have 0, the rule's scenes had seeds below 10,000."""


def scene(judge: FlowJudge, index: int) -> FlowJudge:
    """The judge of one other scene, from 0 to below 12.

    The judges' scenes have none of the last four palettes, and edits with other colours.
    """
    own = copy(judge)
    own.seed, own.empty = _SEED + index, judge.empty[:1]
    if isinstance(own, EditJudge):
        leaves, colours = own.references
        of, other = index % 4, (index + 1 + index // 4) % 4
        own.references = [leaves[of, None], colours[other, None]]
        own.prompts = judge.prompts[of, None]
    else:
        told = 4 + index % 4, index % 3, index // 3 % 3, index // 4 % 2
        own.prompts = scene_transformer.prompt(*told)[None]
    return own


def asked(judge: FlowJudge, option: Option) -> tuple[int, float]:
    """How often the model ran, and the error."""
    model, meter = option.patch(judge.model), Meter(judge.tokens, judge.attention)
    with meter.watching(model):
        painted = judge.pictures(model, option.steps)
    return meter.evaluations, rms(painted - judge.expected)


def compared(name: str) -> dict[str, Any]:
    """Evaluations and errors by scene: of ours, of the line, of as many fewer steps, and of caches.

    ``cache`` names the cache with the smallest error of those that ran the model no more often than
    ours over all scenes; None if there is none.
    """
    of, steps, scenes, others = RUNS[name]
    judge: Any = BENCHES[of].make(steps, **others)
    caches = [each for each in BENCHES[of].options(steps) if each.kind == shares.CACHE]
    ours = Option("ours", shares.OURS, preset("balanced"))
    found: dict[str, list[tuple[int, float]]] = {}
    for index in range(scenes):
        one = scene(judge, index)
        now = {ours.name: asked(one, ours)}
        with patch.object(forecasts, "course_of", lambda *_: STRAIGHT):
            now["line"] = asked(one, ours)
        ran, _ = now[ours.name]
        now["fewer"] = asked(one, Option("fewer", shares.STEPS, steps=ran))
        now |= {cache.name: asked(one, cache) for cache in caches}
        print(name, index, now, flush=True)
        for each, row in now.items():
            found.setdefault(each, []).append(row)
    rows = {
        each: {
            "evaluations": [ran for ran, _ in own],
            "error": round((sum(error**2 for _, error in own) / scenes) ** 0.5, 5),
            "scenes": [round(error, 6) for _, error in own],
        }
        for each, own in found.items()
    }
    most = sum(rows[ours.name]["evaluations"])
    able = [each.name for each in caches if sum(rows[each.name]["evaluations"]) <= most]
    best = min(able, key=lambda each: rows[each]["error"], default=None)
    return {"judge": of, "steps": steps, **others, "cache": best, "rows": rows}


def main() -> None:
    """Compare in each run, and keep what comes."""
    parser = argparse.ArgumentParser(prog="dev.py bench --few-steps", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=[*RUNS])
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    taken = origin("cpu", "bench --few-steps")
    taken["machine"] = taken["machine"]["description"]
    path = RESULTS / "few-steps.json"
    for name in arguments.only:
        found = {"origin": taken, **compared(name)}
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        kept[name] = found
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    parts = [
        "# Few steps, on scenes that no rule was found on: `python3 dev.py bench --few-steps`",
        "The error of all scenes together and how often the model ran; then errors "
        "over those of as many fewer steps, the median of scenes and the least and the most, apart "
        "from scenes in which no step is forecast, as answers turn back. How "
        "to read this: [FIDELITY](../FIDELITY.md).",
        few_steps(is_short=False),
    ]
    (RESULTS / "few-steps.md").write_text(joined(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
