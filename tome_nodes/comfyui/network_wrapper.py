"""Run a model as a whole on merged tokens: its picture or video, beside a sound that stays.

If other nodes wrap its network, this happens inside of them. Those that skip evaluations compare
what enters the network, and what leaves it, from step to step. They have to see the latent and the
answer for it: means over slots change with the slots, which are others in each step.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from comfy.model_sampling import CONST
from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

from ..patching.blocks import uncompiled
from ..patching.whole_model import WholeModel

_NETWORK = WrappersMP.DIFFUSION_MODEL
_KEY = "tome_nodes"


def run_whole(
    whole: WholeModel,
    model: Any,
    x: Tensor,
    t: Tensor,
    shape: Sequence[int],
    options: dict[str, Any],
    denoise: Callable[[Tensor, dict[str, Any]], Tensor],
) -> Tensor:
    """The denoised latent, of the shape of ``x``.

    Args:
        whole: runs the model on merged tokens of its latent.
        model: a BaseModel of the host.
        x: the noisy latent; or ``[batch, 1, values]``, those of the latent and then of the sound.
        t: the noise level of each sample, ``[batch]``.
        shape: that of the latent; its batch does not count.
        options: the transformer options of the evaluation.
        denoise: evaluates the model on a latent under transformer options.
    """
    shape = len(x), *shape[1:]
    if _can_run_inside(model, options):
        return denoise(x, _inside(whole, t, shape, options))
    if x.shape == torch.Size(shape):
        return whole.run(x, lambda latent: denoise(latent, options))
    values = math.prod(shape[1:])

    def denoise_both(video: Tensor) -> list[Tensor]:
        both = torch.cat([video.reshape(len(x), 1, -1), x[..., values:]], -1)
        out = denoise(both, options)
        return [out[..., :values].reshape(video.shape), out[..., values:]]

    video, sound = _run_beside(whole, x[..., :values].reshape(shape), denoise_both)
    return torch.cat([video.reshape(len(x), 1, -1), sound], -1)


def _run_beside(
    whole: WholeModel, video: Tensor, denoise: Callable[[Tensor], Sequence[Tensor]]
) -> list[Tensor]:
    """The denoised video, and what was denoised with it."""
    others: list[Tensor] = []

    def denoise_video(noisy: Tensor) -> Tensor:
        denoised, *others[:] = denoise(noisy)
        return denoised

    return [whole.run(video, denoise_video), *others]


def _can_run_inside(model: Any, options: dict[str, Any]) -> bool:
    """Whether another node wraps the network of a model, and we can be inside of it.

    Only if what enters it is the noisy latent, and what leaves it the difference to the denoised
    one over the noise level.
    """
    network: nn.Module = model.diffusion_model
    wrappers = options.get("wrappers", {}).get(_NETWORK, {})
    # The graph of a compiled network may outlive its wrappers.
    is_wrapped = any(wrappers.values()) and uncompiled(network) is network
    return is_wrapped and isinstance(model.model_sampling, CONST)


def _inside(
    whole: WholeModel, t: Tensor, shape: Sequence[int], options: dict[str, Any]
) -> dict[str, Any]:
    """The transformer options of an evaluation in which ``whole`` runs inside of other wrappers."""

    def run(network: Callable[..., Any], entering: Any, *args: Any, **kwargs: Any) -> Any:
        batch, channels, *sides = shape
        given, *sound = entering if isinstance(entering, list) else [entering]
        if not isinstance(given, Tensor) or [len(given), *given.shape[2:]] != [batch, *sides]:
            # A tile, which merges nothing.
            return network(entering, *args, **kwargs)
        latent, rest = given[:, :channels].float(), given[:, channels:]
        # Where no noise is left, the host multiplies the answer by 0.
        sigma = t.view(-1, *[1] * (latent.ndim - 1)).clamp_min(1e-6)

        def denoise(noisy: Tensor) -> list[Tensor]:
            both = [torch.cat([noisy.to(given.dtype), rest], 1), *sound]
            out = network(both if sound else both[0], *args, **kwargs)
            video, *others = out if sound else [out]
            return [noisy - sigma * video.float(), *others]

        video, *others = _run_beside(whole, latent, denoise)
        leaving = ((latent - video) / sigma).to(given.dtype)
        return [leaving, *others] if sound else leaving

    wrappers = options["wrappers"]
    outer = {name: each for name, each in wrappers[_NETWORK].items() if name != _KEY}
    return options | {"wrappers": {**wrappers, _NETWORK: {**outer, _KEY: [run]}}}
