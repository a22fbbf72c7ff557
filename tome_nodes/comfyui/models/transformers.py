"""ComfyUI's transformers, one record for each kind: its blocks, and where its pictures are.

Tokens merge where a block calls attention, so a record needs nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from ...merging.grid import Grid
from ...merging.layout import Layout, Picture
from ...merging.plan import Plan
from ...ops import Operations
from ...patching.blocks import Forward, ModelSites, StackParts, StackSite
from ...patching.merge_attention import CallSite, WholeBlock
from ..attention import merge_attention
from .base import ComfyBlock, ComfyFamily, Inputs, class_name, patches_blocks, takes, uncompiled

Pictures = Callable[[Any, Inputs], Iterable[Picture]]
"""Returns the pictures in the sequence of a model, in order."""


class TransformerBlock(ComfyBlock, CallSite):
    """A block that gets the transformer options as a keyword argument, as does its attention."""

    def attention(self) -> nn.Module:
        return self.stack.sites.family.attention(self.module)

    def whole_block(self) -> WholeBlock | None:
        stack, _, _ = self.name.rpartition(".")
        return self.stack.sites.family.whole.get(stack)

    @property
    def at_end(self) -> bool:
        return self.stack.sites.family.at_end

    def needs_all_tokens(self, arguments: Mapping[str, Any]) -> str | None:
        options = arguments.get("transformer_options") or {}
        return "that are patched" if patches_blocks(options) else None

    def layout(self, tokens: int, kwargs: dict[str, Any]) -> Layout | None:
        sites = self.stack.sites
        family: Transformer = sites.family
        layout = Layout.of_pictures(tokens, sites.evaluation.pictures, family.at_end)
        # Some models say where their picture begins.
        told = (kwargs.get("transformer_options") or {}).get("img_slice")
        if layout is not None and told is not None and family.at_end:
            return layout if told[0] == layout.spans[0].start else None
        return layout

    def merging(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = kwargs.get("transformer_options") or {}
        return kwargs | {"transformer_options": merge_attention(options, self, kwargs)}


class TransformerStack(StackSite):
    """The blocks of one kind in a model."""

    block_class = TransformerBlock


class EvaluationBlock(TransformerBlock):
    """A block that gets no transformer options; see :class:`EvaluationStack`."""

    stack: "EvaluationStack"

    def layout(self, tokens: int, kwargs: dict[str, Any]) -> Layout | None:
        return super().layout(tokens, {})

    def _merge_calls(self, forward: Forward) -> Forward:
        def attention_forward(*args: Any, **kwargs: Any) -> Any:
            self.stack.running = self
            try:
                return forward(*args, **kwargs)
            finally:
                self.stack.running = None

        return attention_forward


class EvaluationStack(TransformerStack):
    """Blocks whose attention runs under the transformer options of the whole evaluation.

    Attributes:
        running: the block that is running, None between blocks.
    """

    block_class = EvaluationBlock
    running: EvaluationBlock | None = None

    @property
    def ops(self) -> Operations:
        return self.sites.evaluation.engine.strategy.ops

    def call_plans(
        self, k: Tensor, queries: int, kwargs: dict[str, Any]
    ) -> tuple[Plan | None, Plan | None]:
        """See :meth:`tome_nodes.patching.merge_attention.CallSite.call_plans`."""
        block = self.running
        return (None, None) if block is None else block.call_plans(k, queries, kwargs)

    def log_sizes(self, plan: Plan, like: Tensor) -> Tensor | None:
        """See :meth:`tome_nodes.patching.merge_attention.CallSite.log_sizes`."""
        return None if self.running is None else self.running.log_sizes(plan, like)

    @property
    def is_merged(self) -> bool:
        """Whole blocks do not merge here."""
        return False

    def outer_log_sizes(self, keys: int, like: Tensor) -> Tensor | None:
        """See :meth:`tome_nodes.patching.merge_attention.CallSite.outer_log_sizes`."""
        return None

    def note_masked(self) -> None:
        """Note that the attention is masked, or called with other tokens."""
        if self.running is not None:
            self.running.note_masked()

    def note_unweighted(self, reason: str | None) -> None:
        """Note why each merged key weighs as one token, None if it does not."""
        if self.running is not None:
            self.running.note_unweighted(reason)


@dataclass(frozen=True)
class Transformer(ComfyFamily):
    """Models of one kind.

    Attributes:
        classes: their full names, below ``comfy.ldm``.
        blocks: the attributes of a model that hold its blocks.
        pictures_of: returns the pictures in the sequence of a model.
        at_end: whether the pictures are at the end of the sequence, as after text, or at its start.
        part: the attribute of a block that calls its self-attention; empty if the block calls it
            itself and has no cross-attention.
        whole: how blocks are called that can run on merged tokens, by the attribute of ``blocks``.
    """

    classes: tuple[str, ...]
    blocks: tuple[str, ...]
    pictures_of: Pictures
    at_end: bool
    part: str = ""
    whole: Mapping[str, WholeBlock] = field(default_factory=dict)

    stack_class = TransformerStack
    merges_at_calls = True
    full_steps_may_merge_keys = False

    @property
    def model_classes(self) -> tuple[str, ...]:
        """Full names of the classes. None is imported, as an older host may lack it."""
        return tuple(f"comfy.ldm.{name}" for name in self.classes)

    def matches(self, model: nn.Module) -> bool:
        return class_name(model) in self.model_classes

    def stacks(self, model: nn.Module) -> Iterator[StackParts]:
        for name in self.blocks:
            holder, _, attribute = name.rpartition(".")
            # Some models lack one of the kinds of blocks.
            found = getattr(model.get_submodule(holder), attribute, None)
            if found is not None:
                blocks = found.values() if isinstance(found, nn.ModuleDict) else found
                yield name, found, map(uncompiled, blocks), 1

    def obstacle(self, model: nn.Module) -> str | None:
        blocks = [block for _, _, blocks, _ in self.stacks(model) for block in blocks]
        is_known = all(map(_is_of_the_host, blocks))
        return None if is_known else "another node replaces the transformer blocks"

    def changed_part(self, model: Any) -> str | None:
        for name, _, blocks, _ in self.stacks(model):
            whole = self.whole.get(name)
            for block in filter(_is_of_the_host, blocks):
                if whole is not None and not takes(block, whole.tokens, whole.positions):
                    return f"{type(block).__name__}.forward"
                try:
                    module = self.attention(block)
                except (AttributeError, StopIteration):
                    return f"{type(block).__name__}.{self.part}"
                if not self._gets_options(module):
                    return f"{type(module).__name__}.forward"
        return None

    def _gets_options(self, attention: nn.Module) -> bool:
        """Whether the module that calls attention gets the transformer options."""
        return takes(attention, "transformer_options")

    @property
    def merges_blocks(self) -> bool:
        return bool(self.whole)

    def latent_among(self, pictures: Sequence[Picture]) -> int | None:
        indices = [index for index, picture in enumerate(pictures) if picture.is_latent]
        return indices[0] if len(indices) == 1 and self.whole else None

    def attention(self, block: Any) -> nn.Module:
        """The module of a block that calls its self-attention."""
        return getattr(block, self.part) if self.part else block

    def pictures(self, model: Any, inputs: Inputs) -> tuple[Picture, ...]:
        return tuple(self.pictures_of(model, inputs))


class WholeEvaluation(Transformer):
    """Models that do not pass the transformer options to their blocks."""

    stack_class = EvaluationStack

    def _gets_options(self, attention: nn.Module) -> bool:
        return True

    def options(self, options: dict[str, Any], sites: ModelSites) -> dict[str, Any]:
        (stack,) = sites.stacks
        return merge_attention(options, cast(EvaluationStack, stack), {})


def _is_of_the_host(block: nn.Module) -> bool:
    """Whether a block is of a class of ComfyUI, or of one made from it."""
    return any(each.__module__.startswith("comfy.") for each in type(block).__mro__)


def grid_of(shape: Sequence[int], patch: Any) -> Grid:
    """The grid of the tokens of a latent, with sides padded to whole patches.

    Args:
        shape: batch, channels, frames if it is a video, height, width.
        patch: the side of a patch; or its height and width; or its frames, height and width.
    """
    sides = (patch, patch) if isinstance(patch, int) else tuple(patch)
    deep, high, wide = (1, *sides)[-3:]
    frames = -(-shape[2] // deep) if len(shape) == 5 else 1
    return Grid(-(-shape[-2] // high), -(-shape[-1] // wide), frames)


def one_picture(patch: str | int) -> Pictures:
    """For models with the latent only; ``patch`` is the side of a patch or an attribute's name."""

    def pictures(model: Any, inputs: Inputs) -> Iterator[Picture]:
        yield Picture(grid_of(inputs.shape, _patch(model, patch)), is_latent=True)

    return pictures


