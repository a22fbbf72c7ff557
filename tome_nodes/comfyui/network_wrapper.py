"""Run a model on merged tokens inside of what other nodes put around its network.

Nodes that skip evaluations compare what enters the network, and what leaves it, from step to step.
They have to see the latent and the answer for it: means over slots change with the slots, which are
others in each step.
"""

from collections.abc import Callable
from typing import Any

import torch
from comfy.model_sampling import CONST
from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

from ..patching.blocks import uncompiled
from ..patching.whole_model import WholeModel
from .sound import run_beside

_NETWORK = WrappersMP.DIFFUSION_MODEL
_KEY = "tome_nodes"


def can_run_inside(model: Any, options: dict[str, Any]) -> bool:
    """Whether another node wraps the network of a model, and we can be inside of it.

    Only if what enters it is the noisy latent, and what leaves it the difference to the denoised
    one over the noise level.

    Args:
        model: a BaseModel of the host.
        options: the transformer options of an evaluation.
    """
    network: nn.Module = model.diffusion_model
    wrappers = options.get("wrappers", {}).get(_NETWORK, {})
    # The graph of a compiled network may outlive its wrappers.
    is_wrapped = any(wrappers.values()) and uncompiled(network) is network
    return is_wrapped and isinstance(model.model_sampling, CONST)


def inside(whole: WholeModel, t: Tensor, shape: tuple[int, ...], options: dict[str, Any]) -> Any:
    """The transformer options of an evaluation in which ``whole`` runs inside of other wrappers.

    Args:
        whole: runs the model on merged tokens of its latent.
        t: the noise level of each sample, ``[batch]``.
        shape: that of the latent.
        options: the transformer options before.
    """

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

        video, *others = run_beside(whole, latent, denoise)
        leaving = ((latent - video) / sigma).to(given.dtype)
        return [leaving, *others] if sound else leaving

    wrappers = options["wrappers"]
    outer = {name: each for name, each in wrappers[_NETWORK].items() if name != _KEY}
    return options | {"wrappers": {**wrappers, _NETWORK: {**outer, _KEY: [run]}}}
