"""Find the settings that fulfil a wish on a ComfyUI model, by trials or from earlier ones."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any

import torch
from comfy.ldm.modules import attention
from comfy.model_management import InterruptProcessingException, get_torch_device_name
from comfy.model_patcher import ModelPatcher
from comfyui_version import __version__ as comfyui_version

from ...tuning.search import (
    BALANCED,
    FAST,
    SPEED,
    UNPATCHED,
    Ladder,
    Measured,
    Wish,
    choose,
    find,
)
from ...tuning.summary import Found
from ..attachment import detach, record_for
from ..models.base import class_name
from . import tune_cache
from .trials import Sampling, Trials

log = logging.getLogger("tome_nodes")

# ComfyUI computes steps / denoise noise levels: too many for a smaller denoise.
_LEAST_DENOISE = 0.01

_METHOD = 10
"""Raise it when what merging does changes, or how it is measured: older figures are then void."""


def tune(
    model: ModelPatcher,
    sampling: Sampling,
    wish: Wish,
    measure_again: bool = False,
    make_trials: Callable[..., Trials] = Trials,
) -> Found:
    """The settings that fulfil a wish best in a sampling run.

    Args:
        model: the model. It is not changed; if it is patched, that is ignored.
        sampling: the run.
        wish: what the settings should do.
        measure_again: whether to ignore what was measured earlier.
        make_trials: makes the trials of a model.

    Raises:
        InterruptProcessingException: the user stopped the trials; what they measured is lost.
    """
    if wish.needs_nothing:
        return Found(wish)
    if sampling.denoise < _LEAST_DENOISE:
        obstacle = f"with denoise {sampling.denoise:g} there is nothing to sample"
        return Found(wish, obstacle=obstacle)
    try:
        record = record_for(model)
    except ValueError as error:
        return Found(wish, obstacle=str(error))
    # In a transformer, both presets do the same.
    ladders = [BALANCED] if record.merges_at_calls else [BALANCED, FAST]
    try:
        return _tried(make_trials(model, sampling), model, sampling, wish, ladders, measure_again)
    except InterruptProcessingException:
        raise
    except Exception as error:
        # If the sampler fails too, it reports the error itself.
        obstacle = f"the model could not be tried: {type(error).__name__}: {error}"
        log.warning("[ToMe] %s", obstacle)
        return Found(wish, obstacle=obstacle)


def _tried(
    trials: Trials,
    model: ModelPatcher,
    sampling: Sampling,
    wish: Wish,
    ladders: Sequence[Ladder],
    measure_again: bool,
) -> Found:
    key = _key(model, sampling, trials)
    kept = tune_cache.Kept() if measure_again else tune_cache.read(key)
    figures, instead = kept.figures, kept.instead
    if wish not in kept.wishes:
        figures = find(wish, figures, ladders, trials.measure)
    candidate = choose(wish, figures)
    compared = candidate or UNPATCHED
    speed = wish.amount if candidate is None else figures[candidate].speed
    rivals: Mapping[str, Measured] = {}
    # If no settings are like enough, the result names the nearest ones, and no alternatives.
    if candidate is not None or wish.goal == SPEED:
        known = instead.get(compared, {})
        rivals = trials.instead(candidate, speed, known)
        instead = {**instead, compared: {**known, **rivals}}
    trials.end()
    if trials.steps_taken:
        facts = {each: found for each, found in figures.items() if not found.has_failed}
        is_settled = len(facts) == len(figures) > 0
        is_new = wish not in kept.wishes
        wishes = (*kept.wishes, wish) if is_settled and is_new else kept.wishes
        others = {
            each: found
            for each, found in instead.items()
            if not any(measured.has_failed for measured in found.values())
        }
        tune_cache.write(key, tune_cache.Kept(date.today().isoformat(), facts, wishes, others))
    return Found(
        wish,
        figures,
        rivals,
        trials.steps_taken / trials.steps,
        "" if trials.steps_taken else kept.date,
    )


def _key(model: ModelPatcher, sampling: Sampling, trials: Trials) -> dict[str, Any]:
    """Everything known that the figures depend on."""
    plain = detach(model)
    options = plain.model_options
    patches = {
        *plain.object_patches,
        *options,
        *_names(options["transformer_options"]),
        *_names(plain.wrappers),
    }
    return {
        "model": class_name(model.model),
        "bytes": model.model_size(),
        "dtype": str(model.model.get_dtype_inference()),
        "latent": list(trials.shape),
        "steps": trials.steps,
        "sampler": [sampling.sampler_name, sampling.scheduler, sampling.denoise],
        "empty": trials.is_empty,
        "masked": sampling.latent_image.get("noise_mask") is not None,
        "guided": sampling.cfg != 1.0,
        "prompts": [_shape_of(sampling.positive), _shape_of(sampling.negative)],
        "attention": attention.optimized_attention.__name__,
        "patches": sorted(patches),
        "device": get_torch_device_name(model.load_device),
        "torch": torch.__version__,
        "comfyui": comfyui_version,
        "method": _METHOD,
    }


def _names(patches: Mapping[str, Any]) -> Iterator[str]:
    """The kinds and names of the patches that other nodes have put in a mapping."""
    for kind, found in patches.items():
        inner = found if isinstance(found, Mapping) else {"": found}
        yield from (f"{kind} {name}".strip() for name, value in inner.items() if _is_there(value))


def _is_there(value: Any) -> bool:
    # Not ``bool(value)`` for all: tensors have no truth value.
    return bool(value) if isinstance(value, list | tuple | Mapping) else value is not None


def _shape_of(prompts: Any) -> list[Any]:
    """What decides how long prompts take: their lengths, and what comes with them."""
    return [
        [
            list(getattr(text, "shape", ())),
            sorted(map(str, others)),
            [list(each.shape) for each in others.get("reference_latents") or ()],
            type(others.get("control")).__name__,
        ]
        for text, others in prompts
    ]
