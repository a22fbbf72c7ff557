"""The UNets of the diffusers library."""

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import Transformer2DModel, UNet2DConditionModel
from torch import nn

from .. import reasons
from ..patching.attention_trial import Attention
from ..patching.blocks import uncompiled
from ..patching.key_weights import KeyWeights
from ..patching.merge_modules import UNetRecord, is_masked
from ..patching.work import Layer
from ..settings.config import ToMeConfig
from .patched_unet import TIMESTEPS, UNetHost

# IP-Adapter scales its masks to the number of queries, as if they were a whole picture.
_MASKS = ("attention_mask", "ip_adapter_masks")


def _layers(model: Any) -> Iterator[Layer]:
    deepest = len(model.down_blocks) - 1
    for name, module in model.named_modules():
        side, _, rest = name.partition(".")
        index, _, part = rest.partition(".")
        depth = 0
        if side == "down_blocks" and index:
            depth = int(index) + part.startswith("downsamplers")
        elif side == "up_blocks" and index:
            depth = deepest - int(index) - part.startswith("upsamplers")
        elif side == "mid_block":
            depth = deepest
        yield name, module, 2**depth


def _needs_all_tokens(block: Any, index: int, *args: Any, **kwargs: Any) -> bool:
    """Whether the feed-forward network runs in chunks of fixed size, or attention is masked."""
    of_attention = kwargs.get("cross_attention_kwargs") or {}
    is_chunked = block._chunk_size is not None
    return is_chunked or is_masked(kwargs, _MASKS) or is_masked(of_attention, _MASKS)


def _weigh_keys(
    kwargs: dict[str, Any], weights: KeyWeights, stored: Attention | None = None
) -> dict[str, Any]:
    return kwargs | {"attention_mask": weights.sizes[:, None]}


class DiffusersUNets(UNetHost):
    """``UNet2DConditionModel``, whose blocks are ``BasicTransformerBlock``."""

    record = UNetRecord(
        layers=_layers,
        is_stack=lambda module: isinstance(module, Transformer2DModel),
        attends_to_text=lambda block: block.only_cross_attention,
        needs_all_tokens=_needs_all_tokens,
        masks=_MASKS,
        source="encoder_hidden_states",
        weigh_keys=_weigh_keys,
    )

    def find(self, model: object) -> list[tuple[nn.Module, int]]:
        """The UNet of a pipeline, or the model itself if it is one."""
        unet = uncompiled(getattr(model, "unet", model))
        if not isinstance(unet, UNet2DConditionModel):
            return []
        scheduler_config = getattr(getattr(model, "scheduler", None), "config", {})
        return [(unet, scheduler_config.get("num_train_timesteps") or TIMESTEPS)]

    def obstacle(self, unet: nn.Module, config: ToMeConfig) -> str | None:
        if torch.is_grad_enabled() and unet.is_gradient_checkpointing:
            return reasons.RECOMPUTED
        fused = any(getattr(module, "fused_projections", False) for module in unet.modules())
        if fused and config.attn_tokens != "q,k,v":
            return reasons.FUSED
        return None
