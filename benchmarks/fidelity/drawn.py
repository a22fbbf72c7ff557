"""Shallow steps against fewer steps in the same work, in cells that are drawn by chance.

python3 dev.py bench --drawn stickers [--cells 25] [--seed 1] [--again 3 7]
python3 dev.py bench --drawn stickers_sd15 ...

A cell is a sampler, a scheduler, a number of steps, a guidance scale, an empty or another negative
prompt, and a first or a second pass; from seed 4 on also a guider or a node that guides, and what
the model predicts. Eight pictures of 32x32 tokens are painted in it. Nothing merges on either side.
Cells are kept in benchmarks/results/drawn.json, by judge and seed, one after the other, so a
command that is stopped goes on where it stopped. A cell takes about a minute. After a change of
which steps are shallow, --again asks those cells anew whose plan it changes, by numbers from 0.
"""

import argparse
import json
import math
import random
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import torch  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.fidelity import sticker_unet, sticker_unet_sd15  # noqa: E402
from benchmarks.fidelity.drawn_runs import Painter, Run, draw  # noqa: E402
from benchmarks.fidelity.meter import Meter  # noqa: E402
from benchmarks.fidelity.pictures import lpips  # noqa: E402
from tome_nodes.comfyui.attachment import attach  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "drawn.json"
JUDGES: Mapping[str, Callable[[], ModelPatcher]] = {
    "stickers": sticker_unet.load,
    "stickers_sd15": sticker_unet_sd15.load,
}

_CONFIG = ToMeConfig(ratio=0.6, forecast=True, merge_attn=False)


def cell(painter: Painter, run: Run) -> dict[str, Any]:
    """How much shallow steps change a run, and how much fewer steps with the same work do.

    ``fewer`` is interpolated between the two nearest numbers of steps, on the logarithms of their
    errors. ``ratio`` is that of all pictures together, ``ratios`` the least, the median and the
    most of a single one; ``lpips`` has the same by LPIPS. ``ratio`` is None if no step is shallow,
    or if the plain run ends in no picture.
    """
    whole, shallow = Meter(None), Meter(None)
    latent = painter.paint(run, meter=whole)
    ours = painter.paint(run, lambda model: attach(model, _CONFIG, is_quiet=True), shallow)
    work = shallow.cost / whole.cost
    found: dict[str, Any] = {**asdict(run), "work": round(work, 3), "ratio": None}
    if not latent.isfinite().all() or work > 0.999:
        return found
    part, steps = math.modf(work * run.steps)
    low, high = (painter.paint(replace(run, steps=int(steps) + more)) for more in (0, 1))
    expected, *pictures = (sticker_unet.decode(each) for each in (latent, ours, low, high))
    squares = [(picture - expected).square().mean((1, 2, 3)) for picture in pictures]
    perceived = [lpips(picture, expected) for picture in pictures]
    return {
        **found,
        **_compared([each.mean().sqrt() for each in squares], part),
        "ratios": _ratios([each.sqrt() for each in squares], part),
        "lpips": {
            **_compared([each.mean() for each in perceived], part),
            "ratios": _ratios(perceived, part),
        },
    }


def _compared(errors: Sequence[Tensor], part: float) -> dict[str, float]:
    """Ours, that of fewer steps, and the ratio; see :func:`_ratios`."""
    fewer = _between(errors, part)
    ours = errors[0]
    return {
        "error": _short(ours),
        "fewer": _short(fewer),
        "ratio": round(float(ours / fewer), 3),
    }


def _ratios(errors: Sequence[Tensor], part: float) -> list[float]:
    """The least, the median and the most of the ratios of pictures.

    Args:
        errors: ours, and those of the two nearest numbers of steps.
        part: where the same work lies between these.
    """
    each = sorted((errors[0] / _between(errors, part)).tolist())
    return [round(value, 3) for value in (each[0], statistics.median(each), each[-1])]


def _between(errors: Sequence[Tensor], part: float) -> Tensor:
    _, low, high = (each.clamp(min=1e-9).log() for each in errors)
    return torch.lerp(low, high, part).exp()


def _short(value: Tensor) -> float:
    return float(f"{float(value):.3g}")


def summary(cells: Sequence[Mapping[str, Any]]) -> str:
    """The last lines: one by root mean square, one by LPIPS."""
    known = [each for each in cells if each["ratio"] is not None]
    perceived = [each["lpips"]["ratio"] for each in known if "lpips" in each]
    lines = [f"summary: cells={len(cells)} {_spread([each['ratio'] for each in known])}"]
    if perceived:
        lines.append(f"lpips: {_spread(perceived)}")
    return "\n".join(lines)


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "shallow=0"
    above = " ".join(
        f"above_{most}={sum(each > most for each in ratios)}" for most in (0.5, 0.7, 1)
    )
    median, most = statistics.median(ratios), max(ratios)
    return f"shallow={len(ratios)} median={median:.2f} {above} worst={most:.2f}"


def main() -> None:
    """Draw cells, and keep their results."""
    parser = argparse.ArgumentParser(prog="dev.py bench --drawn", description=__doc__)
    parser.add_argument("judge", choices=JUDGES)
    parser.add_argument("--cells", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=int, nargs="*", default=[], help="cells to ask anew")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The host's samplers warn.
    warnings.simplefilter("ignore", UserWarning)
    painter, chance = Painter(JUDGES[arguments.judge]()), random.Random(arguments.seed)
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    own = kept.setdefault(arguments.judge, {}).setdefault(str(arguments.seed), [])
    for number in arguments.again:
        own[number] = None
    for number in range(arguments.cells):
        run = draw(chance, arguments.seed)
        own += [None] * (number + 1 - len(own))
        if own[number] is None:
            own[number] = cell(painter, run)
            RESULTS.write_text(_written(kept), encoding="utf-8")
            print(f"{number}: {own[number]}", flush=True)
    print(summary([each for seed in kept[arguments.judge].values() for each in seed if each]))


def _written(kept: Mapping[str, Any]) -> str:
    """As JSON, with a line for each cell."""
    judges = (
        f'"{judge}": {{\n'
        + ",\n".join(
            f'"{seed}": [\n' + ",\n".join(map(json.dumps, cells)) + "\n]"
            for seed, cells in seeds.items()
        )
        + "\n}"
        for judge, seeds in kept.items()
    )
    return "{\n" + ",\n".join(judges) + "\n}\n"


if __name__ == "__main__":
    main()