def with_references(
    patch: str | int, references_first: bool = False, condition: str = "ref_latents"
) -> Pictures:
    """For models whose reference pictures, a condition, come after the picture or before it."""

    def pictures(model: Any, inputs: Inputs) -> list[Picture]:
        latent = Picture(grid_of(inputs.shape, _patch(model, patch)), is_latent=True)
        references = [
            Picture(grid_of(each.shape, _patch(model, patch))) for each in inputs.tensors(condition)
        ]
        return [*references, latent] if references_first else [latent, *references]

    return pictures


def _patch(model: Any, patch: str | int) -> Any:
    return patch if isinstance(patch, int) else getattr(model, patch)


def _still(grid: Grid, is_latent: bool = False) -> list[Picture]:
    """One picture for each frame, if frames do not form a video, such as layers."""
    is_latent = is_latent and grid.frames == 1
    return [Picture(Grid(grid.height, grid.width), is_latent=is_latent)] * grid.frames


def _qwen(model: Any, inputs: Inputs) -> Iterator[Picture]:
    yield from _still(grid_of(inputs.shape, model.patch_size), is_latent=True)
    for each in inputs.tensors("ref_latents"):
        yield from _still(grid_of(each.shape, model.patch_size))


def _lumina(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """Z-Image pads every picture to a multiple of some number of tokens."""
    multiple = getattr(model, "pad_tokens_multiple", None) or 1
    references = [each.shape for each in inputs.tensors("ref_latents")]
    for index, shape in enumerate((*references, inputs.shape)):
        grid = grid_of(shape, model.patch_size)
        yield Picture(grid, -grid.tokens % multiple, is_latent=index == len(references))


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
    """A picture to edit is to the right of the one that is sampled, as part of it."""
    *other, width = inputs.shape
    width += sum(each.shape[-1] for each in inputs.tensors("image_cond"))
    yield Picture(grid_of((*other, width), model.patch_size))


def _hidream_o1(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """Patches of references come after it, and never merge."""
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
    yield Picture(grid_of(inputs.shape, model.patch_size), is_latent=True)
    for each in inputs.tensors("time_dim_concat"):
        yield from _still(grid_of(each.shape, model.patch_size))


def _ltx(model: Any, inputs: Inputs) -> Iterator[Picture]:
    """Keyframes are the last frames. Some of their tokens may be left out, so they never merge."""
    frames, height, width = inputs.shape[-3:]
    for each in inputs.tensors("keyframe_idxs"):
        frames -= -(-each.shape[2] // (height * width))
    yield Picture(Grid(height, width, frames))


def _cosmos(model: Any, inputs: Inputs) -> Iterator[Picture]:
    patch = model.patch_temporal, model.patch_spatial, model.patch_spatial
    yield Picture(grid_of(inputs.shape, patch))


def _cogvideo(model: Any, inputs: Inputs) -> Iterator[Picture]:
    patch = model.patch_size_t or 1, model.patch_size, model.patch_size
    yield Picture(grid_of(inputs.shape, patch))


class CosmosTransformer(Transformer):
    """Cosmos 1, whose blocks are lists of modules."""

    def attention(self, block: Any) -> nn.Module:
        return next(part.block for part in block.blocks if part.block_type in ("full_attn", "fa"))


_FLUX_BLOCKS = {
    "double_blocks": WholeBlock(
        "img", "pe", along=2, absent=("attn_mask", "modulation_dims_img"), returned=0
    ),
    "single_blocks": WholeBlock("x", "pe", along=2, absent=("attn_mask", "modulation_dims")),
}

FLUX = Transformer(
    ("flux.model.Flux",),
    ("double_blocks", "single_blocks"),
    with_references("patch_size"),
    at_end=True,
    whole=_FLUX_BLOCKS,
)
CHROMA = Transformer(
    ("chroma.model.Chroma", "chroma_radiance.model.ChromaRadiance"),
    ("double_blocks", "single_blocks"),
    one_picture("patch_size"),
    at_end=True,
    whole=_FLUX_BLOCKS,
)
SD3 = Transformer(
    ("modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",),
    ("joint_blocks",),
    one_picture("patch_size"),
    at_end=True,
)
QWEN_IMAGE = Transformer(
    ("qwen_image.model.QwenImageTransformer2DModel",),
    ("transformer_blocks",),
    _qwen,
    at_end=True,
    whole={
        "transformer_blocks": WholeBlock(
            "hidden_states",
            "image_rotary_emb",
            along=2,
            absent=("timestep_zero_index",),
            returned=1,
        )
    },
)
LUMINA = Transformer(
    ("lumina.model.NextDiT", "lumina.model.NextDiTPixelSpace"),
    ("layers",),
    _lumina,
    at_end=True,
    whole={
        "layers": WholeBlock("x", "freqs_cis", along=1, absent=("x_mask", "timestep_zero_index"))
    },
)
KREA = Transformer(("krea2.model.SingleStreamDiT",), ("blocks",), _krea, at_end=True)
HIDREAM = Transformer(
    ("hidream.model.HiDreamImageTransformer2DModel",),
    ("double_stream_blocks", "single_stream_blocks"),
    _hidream,
    at_end=False,
)
HIDREAM_O1 = WholeEvaluation(
    ("hidream_o1.model.HiDreamO1Transformer",),
    ("language_model.layers",),
    _hidream_o1,
    at_end=True,
)
AURA_FLOW = Transformer(
    ("aura.mmdit.MMDiT",),
    ("double_layers", "single_layers"),
    one_picture("patch_size"),
    at_end=True,
)
OMNIGEN = Transformer(
    ("omnigen.omnigen2.OmniGen2Transformer2DModel",),
    ("layers",),
    with_references("patch_size", references_first=True),
    at_end=True,
)
BOOGU = Transformer(
    ("boogu.model.BooguTransformer2DModel",),
    ("double_stream_layers", "single_stream_layers"),
    with_references("patch_size", references_first=True),
    at_end=True,
)
IDEOGRAM = Transformer(
    ("ideogram4.model.Ideogram4Transformer2DModel",), ("layers",), one_picture(1), at_end=True
)
LENS = Transformer(
    ("lens.model.LensTransformer2DModel",), ("transformer_blocks",), one_picture(1), at_end=False
)
MAGE_FLOW = Transformer(
    ("mage_flow.model.MageFlowTransformer2DModel",),
    ("transformer_blocks",),
    with_references(1),
    at_end=True,
)
JOY_IMAGE = Transformer(
    ("joyimage.model.JoyImageTransformer3DModel",),
    ("double_blocks",),
    with_references("patch_size"),
    at_end=False,
)
PIXEL_DIT = Transformer(
    ("pixeldit.model.PixDiT_T2I", "pixeldit.pid.PidNet"),
    ("patch_blocks",),
    one_picture("patch_size"),
    at_end=True,
)
WAN = Transformer(
    (
        "wan.model.WanModel",
        "wan.model.VaceWanModel",
        "wan.model.CameraWanModel",
        "wan.model_animate.AnimateWanModel",
        "wan.model_wandancer.WanDancerModel",
    ),
    ("blocks", "vace_blocks"),
    _wan,
    at_end=False,
    part="self_attn",
    whole={"blocks": WholeBlock("x", "freqs", along=1, by_frame=("e",))},
)
WAN_SOUND = Transformer(
    ("wan.model.WanModel_S2V", "wan.model.HumoWanModel"),
    ("blocks",),
    _wan_sound,
    at_end=False,
    part="self_attn",
)
SCAIL = Transformer(
    ("wan.model.SCAILWanModel", "wan.model.SCAIL2WanModel"),
    ("blocks",),
    _scail,
    at_end=False,
    part="self_attn",
)
HUNYUAN_VIDEO = Transformer(
    ("hunyuan_video.model.HunyuanVideo",),
    ("double_blocks", "single_blocks"),
    with_references("patch_size", references_first=True, condition="ref_latent"),
    at_end=True,
    whole=_FLUX_BLOCKS,
)
LTX = Transformer(
    ("lightricks.model.LTXVModel", "lightricks.av_model.LTXAVModel"),
    ("transformer_blocks",),
    _ltx,
    at_end=False,
    part="attn1",
)
COSMOS_1 = CosmosTransformer(("cosmos.model.GeneralDIT",), ("blocks",), _cosmos, at_end=False)
COSMOS_PREDICT = Transformer(
    ("cosmos.predict2.MiniTrainDIT", "anima.model.Anima"),
    ("blocks",),
    _cosmos,
    at_end=False,
    part="self_attn",
)
KANDINSKY = Transformer(
    ("kandinsky5.model.Kandinsky5",),
    ("visual_transformer_blocks",),
    one_picture("patch_size"),
    at_end=False,
    part="self_attention",
)
MOCHI = Transformer(
    ("genmo.joint_model.asymm_models_joint.AsymmDiTJoint",),
    ("blocks",),
    one_picture("patch_size"),
    at_end=False,
)
COG_VIDEO = Transformer(
    ("cogvideo.model.CogVideoXTransformer3DModel",), ("blocks",), _cogvideo, at_end=True
)
MINIMAX = Transformer(
    ("minimax.model.MiniMaxH3Model",), ("blocks",), one_picture("patch_size"), at_end=True
)

TRANSFORMERS = (
    *(FLUX, CHROMA, SD3, QWEN_IMAGE, LUMINA, KREA, HIDREAM, HIDREAM_O1, AURA_FLOW, OMNIGEN, BOOGU),
    *(IDEOGRAM, LENS, MAGE_FLOW, JOY_IMAGE, PIXEL_DIT, WAN, WAN_SOUND, SCAIL, HUNYUAN_VIDEO, LTX),
    *(COSMOS_1, COSMOS_PREDICT, KANDINSKY, MOCHI, COG_VIDEO, MINIMAX),
)
"""All records."""

_NO_OPTIONS = "its attention cannot be reached: ComfyUI does not hand it the transformer options"
_NO_PICTURE = "it makes no picture"

REFUSED: Mapping[str, str] = {
    f"comfy.ldm.{name}": reason
    for name, reason in {
        "ernie.model.ErnieImageModel": _NO_OPTIONS,
        "pixart.pixartms.PixArtMS": _NO_OPTIONS,
        "hydit.models.HunYuanDiT": _NO_OPTIONS,
        "seedvr.model.NaDiT": "its attention runs in small windows, where merging gains nothing",
        "wan.ar_model.CausalWanModel": "it keeps keys of earlier frames for later ones",
        "cascade.stage_b.StageB": "its attention has few tokens",
        "cascade.stage_c.StageC": "its attention has few tokens",
        "audio.dit.AudioDiffusionTransformer": _NO_PICTURE,
        "ace.model.ACEStepTransformer2DModel": _NO_PICTURE,
        "ace.ace_step15.AceStepConditionGenerationModel": _NO_PICTURE,
        "hunyuan3d.model.Hunyuan3Dv2": _NO_PICTURE,
        "hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain": _NO_PICTURE,
        "triposplat.model.LatentSeqMMFlowModel": _NO_PICTURE,
    }.items()
}
"""Why other classes of the host cannot merge, by full name."""
