"""The UNets of the diffusers library."""

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import Transformer2DModel, UNet2DConditionModel
from diffusers.models import attention_processor
from torch import nn

from .. import reasons
from ..patching.model import uncompiled
from ..patching.unet import UNetRecord
from ..patching.work import Layer
from ..settings.config import ToMeConfig
from .model_call import TIMESTEPS
from .patched_unet import UNetContext, UNetHost
from .pipeline_runs import PipelineRuns

# IP-Adapter scales its masks to the number of queries, as if they were a whole picture.
_MASKS = ("attention_mask", "ip_adapter_masks")

_FOR_ITSELF = frozenset(
    {
        attention_processor.AttnProcessor,
        attention_processor.AttnProcessor2_0,
        attention_processor.FusedAttnProcessor2_0,
        attention_processor.SlicedAttnProcessor,
        attention_processor.XFormersAttnProcessor,
    }
)
"""The processors with which a self-attention may be called with other keys and a mask over them.

Others do something else with keys from outside, or need the whole picture."""

_FOR_TEXT = _FOR_ITSELF | {
    attention_processor.CustomDiffusionAttnProcessor,
    attention_processor.CustomDiffusionAttnProcessor2_0,
    attention_processor.CustomDiffusionXFormersAttnProcessor,
    attention_processor.IPAdapterAttnProcessor,
    attention_processor.IPAdapterAttnProcessor2_0,
    attention_processor.IPAdapterXFormersAttnProcessor,
}
"""The processors with which an attention to text takes any number of queries."""


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
    """Whether the feed-forward network runs in chunks of fixed size, attention is masked, or what
    it does with merged tokens is not known."""
    of_attention = kwargs.get("cross_attention_kwargs") or {}
    return (
        block._chunk_size is not None
        or any(given.get(name) is not None for given in (kwargs, of_attention) for name in _MASKS)
        or not _is_known(block.attn1)
        or not (block.attn2 is None or _is_known(block.attn2))
    )


def _is_known(attention: Any) -> bool:
    """Whether the processor of an attention is known to take merged tokens."""
    attends_to_text = getattr(attention, "is_cross_attention", False)
    return _processor_class(attention) in (_FOR_TEXT if attends_to_text else _FOR_ITSELF)


def _processor_class(attention: Any) -> type:
    # Other code may have put an attention of its own in place, without a processor.
    return type(getattr(attention, "processor", attention))


def _processor_in_the_way(attention: Any) -> str | None:
    if _is_known(attention):
        return None
    return reasons.unknown_processor(_processor_class(attention).__name__)


class DiffusersUNets(UNetHost):
    """``UNet2DConditionModel``, whose blocks are ``BasicTransformerBlock``."""

    record = UNetRecord(
        layers=_layers,
        is_stack=lambda module: isinstance(module, Transformer2DModel),
        attends_to_text=lambda block: block.only_cross_attention,
        needs_all_tokens=_needs_all_tokens,
        masks=_MASKS,
        source="encoder_hidden_states",
        weigh_keys=lambda kwargs, weights, _: kwargs | {"attention_mask": weights.sizes[:, None]},
        in_the_way=_processor_in_the_way,
    )

    def find(self, model: object) -> list[tuple[nn.Module, UNetContext]]:
        """The UNet of a pipeline, or the model itself if it is one."""
        unet = uncompiled(getattr(model, "unet", model))
        if not isinstance(unet, UNet2DConditionModel):
            return []
        scheduler = getattr(model, "scheduler", None)
        if scheduler is None:
            return [(unet, UNetContext())]
        levels = getattr(scheduler, "config", {}).get("num_train_timesteps") or TIMESTEPS
        return [(unet, UNetContext(levels, PipelineRuns(model, is_unet=True)))]

    def obstacle(self, unet: nn.Module, config: ToMeConfig) -> str | None:
        if torch.is_grad_enabled() and unet.is_gradient_checkpointing:
            return reasons.RECOMPUTED
        fused = any(getattr(module, "fused_projections", False) for module in unet.modules())
        if fused and config.attn_tokens != "q,k,v":
            return reasons.FUSED
        return None
