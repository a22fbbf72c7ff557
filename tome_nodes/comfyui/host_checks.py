"""Check the parts of ComfyUI that the pack relies on, whenever a model is patched.

None of them is a public interface, so a later version may change them. If one did, the model stays
unpatched.
"""

import inspect
from typing import Any

import comfy.samplers
from comfy.ldm.modules import attention
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.samplers import CFGGuider
from comfyui_version import __version__
from torch import Tensor

from .models.base import ComfyFamily, handed

VERSION = f"ComfyUI {__version__}"
"""ComfyUI's name and version."""

_WRAPPERS = ("add_wrapper_with_key", "remove_wrappers_with_key", "get_wrappers")
_APPLY_MODEL = ("x", "t", "c_concat", "c_crossattn", "control", "transformer_options")
OUTER_SAMPLE = ("noise", "latent_image", "sampler", "sigmas", "denoise_mask", "callback")
"""The first arguments of ``CFGGuider.outer_sample``, by position."""
_PREDICT_NOISE = ("x", "timestep", "model_options")
_CALC_COND_BATCH = ("conds", "x_in", "timestep", "model_options")
"""The arguments of ``calc_cond_batch`` behind the model."""
_NOISE_LEVELS = ("percent_to_sigma", "sigma_max")


def changed_part(patcher: ModelPatcher, family: ComfyFamily, diffusion_model: Any) -> str | None:
    """The first part of ComfyUI that merging relies on and that is not as the pack knows it.

    None if all parts are as known to the pack, and to the family of the model.
    """
    model: Any = patcher.model
    changed = _first_changed(
        patcher,
        ("BaseModel.apply_model", begins_with(type(model), "apply_model", *_APPLY_MODEL)),
        ("BaseModel.get_dtype_inference", hasattr(model, "get_dtype_inference")),
        ("optimized_attention", _attention_calls_overrides()),
    )
    return changed or family.changed_part(diffusion_model)


def changed_for_forecasts(patcher: ModelPatcher) -> str | None:
    """The first changed interface of ComfyUI that skipped steps need, else None."""
    return _first_changed(
        patcher,
        ("CFGGuider.predict_noise", begins_with(CFGGuider, "predict_noise", *_PREDICT_NOISE)),
        ("calc_cond_batch", begins_with(comfy.samplers, "calc_cond_batch", *_CALC_COND_BATCH)),
        ("the wrapper of guided answers", hasattr(WrappersMP, "PREDICT_NOISE")),
        ("the wrapper of calc_cond_batch", hasattr(WrappersMP, "CALC_COND_BATCH")),
    )


def _first_changed(patcher: ModelPatcher, *others: tuple[str, bool]) -> str | None:
    """The first part that is not as known, among what every run relies on and ``others``."""
    sampling = getattr(patcher.model, "model_sampling", None)
    parts = [
        ("ModelPatcher", all(hasattr(patcher, name) for name in _WRAPPERS)),
        ("BaseModel.model_sampling", all(hasattr(sampling, name) for name in _NOISE_LEVELS)),
        ("CFGGuider.outer_sample", begins_with(CFGGuider, "outer_sample", *OUTER_SAMPLE)),
        *others,
    ]
    return next((part for part, is_known in parts if not is_known), None)


def begins_with(kind: Any, method: str, *names: str) -> bool:
    """Whether a class has a method with these parameters behind ``self``, or a module a function
    with these behind its first one."""
    function = getattr(kind, method, None)
    known = () if function is None else tuple(inspect.signature(function).parameters)
    return known[1 : len(names) + 1] == names


def _attention_calls_overrides() -> bool:
    """Whether attention calls an override in the transformer options, and with plain tensors."""
    call = handed(attention.optimized_attention)
    if call is None:
        return False
    function, *tensors, heads = call
    return callable(function) and heads == 1 and all(isinstance(x, Tensor) for x in tensors)
