"""Do they add up? Merging alone, another node alone, and both: time, and change of the pictures.

The models are the small trained UNet and transformer of the judges. The time is that of a whole
sampling run, so steps that a cache skips count as nothing; a first run, which compiles, does not
count. Other nodes have their own defaults, which fit a run of twenty steps.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.host import use_cpu  # noqa: E402

use_cpu()

from comfy.model_patcher import ModelPatcher  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import stand_ins  # noqa: E402
from benchmarks.figures import grid, spread  # noqa: E402
from benchmarks.judges import PictureTransformerJudge  # noqa: E402
from benchmarks.machine import origin  # noqa: E402
from benchmarks.neighbours import Patch, core_patch  # noqa: E402
from benchmarks.pictures import Judge, PictureJudge  # noqa: E402
from benchmarks.rounds import interleaved  # noqa: E402
from tome_nodes.comfyui.attachment import attach  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402
from tome_nodes.settings.presets import PRESETS, settings_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PLAIN, MERGING = "plain", "merging"
RATIO = 0.5


_CACHE: Mapping[str, Any] = {
    "reuse_threshold": 0.2,
    "start_percent": 0.15,
    "end_percent": 0.95,
    "verbose": False,
}
ANYWHERE: Mapping[str, Patch] = {
    "EasyCache": core_patch("nodes_easycache", "EasyCache", **_CACHE),
    "LazyCache": core_patch("nodes_easycache", "LazyCache", **_CACHE),
    "TorchCompileModel": core_patch("nodes_torch_compile", "TorchCompileModel", backend="inductor"),
    "Sage, stand-in": stand_ins.attend_in_low_precision,
    "Sol-Attn, stand-in": stand_ins.attend_or_pass_on,
}
ON_UNETS: Mapping[str, Patch] = {
    "HyperTile": core_patch(
        "nodes_hypertile",
        "HyperTile",
        tile_size=256,
        swap_size=2,
        max_depth=0,
        scale_depth=False,
    ),
    "PatchModelAddDownscale": core_patch(
        "nodes_model_downscale",
        "PatchModelAddDownscale",
        block_number=2,
        downscale_factor=2.0,
        start_percent=0.0,
        end_percent=0.35,
        downscale_after_skip=True,
        downscale_method="bicubic",
        upscale_method="bicubic",
    ),
}


class _OneUNetPicture(PictureJudge):
    def batch(self, seed: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return _first(*super().batch(seed))


class _OneTransformerPicture(PictureTransformerJudge):
    def batch(self, seed: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return _first(*super().batch(seed))


def _first(
    empty: Tensor, prompts: Tensor, others: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The first picture of a batch."""
    return empty[:1], prompts[:1], {name: each[:1] for name, each in others.items()}


MODELS: Mapping[str, tuple[Callable[[int, int], Judge], Mapping[str, Patch]]] = {
    "UNet": (_OneUNetPicture, {**ANYWHERE, **ON_UNETS}),
    "transformer": (_OneTransformerPicture, ANYWHERE),
}
"""The judges, and the other nodes that their models meet."""


def main() -> int:
    """Measure, and write the tables."""
    arguments = _arguments()
    logging.getLogger("tome_nodes").setLevel(logging.ERROR)
    steps, rounds = (2, 1) if arguments.quick else (20, arguments.rounds)
    config = ToMeConfig(**settings_of(arguments.preset, {"ratio": RATIO}))
    found = {}
    for name in arguments.model:
        make_judge, others = MODELS[name]
        chosen = {each: others[each] for each in arguments.only or others if each in others}
        found[name] = measured(make_judge(steps, 1), chosen, config, rounds)
    result = {
        **origin("cpu", "--stacking"),
        "preset": arguments.preset,
        "ratio": RATIO,
        "steps": steps,
        "rounds": rounds,
        "runs": found,
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{arguments.name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = markdown(result)
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench --stacking", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two steps, one round: does it run?")
    parser.add_argument("--preset", choices=PRESETS, default="fast")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--only", nargs="+", choices=[*ANYWHERE, *ON_UNETS], help="other nodes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", help="name of the result files; default: stacking")
    arguments = parser.parse_args()
    arguments.name = arguments.name or ("stacking-quick" if arguments.quick else "stacking")
    return arguments


def measured(
    judge: Judge, others: Mapping[str, Patch], config: ToMeConfig, rounds: int
) -> dict[str, dict[str, Any]]:
    """Seconds of each round and the change of the pictures, by what runs."""
    models: dict[str, ModelPatcher] = {PLAIN: judge.model, MERGING: attach(judge.model, config)}
    for name, patch in others.items():
        models[name] = patch(judge.model, "")
        models[both(name)] = patch(attach(judge.model, config), "")
    changes = {}
    for name, model in models.items():
        changes[name] = Judge.figures(judge, judge.pictures(model))["error"]
        print(f"  {name}: {changes[name]:.4f}", flush=True)

    def seconds(name: str) -> float:
        began = time.perf_counter()
        judge.pictures(models[name])
        return time.perf_counter() - began

    taken = interleaved({name: partial(seconds, name) for name in models}, rounds)
    return {name: {"seconds": taken[name], "change": changes[name]} for name in models}


def both(name: str) -> str:
    """What another node and merging together are called."""
    return f"{MERGING} and {name}"


def times_faster(run: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """Than the plain model, in the median of the rounds."""
    pairs = zip(run[PLAIN]["seconds"], run[name]["seconds"], strict=True)
    return spread([plain / own for plain, own in pairs])[1]


def markdown(result: Mapping[str, Any]) -> str:
    """The tables as a page."""
    parts = [
        "# Do they add up?",
        f"`{result['command']}`, {result['machine']['description']}, {result['date']}. Preset "
        f"{result['preset']}, ratio {result['ratio']}, {result['steps']} steps, timed rounds: "
        f"{result['rounds']}.",
        "Times faster than the plain model; *product* is what merging and the other node would be "
        "together if neither took anything from the other. *Change* is the root of the mean "
        "square of the difference of pixels (0 to 1). The attention of a stand-in takes a time of "
        "its own: compare only its columns *alone* and *both*.",
    ]
    for name, run in result["runs"].items():
        parts += [f"## {name}", table(run), f"`{summary(name, run)}`"]
    return "\n\n".join(parts) + "\n"


def _others(run: Mapping[str, Any]) -> Sequence[str]:
    return [name for name in run if name != MERGING and both(name) in run]


def table(run: Mapping[str, Mapping[str, Any]]) -> str:
    """One row for each other node."""
    rows = []
    for name in _others(run):
        alone, merging, together = (times_faster(run, each) for each in (name, MERGING, both(name)))
        rows.append(
            [
                name,
                *(f"{each:.2f}" for each in (alone, merging, together, alone * merging)),
                *(f"{run[each]['change']:.4f}" for each in (name, MERGING, both(name))),
            ]
        )
    head = ["node", "alone", MERGING, "both", "product", *(f"change, {each}" for each in _CHANGES)]
    return grid(head, rows)


_CHANGES = ("alone", MERGING, "both")


def summary(model: str, run: Mapping[str, Mapping[str, Any]]) -> str:
    """Both over the product, by node: 1 means that they add up."""
    shares = {
        name: times_faster(run, both(name)) / (times_faster(run, name) * times_faster(run, MERGING))
        for name in _others(run)
    }
    words = (f"{name.split(',')[0]}={share:.2f}" for name, share in shares.items())
    return f"summary: {model} {' '.join(words)}"


if __name__ == "__main__":
    sys.exit(main())
