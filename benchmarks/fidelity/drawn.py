"""Shallow steps against fewer steps in the same work, in cells that are drawn by chance.

python3 dev.py bench --drawn stickers [--cells 25] [--seed 1]
python3 dev.py bench --drawn stickers_sd15 ...

A cell is a sampler, a scheduler, a number of steps, a guidance scale, an empty or another negative
prompt, and a first or a second pass; eight pictures of 32x32 tokens are painted in it. Nothing
merges on either side. Cells are kept in benchmarks/results/drawn.json, by judge and seed, one after
the other, so a command that is stopped goes on where it stopped. A cell takes about a minute.
"""

import argparse
import json
import math
import random
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import comfy.sample  # noqa: E402
import torch  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.fidelity import latents, sticker_unet, sticker_unet_sd15  # noqa: E402
from benchmarks.fidelity.meter import Meter  # noqa: E402
from benchmarks.fidelity.pictures import rms  # noqa: E402
from tome_nodes.comfyui.attachment import attach  # noqa: E402
from tome_nodes.settings.config import ToMeConfig  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "drawn.json"
JUDGES: Mapping[str, Callable[[], ModelPatcher]] = {
    "stickers": sticker_unet.load,
    "stickers_sd15": sticker_unet_sd15.load,
}
PICTURES, SIDE = 8, 32

_SAMPLERS = (
    *("euler", "dpmpp_2m", "dpmpp_2m_sde", "euler_ancestral") * 2,
    *("dpmpp_3m_sde", "lms", "ddim", "uni_pc", "uni_pc_bh2", "res_multistep", "er_sde", "deis"),
    *("ipndm", "lcm", "ddpm", "res_multistep_ancestral", "gradient_estimation", "sa_solver"),
)
"""Samplers that evaluate a step once. Those that most people use are here twice."""
_TWICE = (
    *("dpmpp_sde", "dpmpp_2s_ancestral", "heun", "dpm_2", "dpm_2_ancestral", "seeds_2", "heunpp2"),
)
"""Samplers that evaluate a step more than once; they take at most 20 steps."""
_PLUS = ("euler_cfg_pp", "dpmpp_2m_cfg_pp", "euler_ancestral_cfg_pp")
"""Samplers whose guidance is at most 2."""
_SCHEDULERS = (
    *("karras", "normal") * 2,
    *("simple", "sgm_uniform", "exponential", "ddim_uniform", "beta", "kl_optimal"),
    "linear_quadratic",
)


@dataclass(frozen=True)
class Run:
    """What is sampled, apart from the model.

    Attributes:
        start: the index of the first kind of sticker.
        has_negative: whether the negative prompt names other stickers.
    """

    sampler: str
    scheduler: str
    steps: int
    guidance: float
    has_negative: bool
    denoise: float
    start: int
    seed: int


def draw(chance: random.Random) -> Run:
    """A random run."""
    sampler = chance.choice((*_SAMPLERS, *_TWICE, *_PLUS))
    steps = chance.choice(
        (8, 9, 10, 12, 14, 15, 16, 18, 20, 20, 21, 22, 24, 25, 26, 28, 30, 35, 40)
    )
    guidance = chance.choice((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0))
    return Run(
        sampler=sampler,
        scheduler=chance.choice(_SCHEDULERS),
        steps=min(steps, 20) if sampler in _TWICE else steps,
        guidance=min(guidance, 2.0) if sampler in _PLUS else guidance,
        has_negative=chance.random() < 0.5,
        denoise=1.0 if chance.random() < 0.65 else chance.choice((0.3, 0.4, 0.5, 0.6, 0.75)),
        start=chance.choice((0, 4, 8)),
        seed=chance.randrange(1000),
    )


