"""The families of ComfyUI's transformers: what their blocks are, and where the picture is.

Keys and values merge where a block calls self-attention, so little else has to be known.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from ... import reasons
from ...merging.attention_trial import Attention
from ...merging.block import Block
from ...merging.evaluation import ModelState
from ...merging.model import unwrapped
from ...merging.stack import Stack
from ...settings.config import ToMeConfig
from ...strategies.plan import Grid
from .attention_block import AttentionBlock
from .base import class_name, host_attentions, takes

_REFERENCES = ("ref_latents", "ref_latent", "image_cond")
"""Conditions that are pictures in the sequence, before or after the one that is sampled."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """What is known about the models of one kind.

    Attributes:
        classes: the full names of their classes, without ``comfy.ldm.``. They are not imported: an
            older ComfyUI may lack one.
        blocks: the attributes of a model that hold its blocks.
        attention: the attribute of a block whose module calls self-attention; empty if the block
            calls it itself.
        place: where the tokens of the picture are in the sequence: they fill it, or others
            come after them or before them.
        patch: the size of a patch of a model: its side; its height and width; or its frames, height
            and width.
    """

    classes: tuple[str, ...]
    blocks: tuple[str, ...]
    attention: str = ""
    place: Literal["all", "start", "end"]
    patch: Callable[[Any], Any] = lambda model: model.patch_size

    def matches(self, model: nn.Module) -> bool:
        return class_name(model) in {f"comfy.ldm.{name}" for name in self.classes}

    def stacks(self, model: Any) -> Iterator[Stack]:
        """The blocks of a model, a stack for every attribute in ``blocks`` that the model has."""
        for name in self.blocks:
            module = getattr(model, name, None)
            if module is not None:
                yield Stack(name, module, tuple(map(unwrapped, module)))

    def block(self, model: ModelState, stack: Stack, index: int) -> AttentionBlock:
        return AttentionBlock(model, stack, index, self.attention, partial(self._start, model))

    def work(self, model: Any, blocks: Sequence[Block]) -> None:
        """Not known, and not needed: the presets that ask for it merge nothing here."""

    def attentions(self) -> set[Attention]:
        return host_attentions()

    def grid(self, model: Any, shape: Sequence[int]) -> Grid:
        return grid_of(shape, self.patch(model))

    def in_effect(self, config: ToMeConfig) -> ToMeConfig:
        return replace(config, attn_tokens="k,v", scope="module")

    def obstacle(self, model: nn.Module, conditions: Mapping[str, Any]) -> reasons.Reason | None:
        blocks = [block for stack in self.stacks(model) for block in stack.blocks]
        if not all(map(_is_of_the_host, blocks)):
            return reasons.BLOCKS_REPLACED
        if any(conditions.get(name) is not None for name in _REFERENCES):
            return reasons.REFERENCES
        return None

    def changed_part(self, model: Any) -> str | None:
        try:
            self.patch(model)
        except AttributeError as error:
            return f"{type(model).__name__}.{error.name}"
        for stack in self.stacks(model):
            for block in filter(_is_of_the_host, stack.blocks):
                module = getattr(block, self.attention, None) if self.attention else block
                if module is None:
                    return f"{type(block).__name__}.{self.attention}"
                if not takes(module, "transformer_options"):
                    return f"{type(module).__name__}.forward"
        return None

    def _start(self, model: ModelState, tokens: int, options: Mapping[str, Any]) -> int | None:
        """See :data:`tome_nodes.comfyui.models.attention_block.StartOf`."""
        evaluation = model.evaluation
        assert evaluation is not None
        picture = evaluation.latent.tokens
        # Z-Image pads its picture to a multiple of some number of tokens.
        padding = -picture % (getattr(model.model, "pad_tokens_multiple", None) or 1)
        others = tokens - picture - padding
        if others < 0 or (others and self.place == "all"):
            return None
        if self.place != "end":
            return 0
        # Some models say where the picture begins.
        told = options.get("img_slice")
        return others if told is None or told[0] == others else None


def _is_of_the_host(block: nn.Module) -> bool:
    """Whether the class of a block is ComfyUI's, or derived from one of ComfyUI's."""
    return any(kind.__module__.startswith("comfy.") for kind in type(block).__mro__)


def grid_of(shape: Sequence[int], patch: Any) -> Grid:
    """The grid of the tokens of a latent whose sides are padded to whole patches.

    Args:
        shape: batch, channels, frames if it is a video, height, width.
        patch: the side of a patch; its height and width; or its frames, height and width.
    """
    sides = (patch, patch) if isinstance(patch, int) else tuple(patch)
    deep, high, wide = (1, *sides)[-3:]
    frames = -(-shape[2] // deep) if len(shape) == 5 else 1
    return Grid(-(-shape[-2] // high), -(-shape[-1] // wide), frames)


TRANSFORMERS = (
    Transformer(
        classes=(
            *("flux.model.Flux", "chroma.model.Chroma", "chroma_radiance.model.ChromaRadiance"),
            "hunyuan_video.model.HunyuanVideo",
        ),
        blocks=("double_blocks", "single_blocks"),
        place="end",
    ),
    Transformer(
        classes=("modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",),
        blocks=("joint_blocks",),
        place="end",
    ),
    Transformer(
        classes=("qwen_image.model.QwenImageTransformer2DModel",),
        blocks=("transformer_blocks",),
        place="end",
    ),
    Transformer(
        classes=("lumina.model.NextDiT", "lumina.model.NextDiTPixelSpace"),
        blocks=("layers",),
        place="end",
    ),
    Transformer(
        classes=("krea2.model.SingleStreamDiT",),
        blocks=("blocks",),
        place="end",
        patch=lambda model: model.patch,
    ),
    Transformer(
        classes=("hidream.model.HiDreamImageTransformer2DModel",),
        blocks=("double_stream_blocks", "single_stream_blocks"),
        place="start",
    ),
    Transformer(
        classes=("minimax.model.MiniMaxH3Model",),
        blocks=("blocks",),
        place="end",
    ),
    Transformer(
        classes=(
            *("wan.model.WanModel", "wan.model.VaceWanModel", "wan.model.CameraWanModel"),
            *("wan.model_animate.AnimateWanModel", "wan.model_wandancer.WanDancerModel"),
        ),
        blocks=("blocks", "vace_blocks"),
        attention="self_attn",
        place="all",
    ),
    # Their reference comes after the video.
    Transformer(
        classes=("wan.model.WanModel_S2V", "wan.model.HumoWanModel"),
        blocks=("blocks",),
        attention="self_attn",
        place="start",
    ),
    Transformer(
        classes=("lightricks.model.LTXVModel", "lightricks.av_model.LTXAVModel"),
        blocks=("transformer_blocks",),
        attention="attn1",
        place="all",
        patch=lambda model: 1,
    ),
    Transformer(
        classes=("cosmos.predict2.MiniTrainDIT", "anima.model.Anima"),
        blocks=("blocks",),
        attention="self_attn",
        place="all",
        patch=lambda model: (model.patch_temporal, model.patch_spatial, model.patch_spatial),
    ),
)
"""All families of transformers."""

KEEPS_STATE: Mapping[str, str] = {
    "comfy.ldm.wan.ar_model.CausalWanModel": "it keeps keys of earlier frames for later ones"
}
"""Why the steps of some models cannot be forecast, by the full name of the class."""
