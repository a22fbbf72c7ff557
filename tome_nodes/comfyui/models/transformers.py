"""The records of ComfyUI's transformers: the blocks of each kind, and where its pictures are.

Tokens merge where a block calls attention, so little else has to be known.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from ...merging.layout import Grid, Picture
from ...patching.blocks import Evaluation
from ...patching.merge_attention import (
    AttentionBlock,
    AttentionHost,
    TransformerRecord,
)
from ..attention import merge_attention, stored_attention
from .base import REASONS, Inputs, class_name, takes

Pictures = Callable[[Any, Inputs], Iterable[Picture]]
"""Returns the pictures in the sequence of a model, in order, given the model and its inputs."""


def _merging(block: AttentionBlock, kwargs: dict[str, Any]) -> dict[str, Any]:
    options = kwargs.get("transformer_options") or {}
    return kwargs | {"transformer_options": merge_attention(options, lambda: block, kwargs)}


def _picture_start(kwargs: Mapping[str, Any]) -> int | None:
    """Where the picture begins, if the model says so in the transformer options."""
    span = (kwargs.get("transformer_options") or {}).get("img_slice")
    return None if span is None else span[0]


HOST = AttentionHost(REASONS, _merging, _picture_start, stored_attention=stored_attention)
"""The module that calls attention gets the transformer options as a keyword argument."""


@dataclass(frozen=True)
class Transformer(TransformerRecord):
    """Models of one kind.

    Attributes:
        classes: the full names of their classes, without ``comfy.ldm.``.
        pictures_of: returns the pictures in the sequence of a model.
    """

    classes: tuple[str, ...]
    pictures_of: Pictures
    host: AttentionHost = field(default=HOST, kw_only=True)

    @property
    def model_classes(self) -> tuple[str, ...]:
        """The full names of the classes. They are not imported: an older ComfyUI may lack one."""
        return tuple(f"comfy.ldm.{name}" for name in self.classes)

    def matches(self, model: nn.Module) -> bool:
        return class_name(model) in self.model_classes

    def pictures(self, model: Any, inputs: Inputs) -> tuple[Picture, ...]:
        return tuple(self.pictures_of(model, inputs))

    def obstacle(self, model: nn.Module) -> str | None:
        blocks = [block for stack in self.stacks(model) for block in stack.blocks]
        is_known = all(map(_is_of_the_host, blocks))
        return None if is_known else "another node replaces the transformer blocks"

    def changed_part(self, model: Any) -> str | None:
        for stack in self.stacks(model):
            if any(not hasattr(block, self.method) for block in stack.blocks):
                return f"{type(stack.blocks[0]).__name__}.{self.method}"
            for block in filter(_is_of_the_host, stack.blocks):
                try:
                    module = self.attention_of(block)
                except AttributeError:
                    return f"{type(block).__name__}.{self.attention}"
                if not hasattr(module, self.method):
                    return f"{type(module).__name__}.{self.method}"
                if self.passes_options and not takes(module, "transformer_options"):
                    return f"{type(module).__name__}.forward"
        return None

    def options(self, options: dict[str, Any], evaluation: Evaluation) -> dict[str, Any]:
        if self.passes_options:
            return options
        return merge_attention(options, lambda: cast("AttentionBlock", evaluation.running), {})


def _is_of_the_host(block: nn.Module) -> bool:
    """Whether the class of a block is ComfyUI's, or derived from one of ComfyUI's."""
    return any(each.__module__.startswith("comfy.") for each in type(block).__mro__)


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


def one_picture(patch: str | int) -> Pictures:
    """For models whose only picture is the latent.

    ``patch`` is the side of a patch, or the attribute of the model that has its size.
    """

    def pictures(model: Any, inputs: Inputs) -> Iterator[Picture]:
        size = patch if isinstance(patch, int) else getattr(model, patch)
        yield Picture(grid_of(inputs.shape, size))

    return pictures


def _still(grid: Grid) -> list[Picture]:
    """One picture for each frame. For frames that are not a video, such as layers."""
    return [Picture(Grid(grid.height, grid.width))] * grid.frames


def _flux(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """References come after the latent."""
    yield Picture(grid_of(inputs.shape, model.patch_size))
    for each in inputs.tensors("ref_latents"):
        yield Picture(grid_of(each.shape, model.patch_size))


def _hunyuan_video(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """A reference comes before the latent."""
    for each in inputs.tensors("ref_latent"):
        yield Picture(grid_of(each.shape, model.patch_size))
    yield Picture(grid_of(inputs.shape, model.patch_size))


def _qwen(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """The frames of a latent are layers. References come after them."""
    yield from _still(grid_of(inputs.shape, model.patch_size))
    for each in inputs.tensors("ref_latents"):
        yield from _still(grid_of(each.shape, model.patch_size))


def _lumina(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """Z-Image pads every picture to a multiple of some number of tokens."""
    multiple = getattr(model, "pad_tokens_multiple", None) or 1
    references = [each.shape for each in inputs.tensors("ref_latents")]
    for shape in (*references, inputs.shape):
        grid = grid_of(shape, model.patch_size)
        yield Picture(grid, -grid.tokens % multiple)


def _krea(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """Frames become samples of the batch, and references may be switched off."""
    shapes = [inputs.shape]
    # ComfyUI 0.27.0 has no references in this model.
    method = getattr(model, "default_ref_method", None)
    if inputs.conditions.get("ref_latents_method", method) is not None:
        shapes += [each.shape for each in inputs.tensors("ref_latents")]
    for shape in shapes:
        yield Picture(grid_of((*shape[:2], *shape[-2:]), model.patch))


def _hidream(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """The sampled picture and a picture to edit are one picture, the latter on the right."""
    *other, width = inputs.shape
    width += sum(each.shape[-1] for each in inputs.tensors("image_cond"))
    yield Picture(grid_of((*other, width), model.patch_size))


def _hidream_o1(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """Patches of references come after the latent, and never merge."""
    behind = sum(each.shape[1] for each in inputs.tensors("ref_patches"))
    yield Picture(grid_of(inputs.shape, model.patch_size), behind)


def _wan(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """A reference comes before the latent, other references after it."""
    references = inputs.tensors("reference_latent")
    if references and getattr(model, "ref_conv", None) is not None:
        yield Picture(grid_of(references[0].shape, model.patch_size[1:]))
    yield from _wan_frames(model, inputs)
    for each in inputs.tensors("context_latents"):
        yield Picture(grid_of(each.shape, model.patch_size))


def _wan_sound(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """Models that follow a sound have their reference after the latent."""
    yield from _wan_frames(model, inputs)
    for each in inputs.tensors("reference_latent"):
        yield from _still(grid_of(each.shape, model.patch_size))


def _scail(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """References come before the latent, and the video of poses comes after it."""
    for each in inputs.tensors("reference_latent"):
        yield from _still(grid_of(each.shape, model.patch_size))
    yield from _wan_frames(model, inputs)
    for each in inputs.tensors("pose_latents"):
        yield Picture(grid_of(each.shape, model.patch_size))


def _wan_frames(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """The latent, and the pictures of subjects that extend it as further frames."""
    yield Picture(grid_of(inputs.shape, model.patch_size))
    for each in inputs.tensors("time_dim_concat"):
        yield from _still(grid_of(each.shape, model.patch_size))


def _ltx(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """The last frames are keyframes. They never merge, as some of their tokens may be left out."""
    frames, height, width = inputs.shape[-3:]
    keyframes = sum(
        -(-each.shape[2] // (height * width)) for each in inputs.tensors("keyframe_idxs")
    )
    yield Picture(Grid(height, width, frames - keyframes))


def _cosmos(model: Any, inputs: Inputs) -> Iterator[Picture]:
    patch = model.patch_temporal, model.patch_spatial, model.patch_spatial
    yield Picture(grid_of(inputs.shape, patch))


FLUX = Transformer(
    ("flux.model.Flux",),
    _flux,
    blocks=("double_blocks", "single_blocks"),
    at_end=True,
)
CHROMA = Transformer(
    ("chroma.model.Chroma", "chroma_radiance.model.ChromaRadiance"),
    one_picture("patch_size"),
    blocks=("double_blocks", "single_blocks"),
    at_end=True,
)
SD3 = Transformer(
    ("modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",),
    one_picture("patch_size"),
    blocks=("joint_blocks",),
    at_end=True,
)
QWEN_IMAGE = Transformer(
    ("qwen_image.model.QwenImageTransformer2DModel",),
    _qwen,
    blocks=("transformer_blocks",),
    at_end=True,
)
QWEN_IMAGE_21 = Transformer(
    ("qwen_image21.model.QwenImage21Transformer2DModel",),
    one_picture(1),
    blocks=("transformer_blocks",),
    at_end=True,
    calls_in_parts=True,
    passes_options=False,
)
SENSENOVA = Transformer(
    ("sensenova.model.SenseNovaU15",),
    one_picture(32),
    blocks=("language_model.model.layers",),
    at_end=True,
    method="forward_generation",
    calls_in_parts=True,
    passes_options=False,
)
LUMINA = Transformer(
    ("lumina.model.NextDiT", "lumina.model.NextDiTPixelSpace"),
    _lumina,
    blocks=("layers",),
    at_end=True,
)
KREA = Transformer(
    ("krea2.model.SingleStreamDiT",),
    _krea,
    blocks=("blocks",),
    at_end=True,
)
HIDREAM = Transformer(
    ("hidream.model.HiDreamImageTransformer2DModel",),
    _hidream,
    blocks=("double_stream_blocks", "single_stream_blocks"),
)
HIDREAM_O1 = Transformer(
    ("hidream_o1.model.HiDreamO1Transformer",),
    _hidream_o1,
    blocks=("language_model.layers",),
    at_end=True,
    passes_options=False,
)
WAN = Transformer(
    (
        "wan.model.WanModel",
        "wan.model.VaceWanModel",
        "wan.model.CameraWanModel",
        "wan.model_animate.AnimateWanModel",
        "wan.model_wandancer.WanDancerModel",
    ),
    _wan,
    blocks=("blocks", "vace_blocks"),
    attention="self_attn",
)
WAN_SOUND = Transformer(
    ("wan.model.WanModel_S2V", "wan.model.HumoWanModel"),
    _wan_sound,
    blocks=("blocks",),
    attention="self_attn",
)
WAN_ANIMATE_2 = Transformer(
    ("wan.model_animate2.WanAnimate2Model",),
    one_picture("patch_size"),
    blocks=("blocks",),
    attention="self_attn",
    method="forward_gen",
    calls_in_parts=True,
    passes_options=False,
)
SCAIL = Transformer(
    ("wan.model.SCAILWanModel", "wan.model.SCAIL2WanModel"),
    _scail,
    blocks=("blocks",),
    attention="self_attn",
)
HUNYUAN_VIDEO = Transformer(
    ("hunyuan_video.model.HunyuanVideo",),
    _hunyuan_video,
    blocks=("double_blocks", "single_blocks"),
    at_end=True,
)
LTX = Transformer(
    ("lightricks.model.LTXVModel", "lightricks.av_model.LTXAVModel"),
    _ltx,
    blocks=("transformer_blocks",),
    attention="attn1",
)
COSMOS_PREDICT = Transformer(
    ("cosmos.predict2.MiniTrainDIT", "anima.model.Anima"),
    _cosmos,
    blocks=("blocks",),
    attention="self_attn",
)
MINIMAX = Transformer(
    ("minimax.model.MiniMaxH3Model",),
    one_picture("patch_size"),
    blocks=("blocks",),
    at_end=True,
)

TRANSFORMERS = (
    *(FLUX, CHROMA, SD3, QWEN_IMAGE, QWEN_IMAGE_21, SENSENOVA, LUMINA, KREA, HIDREAM, HIDREAM_O1),
    *(WAN, WAN_ANIMATE_2, WAN_SOUND, SCAIL, HUNYUAN_VIDEO, LTX, COSMOS_PREDICT, MINIMAX),
)
"""All records of transformers."""

KEEPS_STATE: Mapping[str, str] = {
    "comfy.ldm.wan.ar_model.CausalWanModel": "it keeps keys of earlier frames for later ones"
}
"""Why the steps of some models cannot be forecast, by the full name of the class."""
