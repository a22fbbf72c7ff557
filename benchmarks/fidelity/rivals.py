"""What people use instead of merging: caches that skip steps, and forecasts of steps.

Each function returns a patch, which makes a patched clone of a ComfyUI model.
"""

import math
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.model_sampling import CONST
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from torch import Tensor

from benchmarks.patches import Patch, node
from tome_nodes.comfyui.models.unet import deep_blocks

DAMPING = 0.7
"""The share of the change that a forecast takes over."""

_MOST_NOISE = 0.99
"""Pure noise has no signal, so a flow's logarithm is taken at this noise level at most."""

_OF_CACHES = {"start_percent": 0.15, "end_percent": 0.95, "verbose": False}
"""ComfyUI's defaults."""


def easy_cache(threshold: float) -> Patch:
    """ComfyUI's EasyCache, at its defaults except for the threshold.

    In a step that it skips, it writes into the model's input. For a flow in float32, this input is
    the noisy latent itself, which the host still needs, so pictures are ruined. Models that people
    run are in half precision and get a copy, so the judges' models get one too.
    """
    cached = node(EasyCacheNode, reuse_threshold=threshold, **_OF_CACHES)

    def patch(model: ModelPatcher) -> ModelPatcher:
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "copy", _with_a_copy)
        return cached(clone)

    return patch


def _with_a_copy(executor: WrapperExecutor, x: Tensor, *others: Any, **named: Any) -> Any:
    return executor(x.clone(), *others, **named)


def lazy_cache(threshold: float) -> Patch:
    """ComfyUI's LazyCache, at its defaults except for the threshold."""
    return node(LazyCacheNode, reuse_threshold=threshold, **_OF_CACHES)


def deep_cache(interval: int) -> Patch:
    """DeepCache (arXiv 2312.00858), as PyPI's package of that name does it at its branch 0.

    The whole UNet runs in every step whose number is a multiple of ``interval``. In the others,
    only its first input block and its last output block run, and what last came up from the rest is
    used again.
    """

    def patch(model: ModelPatcher) -> ModelPatcher:
        clone = model.clone()
        deep = deep_blocks(model.model.diffusion_model)
        assert deep is not None
        kept: dict[Any, Tensor] = {}

        def call(
            executor: WrapperExecutor, x: Tensor, t: Tensor, *others: Any, **named: Any
        ) -> Any:
            options = named.get("transformer_options") or others[3]
            step = int((options["sample_sigmas"] - float(t.max())).abs().argmin())
            key = x.shape, tuple(options["cond_or_uncond"])
            given = kept.get(key) if step % interval else None
            begun = deep.begin(given)
            try:
                answer = executor(x, t, *others, **named)
                if given is None:
                    assert deep.came is not None
                    kept[key] = deep.came.clone()
            finally:
                deep.end(begun)
            return answer

        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "DeepCache", call)
        return clone

    return patch


def is_evaluated(step: int, steps: int, every: int | None = None) -> bool:
    """Whether the model runs in a step.

    The first two steps and the last run. In between, one step in ``every`` runs, by default one in
    two. In runs of 16 steps and more, the first three run, and by default one in three.
    """
    first = 3 if steps >= 16 else 2
    every = every or first
    return step < first or step == steps - 1 or (step - first) % every == every - 1


def forecast(every: int | None = None) -> Patch:
    """Replace some steps by a straight line in the logarithm of signal to noise.

    The line goes through the guided, denoised latents of the last two steps that the model ran.
    The sampler must evaluate once per step.
    """

    def patch(model: ModelPatcher) -> ModelPatcher:
        clone = model.clone()
        is_flow = isinstance(model.get_model_object("model_sampling"), CONST)
        known: list[tuple[float, Tensor]] = []

        def predict(
            executor: WrapperExecutor, x: Tensor, level: Tensor, options: Any, *others: Any
        ) -> Tensor:
            levels = options["transformer_options"]["sample_sigmas"]
            step = int((levels - level.max()).abs().argmin())
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


def _log_ratio(level: float, is_flow: bool) -> float:
    """The logarithm of signal to noise at a noise level."""
    if not is_flow:
        return -2 * math.log(level)
    level = min(level, _MOST_NOISE)
    return 2 * math.log((1 - level) / level)
