"""The UNets of the diffusers library."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from diffusers import Transformer2DModel, UNet2DConditionModel
from diffusers.models import attention_processor
from diffusers.models.unets import unet_2d_blocks
from torch import Tensor, nn

from .. import reasons
from ..merging.deep_blocks import DeepBlocks, no_channels
from ..merging.model import unwrapped
from ..merging.overrides import Override
from ..merging.unet import UNetFamily
from ..merging.work import Layer
from ..settings.config import ToMeConfig
from .arguments import TIMESTEPS, is_anything, total, traits
from .patched_unet import UNetContext, UNetHost
from .scheduling import Scheduling
from .unets import Arguments

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

_DOWN = unet_2d_blocks.DownBlock2D, unet_2d_blocks.CrossAttnDownBlock2D
_UP = unet_2d_blocks.UpBlock2D, unet_2d_blocks.CrossAttnUpBlock2D
"""The blocks that can be left out."""

_STRENGTHS = "scale", "scaling", "_active_adapter", "_disable_adapters"
"""Attributes of an IP-Adapter's processor, and of a layer with LoRAs, that say how they act."""

_CONTROL = (
    "down_block_additional_residuals",
    "mid_block_additional_residual",
    "down_intrablock_additional_residuals",
)
"""Arguments whose values change from step to step, unless they are 0."""


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


def _processor_in_the_way(attention: Any) -> reasons.Reason | None:
    if _is_known(attention):
        return None
    return reasons.unknown_processor(_processor_class(attention).__name__)


class DiffusersUNets(UNetHost):
    """``UNet2DConditionModel``, whose blocks are ``BasicTransformerBlock``."""

    family = UNetFamily(
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
        unet = unwrapped(getattr(model, "unet", model))
        if not isinstance(unet, UNet2DConditionModel):
            return []
        scheduler = getattr(model, "scheduler", None)
        if scheduler is None:
            return [(unet, UNetContext(Scheduling()))]
        levels = getattr(scheduler, "config", {}).get("num_train_timesteps") or TIMESTEPS
        return [(unet, UNetContext(Scheduling(model), levels))]

    def obstacle(self, unet: nn.Module, config: ToMeConfig) -> reasons.Reason | None:
        if torch.is_grad_enabled() and unet.is_gradient_checkpointing:
            return reasons.RECOMPUTED
        fused = any(getattr(module, "fused_projections", False) for module in unet.modules())
        if fused and not config.merges_queries:
            return reasons.FUSED
        return None

    def deep_blocks(self, unet: Any) -> DeepBlocks | None:
        """All but the layer in front of the blocks and the last layers of the last one."""
        *up, outermost = unet.up_blocks
        blocks = [*unet.down_blocks, *up, outermost]
        is_known = all(type(block) in _DOWN + _UP for block in blocks)
        if not is_known or len(outermost.resnets) < 2 or outermost.upsamplers:
            return None
        left_out: list[Override] = [
            *((block, "forward", partial(_no_skips, _skips(block))) for block in unet.down_blocks),
            *((block, "forward", _no_map) for block in (unet.mid_block, *up) if block),
        ]
        layers = [*outermost.resnets][:-1]
        if hasattr(outermost, "attentions"):
            pairs = zip(layers, outermost.attentions, strict=False)
            layers = [layer for pair in pairs for layer in pair]
        *others, last = layers
        return DeepBlocks([*left_out, *((each, "forward", no_channels) for each in others)], last)

    def whole_only(self, unet: Any) -> reasons.Reason | None:
        if any(map(_is_streamed, unet.modules())) or _is_led(unet.up_blocks[-1]):
            return reasons.STREAMED
        for processor in unet.attn_processors.values():
            # Some pipelines and other code read attention after the call.
            kind = type(processor)
            if not kind.__module__.startswith("diffusers.models."):
                return reasons.reads_attention(kind.__name__)
        return None

    def conditions(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        return traits(given, lambda name: is_anything if name in _CONTROL else total)

    def strengths(self, unet: nn.Module) -> Callable[[], Hashable]:
        # Once for a run, as it visits every module.
        adapters = [part for part in map(vars, unet.modules()) if _is_adapter(part)]
        return lambda: hash(str([[part.get(name) for name in _STRENGTHS] for part in adapters]))

    def shallow_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
        """The same, but nothing is added to blocks that are left out."""
        added = {name: kwargs[name] for name in _CONTROL if kwargs.get(name) is not None}
        if not added:
            return args, kwargs
        down, middle, _ = (added.get(name) for name in _CONTROL)
        nothing = {name: _nothing(each) for name, each in added.items()}
        if down is not None and middle is not None:
            # A ControlNet adds the first of them to what the outermost block gets.
            nothing[_CONTROL[0]] = [down[0], *nothing[_CONTROL[0]][1:]]
        return args, {**kwargs, **nothing}


def _is_adapter(part: Mapping[str, Any]) -> bool:
    """Whether a module with these attributes has strengths that are numbers.

    Where LoRAs are swapped in place, they are tensors, and to read those would wait for the GPU.
    """
    scaling = part.get("scaling")
    if isinstance(scaling, Mapping):
        return not any(isinstance(each, Tensor) for each in scaling.values())
    return isinstance(part.get("scale"), list)


def _skips(block: Any) -> int:
    """How many feature maps a block on the way down hands on to the way up."""
    return len(block.resnets) + len(block.downsamplers or ())


def _no_skips(
    count: int, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What a block on the way down gives that is left out: maps of no channels."""
    nothing = no_channels(hidden_states)
    return nothing, (nothing,) * count


def _no_map(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What another block gives that is left out."""
    nothing: Tensor = no_channels(hidden_states)
    return nothing


def _nothing(added: Any) -> Any:
    """What adds nothing, to a feature map of any size."""
    return added.new_zeros(()) if isinstance(added, Tensor) else [_nothing(each) for each in added]


def _is_led(block: nn.Module) -> bool:
    """Whether a block's weights come in when an earlier one of its group is called."""
    hooks = getattr(getattr(block, "_diffusers_hook", None), "hooks", {})
    leaders = (
        getattr(getattr(hook, "group", None), "onload_leader", None) for hook in hooks.values()
    )
    return any(leader is not None and leader is not block for leader in leaders)


def _is_streamed(module: nn.Module) -> bool:
    """Whether weights come in through a stream, each block asking for those of the next."""
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return "lazy_prefetch_group_offloading" in hooks or any(
        getattr(getattr(hook, "group", None), "stream", None) is not None for hook in hooks.values()
    )
