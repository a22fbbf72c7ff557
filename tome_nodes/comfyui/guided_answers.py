"""What the parts of a run that follow its guided answers share: forecasts, and shallow steps.

A guided answer is what ComfyUI's sampler gets for a noisy latent. The guider makes it from the
answers to several conditions, by one call of ``calc_cond_batch`` or by several.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.samplers
from torch import Tensor

from .. import reasons
from ..forecasting.trajectory import Trajectory
from ..patching.schedule import is_active, progress_at
from ..settings.config import ToMeConfig
from ..skipping.plan import adds_noise
from .neighbours import KEY


@contextmanager
def wrapped(guider: Any, wrappers: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Wrap parts of a run of ComfyUI's ``guider``, inside of all other wrappers.

    The keys of ``wrappers`` are of ``WrappersMP``.
    """
    kinds = guider.model_options["transformer_options"].setdefault("wrappers", {})
    for kind, wrapper in wrappers.items():
        of_kind = kinds.setdefault(kind, {})
        of_kind.pop(KEY, None)
        of_kind[KEY] = [wrapper]
    try:
        yield
    finally:
        for kind in wrappers:
            del kinds[kind][KEY]


class Latents:
    """The latents of a run, each of which should be where the sampler was led."""

    def __init__(self, sampler: str, mask: Tensor | None, model_options: Mapping[str, Any]):
        """Follow the sampler of this name; ``mask`` is 1 where it paints, None if everywhere."""
        is_own = sampler in _SAMPLERS and "denoise_mask_function" not in model_options
        self._trajectory = Trajectory() if is_own else None
        self._adds_noise = adds_noise(sampler)
        # Around the mask, the host puts in the given picture in every step.
        self._where = None if mask is None else mask == 1

    def follow(self, latent: Tensor, noise: float) -> Tensor | None:
        """Whether a latent of a noise level is where the sampler was led, see ``Trajectory``."""
        if self._trajectory is None:
            return None
        added = noise if self._adds_noise else 0.0
        return self._trajectory.leads_to(latent, added, self._where)

    def add(self, latent: Tensor, answer: Tensor) -> None:
        """Keep a latent and the guided answer to it, which must not change from then on."""
        if self._trajectory is not None:
            self._trajectory.add(latent, [answer])

    def clear(self) -> None:
        """Keep nothing any more."""
        self._trajectory = None


_SAMPLERS = frozenset({*comfy.samplers.SAMPLER_NAMES, "unipc", "unipc_bh2"}) - {
    *("dpm_fast", "dpm_adaptive", "ar_video")
}
"""The samplers of the host whose next latent follows from the last few."""


def place_in(part: Tensor, whole: Tensor) -> Hashable:
    """Where a part of a latent lies, such as a context window: None if it is all of it.

    It is told by the noise in it. Of a part that is found nowhere, the place is like no other.
    """
    if part.shape == whole.shape:
        return None
    cut = [dim for dim in range(whole.ndim) if part.shape[dim] != whole.shape[dim]]
    if part.ndim != whole.ndim or len(cut) != 1:
        return object()
    seen, of = (each.movedim(cut[0], 0).flatten(1)[:, :_SEEN] for each in (part, whole))
    is_same = (seen[:, None] == of[None]).all(2)
    found = is_same.any(1).all().item()
    return tuple(is_same.int().argmax(1).tolist()) if found else object()


_SEEN = 64
"""So many numbers tell a frame from the others."""


def options_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model options among the arguments of ``CFGGuider.predict_noise``."""
    options: Mapping[str, Any] = args[2] if len(args) > 2 else kwargs.get("model_options", {})
    return options


def none_is_active(
    config: ToMeConfig, schedule: Sequence[float], percent_to_sigma: Callable[[float], float]
) -> str | None:
    """Why the percents of the settings leave out all steps of a run; None if they do not."""
    if any(is_active(config, noise, percent_to_sigma) for noise in schedule[:-1]):
        return None
    begins = progress_at(schedule[0], percent_to_sigma)
    return reasons.percents(config.start_percent, config.end_percent, begins)


def is_cached(model_options: Mapping[str, Any]) -> bool:
    """Whether EasyCache or LazyCache skips steps of a run."""
    return "easycache" in model_options["transformer_options"]
