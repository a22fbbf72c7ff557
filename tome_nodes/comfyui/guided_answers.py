"""What the parts of a run that follow its guided answers share: forecasts, and shallow steps.

A guided answer is what ComfyUI's sampler gets for a noisy latent. The guider makes it from the
answers to several conditions, by one call of ``calc_cond_batch`` or by several.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ..skipping.plan import adds_noise
from ..skipping.trajectory import Trajectory
from .neighbours import KEY


@contextmanager
def wrapped(
    guider: Any, predict_noise: Callable[..., Any], calc_cond_batch: Callable[..., Any]
) -> Iterator[None]:
    """Wrap the guided answers of a run of ComfyUI's ``guider``, and the answers to conditions.

    The wrappers are inside of all others.
    """
    kinds = guider.model_options["transformer_options"].setdefault("wrappers", {})
    wrappers = {
        WrappersMP.PREDICT_NOISE: predict_noise,
        WrappersMP.CALC_COND_BATCH: calc_cond_batch,
    }
    for kind, wrapper in wrappers.items():
        of_kind = kinds.setdefault(kind, {})
        of_kind.pop(KEY, None)
        of_kind[KEY] = [wrapper]
    try:
        yield
    finally:
        for kind in wrappers:
            del kinds[kind][KEY]


@contextmanager
def seen_by_guidance(guider: Any, see: Callable[[Mapping[str, Any]], Any]) -> Iterator[None]:
    """Show the answers to conditions that a step's guidance gets, before other code changes them.

    ``see`` is called with what the host hands to such functions, and returns ``conds_out`` of it.
    """
    options = guider.model_options
    others = options.get(_BEFORE_GUIDANCE)
    options[_BEFORE_GUIDANCE] = [see, *(others or ())]
    try:
        yield
    finally:
        del options[_BEFORE_GUIDANCE]
        if others is not None:
            options[_BEFORE_GUIDANCE] = others


_BEFORE_GUIDANCE = "sampler_pre_cfg_function"
"""The host's name for the functions that it calls before guidance."""


class Latents:
    """The latents of a run, each of which should be where the sampler was led."""

    def __init__(self, sampler: str, mask: Tensor | None, model_options: Mapping[str, Any]):
        """Follow the sampler of this name; ``mask`` is 1 where it paints, None if everywhere."""
        is_own = sampler in _SAMPLERS and "denoise_mask_function" not in model_options
        # Around the mask, the host puts in the given picture in every step.
        self._where = None if mask is None else mask == 1
        is_seen = self._where is None or bool(self._where.any())
        self._trajectory = Trajectory() if is_own and is_seen else None
        self._adds_noise = adds_noise(sampler)
        self._by_parts = "cfgpp" in sampler.replace("_", "")

    def begin(self, latent: Tensor, noise: float) -> Tensor | None:
        """Whether a latent of a noise level is where the sampler was led, see ``Trajectory``."""
        if self._trajectory is None:
            return None
        added = noise if self._adds_noise else 0.0
        return self._trajectory.begin(latent, added, self._where)

    def note(self, answer: Tensor) -> None:
        """Note the guided answer to the latest latent."""
        if self._trajectory is not None:
            self._trajectory.note(answer, self._where)

    def note_parts(self, parts: Sequence[Tensor]) -> None:
        """Note the answers to conditions for the latest latent, of all of it.

        Samplers of CFG++ also step by the one to the negative prompt alone.
        """
        if self._by_parts:
            for part in parts:
                self.note(part)

    def clear(self) -> None:
        """Keep nothing any more."""
        self._trajectory = None


_SAMPLERS = frozenset({*comfy.samplers.SAMPLER_NAMES, "unipc", "unipc_bh2"}) - {
    *("dpm_fast", "dpm_adaptive", "ar_video")
}
"""The samplers of the host whose next latent follows from the last few."""


def place_in(part: Tensor, whole: Tensor) -> Hashable:
    """Where a part of a latent lies, such as a context window: None if it is all of it.

    Some of its numbers are looked for in the latent, whose noise is nowhere alike. Of a part that
    is found nowhere, the place is like no other.
    """
    if part.shape == whole.shape:
        return None
    if part.device != whole.device or part.shape[-1] < 2 or whole.shape[-1] < 2:
        return object()
    rows = part.reshape(-1, part.shape[-1])
    at = torch.linspace(0, len(rows) - 1, _PROBES).round().long().tolist()
    numbers = whole.flatten()
    places = torch.stack([_place_of(rows[row, :2], numbers) for row in at]).tolist()
    return object() if -1 in places else tuple(places)


_PROBES = 12
"""So many pairs of numbers tell where a part lies."""


def _place_of(pair: Tensor, numbers: Tensor) -> Tensor:
    """Where the first of two numbers stands before the second; -1 if it does nowhere."""
    is_here = (numbers[:-1] == pair[0]) & (numbers[1:] == pair[1])
    return torch.where(is_here.any(), is_here.to(torch.uint8).argmax(), -1)


def options_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model options among the arguments of ``CFGGuider.predict_noise``."""
    options: Mapping[str, Any] = args[2] if len(args) > 2 else kwargs.get("model_options", {})
    return options


def is_cached(model_options: Mapping[str, Any]) -> bool:
    """Whether EasyCache or LazyCache skips steps of a run."""
    return "easycache" in model_options["transformer_options"]
