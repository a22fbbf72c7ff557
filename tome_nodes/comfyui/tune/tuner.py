"""Find the settings that fulfil a wish on a ComfyUI model, by trials or from earlier ones.

Three things are tried: a few settings, a plain run of fewer steps that takes no longer, and
ComfyUI's EasyCache.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from math import floor
from typing import Any

import torch
from comfy.ldm.modules import attention
from comfy.model_management import InterruptProcessingException, get_torch_device_name
from comfy.model_patcher import ModelPatcher
from comfyui_version import __version__ as comfyui_version

from ...ops.clock import Clock
from ...tuning.search import (
    BALANCED,
    FAST,
    FASTER,
    SPEED,
    Candidate,
    Ladder,
    Measured,
    Wish,
    choose,
)
from ...tuning.summary import Found
from .. import attachment
from ..guided_answers import is_cached
from ..models.base import class_name
from ..validation import config_of
from . import tune_cache
from .trials import Sampling, Trials
from .values import described

log = logging.getLogger("tome_nodes")

# ComfyUI computes steps / denoise noise levels: too many for a smaller denoise.
_LEAST_DENOISE = 0.01

_ALTERNATIVES = 2
"""What is tried beside settings: fewer steps, and EasyCache."""

EASY_CACHE = "EasyCache"
_EASY_CACHE_DEFAULTS = (0.2, 0.15, 0.95, False)

_METHOD = 23
"""Raise this when merging changes, or how it is measured: older figures are void then."""


def tune(
    model: ModelPatcher,
    sampling: Sampling,
    wish: Wish,
    measure_again: bool = False,
    clock: Clock | None = None,
) -> Found:
    """The settings that fulfil a wish best in a sampling run.

    The model is not changed; if it is patched, that is ignored. ``measure_again`` says whether to
    ignore what was measured earlier; ``clock`` is None for the clock of the model's device.

    Raises:
        InterruptProcessingException: the user stopped the trials; what they measured is lost.
    """
    if wish.needs_nothing:
        return Found(wish)
    if sampling.denoise < _LEAST_DENOISE:
        obstacle = f"with denoise {sampling.denoise:g} there is nothing to sample"
        return Found(wish, obstacle=obstacle)
    try:
        gentlest = config_of(**BALANCED[0].settings)
        patched = attachment.attach(model, gentlest)
    except ValueError as error:
        return Found(wish, obstacle=str(error))
    if not attachment.is_attached(patched):
        return Found(wish, obstacle="this ComfyUI is not as ToMe knows it; the log has more")
    # Where steps are forecast, both presets do the same.
    ladders = [BALANCED, FAST] if attachment.merges(model, gentlest) else [BALANCED]
    try:
        runs = 1 + sum(map(len, ladders)) + _ALTERNATIVES
        trials = Trials(model, sampling, runs, clock)
        return _tried(trials, _key(model, sampling, trials), wish, ladders, measure_again)
    except InterruptProcessingException:
        raise
    except Exception as error:
        # If the sampler fails too, it reports the error itself.
        obstacle = f"the model could not be tried: {type(error).__name__}: {error}"
        log.warning("[ToMe] %s", obstacle)
        return Found(wish, obstacle=obstacle)


def _tried(
    trials: Trials, key: Mapping[str, Any], wish: Wish, ladders: Sequence[Ladder], anew: bool
) -> Found:
    """The result of trials; ``anew`` says whether to ignore what was measured earlier."""
    kept = tune_cache.Kept() if anew else tune_cache.read(key)
    known = dict(kept.tried)

    def tried(name: str, model: ModelPatcher, steps: int | None = None) -> Measured:
        if name not in known:
            known[name] = trials.measure(name, model, steps)
        return known[name]

    figures: dict[Candidate, Measured] = {}
    for ladder in ladders:
        for candidate in ladder:
            config = config_of(**candidate.settings)
            patched = attachment.attach(trials.plain, config, is_quiet=True)
            figures[candidate] = tried(str(candidate), patched)
    taken = choose(wish, figures)
    speed = wish.amount if wish.goal == SPEED else FASTER
    if taken is not None:
        speed = figures[taken].speed
    instead: dict[str, Measured] = {}
    fewer = min(trials.steps - 1, floor(trials.steps / speed))
    if fewer:
        name = f"{fewer} of {trials.steps} steps"
        instead[name] = tried(name, trials.plain, fewer)
    cached = _with_easy_cache(trials.plain)
    if cached is not None:
        instead[EASY_CACHE] = tried(EASY_CACHE, cached)
    trials.end()
    if not trials.steps_taken:
        return Found(wish, figures, instead, date=kept.date)
    # What was in the way, such as too little memory, may be gone the next time.
    facts = {name: measured for name, measured in known.items() if measured.obstacle is None}
    tune_cache.write(key, tune_cache.Kept(date.today().isoformat(), facts))
    return Found(wish, figures, instead, trials.steps_taken / trials.steps)


def _with_easy_cache(model: ModelPatcher) -> ModelPatcher | None:
    """A clone with ComfyUI's EasyCache; None if there is none, or the model has it already."""
    if is_cached(model.model_options):
        return None
    try:
        from comfy_extras.nodes_easycache import EasyCacheNode
    except ImportError:
        return None
    cached: ModelPatcher = EasyCacheNode.execute(model, *_EASY_CACHE_DEFAULTS).args[0]
    return cached


def _key(model: ModelPatcher, sampling: Sampling, trials: Trials) -> dict[str, Any]:
    """Everything known that the figures depend on."""
    plain = trials.plain
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
        "latent": list(attachment.picture_of(trials.latent).shape),
        "steps": trials.steps,
        "sampler": [sampling.sampler_name, sampling.scheduler, sampling.denoise],
        "empty": attachment.is_empty(trials.latent),
        "masked": sampling.latent_image.get("noise_mask") is not None,
        "guidance": sampling.cfg,
        "prompts": [_extras_of(sampling.positive), _extras_of(sampling.negative)],
        "attention": attention.optimized_attention.__name__,
        "patches": sorted(patches),
        "values": tune_cache.digest(described(*_values(plain))),
        "device": get_torch_device_name(model.load_device),
        "torch": torch.__version__,
        "comfyui": comfyui_version,
        "method": _METHOD,
    }


def _values(plain: ModelPatcher) -> Iterator[Any]:
    """Everything that a model's file and other nodes decide about it, besides its kind."""
    # How the model was loaded; None if its loader does not say.
    yield plain.cached_patcher_init
    yield plain.get_model_object("model_sampling")
    yield from (plain.model_options, plain.object_patches, plain.injections, plain.patches)
    yield from ([*by_name.items()] for by_name in plain.wrappers.values() if by_name)


def _names(patches: Mapping[str, Any]) -> Iterator[str]:
    """The kinds and names of the patches that other nodes have put in a mapping."""
    for kind, patch in patches.items():
        inner = patch if isinstance(patch, Mapping) else {"": patch}
        yield from (f"{kind} {name}".strip() for name in inner)


def _extras_of(prompts: Any) -> list[Any]:
    """What comes with prompts: reference pictures, ControlNets, areas, but not what they say."""
    return [
        [
            sorted(map(str, extras)),
            [list(latent.shape) for latent in extras.get("reference_latents") or ()],
            tune_cache.digest(
                described(*(each for each in extras.values() if not torch.is_tensor(each)))
            ),
        ]
        for _, extras in prompts
    ]
