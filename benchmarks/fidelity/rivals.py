"""What people use instead: caches that skip steps, forecasts of steps, and ToMA's merging.

Each function returns a patch, which makes a patched clone of a ComfyUI model.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.model_sampling import CONST
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from comfy_extras import nodes_easycache
from torch import Tensor

from benchmarks.speed.toma import MakePlan, MergedBlocks, positions_of, tile_plan
from tome_nodes.merging.layout import Grid

Patch = Callable[[ModelPatcher], ModelPatcher]

DAMPING = 0.7
"""The share of the change that a forecast takes over."""

_MOST_NOISE = 0.99
"""Pure noise has no signal. A flow's logarithm is taken at this noise level instead."""


def easy_cache(threshold: float = 0.2) -> Patch:
    """ComfyUI's EasyCache, at its defaults but for the threshold.

    In a step that it skips it writes into the model's input. Of a flow in float32 that is the noisy
    latent itself, which the host still needs, and pictures are ruined. Models that people run are
    in half precision and get a copy, so the judges' get one too.
    """

    def patch(model: ModelPatcher) -> ModelPatcher:
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "copy", _with_a_copy)
        return easy_cache_alone(threshold)(clone)

    return patch


def easy_cache_alone(threshold: float = 0.2) -> Patch:
    """The same without a copy of the input."""
    return _cache(nodes_easycache.EasyCacheNode, threshold)


def _with_a_copy(executor: WrapperExecutor, x: Tensor, *others: Any, **named: Any) -> Any:
    return executor(x.clone(), *others, **named)


def lazy_cache(threshold: float = 0.2) -> Patch:
    """ComfyUI's LazyCache, at its defaults but for the threshold."""
    return _cache(nodes_easycache.LazyCacheNode, threshold)


def _cache(node: Any, threshold: float) -> Patch:
    inputs = {"start_percent": 0.15, "end_percent": 0.95, "verbose": False}
    return lambda model: node.EXECUTE_NORMALIZED(model=model, reuse_threshold=threshold, **inputs)[
        0
    ]


def is_evaluated(step: int, steps: int, every: int | None = None) -> bool:
    """Whether a forecast lets the model run in a step.

    The first two steps run, from 16 steps on the first three, and the last; in between one in
    ``every``, which is two by default, and three from 16 steps on.
    """
    first = 3 if steps >= 16 else 2
    every = every or first
    return step < first or step == steps - 1 or (step - first) % every == every - 1


def forecast(every: int | None = None) -> Patch:
    """Put a straight line in the logarithm of signal to noise in place of some steps.

    The line goes through the guided, denoised latents of the last two steps in which the model
    ran. A sampler has to evaluate once a step.
    """

    def patch(model: ModelPatcher) -> ModelPatcher:
        clone = model.clone()
        is_flow = isinstance(model.get_model_object("model_sampling"), CONST)
        known: list[tuple[float, Tensor]] = []

        def predict(
            executor: WrapperExecutor, x: Tensor, level: Tensor, options: Any, *others: Any
        ) -> Tensor:
            levels = options["transformer_options"]["sample_sigmas"]
            step = step_at(level, levels)
            if step == 0:
                known.clear()
            now = _log_ratio(float(level.max()), is_flow)
            if not is_evaluated(step, len(levels) - 1, every):
                (before, first), (after, last) = known
                return last + DAMPING * (now - after) / (after - before) * (last - first)
            denoised = executor(x, level, options, *others)
            known[:] = [*known[-1:], (now, denoised)]
            return denoised

        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "forecast", predict)
        return clone

    return patch


def toma(ratio: float = 0.5, make_plan: MakePlan | None = None) -> Patch:
    """ToMA's merging in all blocks of a Flux; ``make_plan`` makes other plans than ToMA's."""

    def patch(model: ModelPatcher) -> ModelPatcher:
        clone, network = model.clone(), model.model.diffusion_model
        blocks = MergedBlocks(make_plan or partial(tile_plan, ratio=ratio))

        def evaluate(
            executor: WrapperExecutor,
            x: Tensor,
            level: Tensor,
            concat: Any,
            context: Any,
            control: Any,
            options: dict[str, Any],
            **others: Any,
        ) -> Tensor:
            step = step_at(level, options["sample_sigmas"])
            grid = Grid(x.shape[-2] // network.patch_size, x.shape[-1] // network.patch_size)
            blocks.begin(step, grid, tuple(options["cond_or_uncond"]))
            return executor(x, level, concat, context, control, options, **others)

        def run(arguments: dict[str, Any], original: dict[str, Any]) -> dict[str, Any]:
            # In single blocks, text comes first in the same argument.
            text = arguments["img"].shape[1] - blocks.grid.tokens
            before, picture = arguments["img"][:, :text], arguments["img"][:, text:]
            plan = blocks.plan(picture)
            merged = plan.merge(picture)
            positions = positions_of(plan, arguments["pe"], 2)
            given = {"img": torch.cat([before, merged], 1), "pe": positions}
            result = original["original_block"](arguments | given)
            before, changed = result["img"][:, :text], result["img"][:, text:]
            whole = picture + plan.unmerge(changed - merged)
            return result | {"img": torch.cat([before, whole], 1)}

        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "toma", evaluate)
        for kind, stack in (("double", network.double_blocks), ("single", network.single_blocks)):
            for index in range(len(stack)):
                clone.set_model_patch_replace(run, "dit", f"{kind}_block", index)
        return clone

    return patch


def step_at(level: Tensor, levels: Tensor) -> int:
    """The step of a run at a noise level, given those of all steps."""
    return int((levels - level.max()).abs().argmin())


def _log_ratio(level: float, is_flow: bool) -> float:
    """The logarithm of signal to noise at a noise level."""
    if not is_flow:
        return -2 * math.log(level)
    level = min(level, _MOST_NOISE)
    return 2 * math.log((1 - level) / level)