class Painter:
    """Paints with one model."""

    def __init__(self, model: ModelPatcher):
        self.model = model
        self._first = cache(self._painted)

    def paint(self, run: Run, model: ModelPatcher | None = None) -> tuple[Tensor, float]:
        """The latent of a run and its work, by the plain model unless another is given."""
        empty = torch.zeros(PICTURES, latents.CHANNELS, SIDE, SIDE)
        begin = empty if run.denoise == 1 else self._first(run.start)
        positive = _prompts(run.start)
        negative = _prompts(run.start + 5) if run.has_negative else torch.zeros_like(positive)
        meter, sampled = Meter(None), model or self.model
        with meter.watching(sampled), torch.inference_mode():
            latent = comfy.sample.sample(
                *(sampled, comfy.sample.prepare_noise(begin, run.seed), run.steps, run.guidance),
                *(run.sampler, run.scheduler, [[positive, {}]], [[negative, {}]], begin),
                denoise=run.denoise,
                disable_pbar=True,
                seed=run.seed,
            )
        return latent, meter.cost

    def _painted(self, start: int) -> Tensor:
        """The latents that a second pass begins with."""
        first = Run("dpmpp_2m", "karras", 10, 5.0, False, 1.0, start, 77)
        return self.paint(first)[0]


def _prompts(start: int) -> Tensor:
    kinds, clouds = len(sticker_unet.KINDS), sticker_unet.CLOUDS
    each = range(start, start + PICTURES)
    return torch.stack([sticker_unet.prompt(index % kinds, index % clouds) for index in each])


def cell(painter: Painter, run: Run) -> dict[str, Any]:
    """How much shallow steps change a run, and how much fewer steps with the same work do.

    ``fewer`` is interpolated between the two nearest numbers of steps, on the logarithms of their
    errors. ``ratio`` is None if no step is shallow, or if the plain run ends in no picture.
    """
    expected, whole = painter.paint(run)
    config = ToMeConfig(ratio=0.6, forecast=True, merge_attn=False)
    ours, cost = painter.paint(run, attach(painter.model, config, is_quiet=True))
    work = cost / whole
    found: dict[str, Any] = {**asdict(run), "work": round(work, 3), "ratio": None}
    if not expected.isfinite().all() or work > 0.999:
        return found

    def error(latent: Tensor) -> float:
        return rms(sticker_unet.decode(latent) - sticker_unet.decode(expected))

    asked = work * run.steps
    low, high = math.floor(asked), math.ceil(asked)
    errors = {
        steps: error(painter.paint(Run(**{**asdict(run), "steps": steps}))[0])
        for steps in {low, high}
    }
    part = asked - low
    fewer = math.exp((1 - part) * math.log(errors[low]) + part * math.log(errors[high]))
    change = error(ours)
    return found | {
        "error": round(change, 5),
        "fewer": round(fewer, 5),
        "ratio": round(change / fewer, 3),
    }


def summary(cells: Sequence[Mapping[str, Any]]) -> str:
    """The last line."""
    ratios = [each["ratio"] for each in cells if each["ratio"] is not None]
    if not ratios:
        return f"summary: cells={len(cells)} shallow=0"
    above = [sum(each > most for each in ratios) for most in (0.7, 1)]
    return (
        f"summary: cells={len(cells)} shallow={len(ratios)} median={statistics.median(ratios):.2f} "
        f"above_0.7={above[0]} above_1={above[1]} worst={max(ratios):.2f}"
    )


def main() -> None:
    """Draw cells, and keep their results."""
    parser = argparse.ArgumentParser(prog="dev.py bench --drawn", description=__doc__)
    parser.add_argument("judge", choices=JUDGES)
    parser.add_argument("--cells", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The host's samplers warn.
    warnings.simplefilter("ignore", UserWarning)
    painter, chance = Painter(JUDGES[arguments.judge]()), random.Random(arguments.seed)
    for number in range(arguments.cells):
        run = draw(chance)
        kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        own = kept.setdefault(arguments.judge, {}).setdefault(str(arguments.seed), [])
        if number >= len(own):
            own.append(cell(painter, run))
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print(f"{number + 1}: {own[-1]}", flush=True)
    print(summary([each for seed in kept[arguments.judge].values() for each in seed]))


if __name__ == "__main__":
    main()
