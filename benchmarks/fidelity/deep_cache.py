"""Shallow steps against PyPI's DeepCache, both in a pipeline of diffusers.

python3 dev.py bench --deep-cache [--samplers euler ...] [--steps 20 ...]

Eight scenes of *stickers* with 32x32 tokens are painted at guidance 5. Nothing merges, and ours
gets a ratio at which as many steps are whole as with DeepCache. Errors are over pixels, from the
run of all steps. Results are kept in benchmarks/results/deep-cache.json. The package is fetched
into ``demo/`` and not installed. It takes a few minutes on one thread.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.host import use_cpu
from tools.environment import ROOT

use_cpu()

import torch  # noqa: E402
from diffusers import (  # noqa: E402
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
)
from torch import Tensor  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from benchmarks.fidelity import sticker_unet, sticker_unet_diffusers  # noqa: E402
from benchmarks.fidelity.meter import ON_CPU  # noqa: E402
from benchmarks.fidelity.shares import spread  # noqa: E402
from benchmarks.machine import origin  # noqa: E402
from benchmarks.wheels import wheel  # noqa: E402
from tome_nodes.python.patch import apply_patch, remove_patch  # noqa: E402
from tome_nodes.skipping.plan import leaves_grain, whole_evaluations  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "deep-cache.json"
PACKAGE = "DeepCache", "0.1.1", "aa4aa5f8e9a2e5a41d59900305c3c86c20834537d0c67bf2d8bb7075618ae48a"
INTERVALS = (2, 3, 5)
"""How many steps each whole one of DeepCache serves."""
PICTURES, SIDE, GUIDANCE = 8, 32, 5.0

_NOISE: Mapping[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "leading",
    "steps_offset": 1,
}
"""The settings of SDXL's scheduler."""
SAMPLERS: Mapping[str, Callable[[], Any]] = {
    "dpmpp_2m karras": lambda: DPMSolverMultistepScheduler(**_NOISE, use_karras_sigmas=True),
    "euler": lambda: EulerDiscreteScheduler(**_NOISE),
    "euler_ancestral": lambda: EulerAncestralDiscreteScheduler(**_NOISE),
}


class Painter:
    """Paints with a pipeline in some number of steps."""

    def __init__(self, sampler: str, steps: int):
        self.pipeline = StableDiffusionPipeline(
            vae=None,
            text_encoder=None,
            tokenizer=None,
            unet=sticker_unet_diffusers.load(),
            scheduler=SAMPLERS[sampler](),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        self.pipeline.set_progress_bar_config(disable=True)
        self._sampler, self._steps = sampler, steps

    def paint(self) -> tuple[Tensor, float]:
        """The pixels ``[8, 3, 128, 128]``, and the multiplications and additions that they took."""
        kinds, clouds = len(sticker_unet.KINDS), sticker_unet.CLOUDS
        prompts = [sticker_unet.prompt(index % kinds, index % clouds) for index in range(PICTURES)]
        side = SIDE * self.pipeline.vae_scale_factor
        with FlopCounterMode(display=False, custom_mapping=ON_CPU) as operations:
            latent = self.pipeline(
                prompt_embeds=torch.stack(prompts),
                negative_prompt_embeds=torch.zeros(PICTURES, *sticker_unet.PROMPT_SHAPE),
                num_inference_steps=self._steps,
                guidance_scale=GUIDANCE,
                height=side,
                width=side,
                generator=torch.Generator().manual_seed(0),
                output_type="latent",
            ).images
        return sticker_unet.decode(latent), operations.get_total_flops()

    def deep_cache(self, interval: int) -> tuple[Tensor, float]:
        """The same with DeepCache."""
        from DeepCache import DeepCacheSDHelper

        helper = DeepCacheSDHelper(pipe=self.pipeline)
        helper.set_params(cache_interval=interval, cache_branch_id=0)
        helper.enable()
        try:
            return self.paint()
        finally:
            helper.disable()

    def shallow(self, whole: int) -> tuple[Tensor, float]:
        """The same with so many whole steps, the others shallow."""
        apply_patch(
            self.pipeline,
            ratio=ratio_for(whole, self._sampler, self._steps),
            merge_attn=False,
            forecast=True,
        )
        try:
            return self.paint()
        finally:
            remove_patch(self.pipeline)


def ratio_for(whole: int, sampler: str, steps: int) -> float:
    """The smallest ratio at which so many of a run's steps are whole, or as few as can be."""
    scheduler = SAMPLERS[sampler]()
    scheduler.set_timesteps(steps)
    levels = [-2 * math.log(noise) for noise in scheduler.sigmas.tolist() if noise > 0]
    counts = {
        percent / 100: len(whole_evaluations(percent / 100, levels, leaves_grain(sampler)))
        for percent in range(96)
    }
    most = max(whole, min(counts.values()))
    return next(ratio for ratio, count in counts.items() if count <= most)


def compared(sampler: str, steps: int) -> dict[str, Any]:
    """The errors of both at each interval, pooled and of each scene."""
    painter = Painter(sampler, steps)
    expected, work = painter.paint()

    def row(painted: Tensor, cost: float) -> dict[str, Any]:
        squares = (painted - expected).square().mean((1, 2, 3))
        return {
            "work": round(cost / work, 4),
            "error": round(float(squares.mean().sqrt()), 5),
            "scenes": [round(each, 5) for each in squares.sqrt().tolist()],
        }

    found: dict[str, Any] = {}
    for interval in INTERVALS:
        theirs = row(*painter.deep_cache(interval))
        ours = row(*painter.shallow(-(-steps // interval)))
        found[str(interval)] = {"deep_cache": theirs, "ours": ours}
        told = spread(ours["scenes"], theirs["scenes"])
        print(f"{sampler}, {steps} steps, interval {interval}: {told}", flush=True)
    return found


def main() -> None:
    """Compare under each sampler in each number of steps, and keep what comes."""
    parser = argparse.ArgumentParser(prog="dev.py bench --deep-cache", description=__doc__)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=[*SAMPLERS])
    parser.add_argument("--steps", nargs="+", type=int, default=[20, 21, 26])
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    sys.path.append(str(wheel(*PACKAGE)))
    taken = origin("cpu", "bench --deep-cache")
    taken["machine"] = taken["machine"]["description"]
    for sampler in arguments.samplers:
        for steps in arguments.steps:
            found = {"origin": taken, **compared(sampler, steps)}
            kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
            kept.setdefault(sampler, {})[str(steps)] = found
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
