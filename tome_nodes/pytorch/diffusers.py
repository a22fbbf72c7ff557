"""The UNets of the diffusers library."""

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import Transformer2DModel, UNet2DConditionModel
from torch import Tensor, nn

from ..patching.blocks import StackParts
from ..settings.config import ToMeConfig
from .hooks import RECOMPUTED, HookedBlock, HookedFamily, HookedStack


class DiffusersBlock(HookedBlock):
    """A ``BasicTransformerBlock``."""

    context_name = "encoder_hidden_states"
    # IP-Adapter scales its masks to the number of queries, as if they were a whole picture.
    mask_names = ("attention_mask", "ip_adapter_masks")

    def attends_to_text(self) -> bool:
        return self.module.only_cross_attention

    def weigh_keys(self, kwargs: dict[str, Any], log_sizes: Tensor) -> dict[str, Any]:
        return kwargs | {"attention_mask": log_sizes[:, None]}

    def needs_all_tokens(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the feed-forward runs in chunks of fixed size, or an attention is masked."""
        chunked = self.module._chunk_size is not None
        of_attention = kwargs.get("cross_attention_kwargs") or {}
        return chunked or self.is_masked(kwargs) or self.is_masked(of_attention)


class DiffusersStack(HookedStack):
    """A ``Transformer2DModel``."""

    block_class = DiffusersBlock


class DiffusersUNet(HookedFamily):
    """``UNet2DConditionModel``."""

    stack_class = DiffusersStack

    def find(self, model: object) -> tuple[nn.Module, int | None] | None:
        """The UNet of a pipeline, or the model itself if it is one."""
        unet = getattr(model, "unet", model)
        unet = getattr(unet, "_orig_mod", unet)
        if not isinstance(unet, UNet2DConditionModel):
            return None
        scheduler_config = getattr(getattr(model, "scheduler", None), "config", {})
        return unet, scheduler_config.get("num_train_timesteps")

    def stacks(self, model: Any) -> Iterator[StackParts]:
        deepest = len(model.down_blocks) - 1
        for name, module in model.named_modules():
            if not isinstance(module, Transformer2DModel):
                continue
            way, _, rest = name.partition(".")
            depth = deepest
            if way == "down_blocks":
                depth = int(rest.partition(".")[0])
            elif way == "up_blocks":
                depth = deepest - int(rest.partition(".")[0])
            yield name, module, module.transformer_blocks, 2**depth

    def obstacle(self, unet: nn.Module, config: ToMeConfig) -> str | None:
        if torch.is_grad_enabled() and unet.is_gradient_checkpointing:
            return RECOMPUTED
        fused = any(getattr(module, "fused_projections", False) for module in unet.modules())
        if fused and (config.attn_tokens != "q,k,v" or config.kv_ratio >= 0):
            return "fused projections need attn_tokens=q,k,v and kv_ratio=-1"
        return None
