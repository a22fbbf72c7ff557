"""Other nodes that people put beside ours, each as it changes a model or the sampling of it.

Most are ComfyUI's own. Those of other packs cannot run here, so a stand-in does to the model object
what they do (:mod:`.stand_ins`), and says where that is to be read.
"""

import asyncio
import importlib
import inspect
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import comfy.controlnet
import comfy.gligen
import comfy.hooks
import comfy.sd

# Without it, the nodes of latents cannot be imported: the two import each other.
import comfy_extras.nodes_post_processing  # noqa: F401
import torch
from comfy.model_patcher import ModelPatcher
from models.comfyui import KINDS, TINY, build, conditioning
from torch import Tensor

from . import stand_ins

SIDES = (8, 12)
"""Height and width of the latents in tokens: two windows of no square shape."""

Patch = Callable[[ModelPatcher, str], Any]
"""Takes a model and the name of its kind; returns what the node makes of the model."""

Sampling = Callable[[ModelPatcher, str], dict[str, Any]]
"""Takes the same; returns further arguments of :func:`models.comfyui.sample`."""


def _unchanged(model: ModelPatcher, kind: str) -> ModelPatcher:
    return model


def _as_ever(model: ModelPatcher, kind: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, eq=False)
class Neighbour:
    """Another node.

    Attributes:
        name: its id, or that of what it stands for.
        source: the file that defines it, below ComfyUI's folder or in another repository.
        patch: what it makes of a model.
        sampling: what it changes in the sampling of any model.
        guider: makes a guider of a model; None if the node makes none.
        only: the kinds of models it is made for; empty for any.
        is_exact: whether it hardly changes the result, but how it is computed.
        is_slow: whether it compiles, so that it meets fewer settings.
    """

    name: str
    source: str
    patch: Patch = _unchanged
    sampling: Sampling = _as_ever
    guider: Patch | None = None
    only: Collection[str] = ()
    is_exact: bool = False
    is_slow: bool = False

    @property
    def is_of_the_host(self) -> bool:
        """Whether it is ComfyUI's own and not a stand-in."""
        return self.source.startswith(("comfy_extras/", "nodes.py")) and " " not in self.source


def core_node(module: str, name: str) -> Any:
    """A node class of ComfyUI, by the module below ``comfy_extras`` that holds it."""
    holder = importlib.import_module(f"comfy_extras.{module}")
    if not hasattr(holder, "comfy_entrypoint"):
        return holder.NODE_CLASS_MAPPINGS[name]

    async def nodes() -> list[Any]:
        extension = holder.comfy_entrypoint()
        # In some modules it is a coroutine.
        extension = await extension if inspect.isawaitable(extension) else extension
        return await extension.get_node_list()

    return {node.GET_SCHEMA().node_id: node for node in asyncio.run(nodes())}[name]


def execute(node: Any, *args: Any, **inputs: Any) -> Any:
    """The first output of a node, of the old interface or the new."""
    if hasattr(node, "FUNCTION"):
        return getattr(node(), node.FUNCTION)(*args, **inputs)[0]
    return node.execute(*args, **inputs).result[0]


def _made(name: str, module: str, *inputs: Any, **named: Any) -> Patch:
    """What a node of ComfyUI makes of a model; an input may be a function of the model's kind."""

    def patch(model: ModelPatcher, kind: str) -> Any:
        def given(value: Any) -> Any:
            return value(kind) if callable(value) else value

        by_name = {name: given(value) for name, value in named.items()}
        return execute(core_node(module, name), model, *map(given, inputs), **by_name)

    return patch


def _core(
    name: str,
    module: str,
    *inputs: Any,
    sampling: Sampling = _as_ever,
    only: Collection[str] = (),
    **named: Any,
) -> Neighbour:
    """A node of ComfyUI that takes a model and returns one."""
    patch = _made(name, module, *inputs, **named)
    return Neighbour(name, f"comfy_extras/{module}.py", patch, sampling, only=only)


def _guider(name: str, module: str, *inputs: Any) -> Neighbour:
    """A node of ComfyUI that makes a guider of a model."""
    return Neighbour(name, f"comfy_extras/{module}.py", guider=_made(name, module, *inputs))


def _windows(name: str, length: int, overlap: int, **others: Any) -> Neighbour:
    """A node of ComfyUI by which a model samples a video in windows of some frames."""
    return _core(
        name,
        "nodes_context_windows",
        context_length=length,
        context_overlap=overlap,
        context_schedule="standard_static",
        context_stride=1,
        closed_loop=False,
        fuse_method="pyramid",
        freenoise=False,
        **others,
    )


@lru_cache(maxsize=1)
def _other_model(kind: str) -> ModelPatcher:
    """Another model of the same kind, with weights of its own."""
    return _with_lora(build(KINDS[kind]), kind)


def lora_of(model: ModelPatcher, rank: int = 4) -> dict[str, Tensor]:
    """A LoRA of random weights for some of the attentions of a model."""
    random = torch.Generator().manual_seed(0)
    weights = [
        (name.removesuffix(".weight"), tuple(weight.shape))
        for name, weight in model.model.state_dict().items()
        if weight.ndim == 2 and name.endswith(".weight") and ("attn" in name or "attention" in name)
    ]
    lora = {}
    for name, (outputs, inputs) in weights[:: max(1, len(weights) // 6)]:
        down = torch.randn(rank, inputs, generator=random) * inputs**-0.5
        lora[f"{name}.lora_down.weight"] = down
        lora[f"{name}.lora_up.weight"] = torch.randn(outputs, rank, generator=random) * 0.5
    return lora


def _with_lora(model: ModelPatcher, kind: str) -> ModelPatcher:
    return comfy.sd.load_lora_for_models(model, None, lora_of(model), 1.0, 0.0)[0]


def _with_bypassed_lora(model: ModelPatcher, kind: str) -> ModelPatcher:
    return comfy.sd.load_bypass_lora_for_models(model, None, lora_of(model), 1.0, 0.0)[0]


def _positive(kind: str, **extras: Any) -> Any:
    """A prompt with further conditions."""
    return conditioning(KINDS[kind], 5, **extras)


def _negative(kind: str) -> Any:
    return conditioning(KINDS[kind], 6)


def _other_prompt(kind: str, **extras: Any) -> Any:
    return conditioning(KINDS[kind], 7, **extras)


class Adds(comfy.controlnet.ControlBase):
    """A control of the host that adds to the output of a block, as a ControlNet does.

    Args:
        place: ``input``, ``middle`` or ``output``, as the class of the model calls it.
        shape: that of what is added.
    """

    def __init__(self, place: str, *shape: int):
        super().__init__()
        random = torch.Generator().manual_seed(7)
        empty: dict[str, list[Tensor]] = {"input": [], "middle": [], "output": []}
        self.added = empty | {place: [torch.randn(1, *shape, generator=random)]}

    def get_control(self, *args: Any) -> dict[str, list[Tensor]]:
        return {place: list(added) for place, added in self.added.items()}

    def copy(self) -> "Adds":
        return self

    def get_models(self) -> list[Any]:
        return []

    def cleanup(self) -> None:
        pass


_CONTROLLED: Mapping[str, tuple[Any, ...]] = {
    "sd15": ("middle", 128, SIDES[0] // 4, SIDES[1] // 4),
    "sdxl": ("middle", 128, SIDES[0] // 4, SIDES[1] // 4),
    "flux": ("input", SIDES[0] * SIDES[1], 64),
    "sd3": ("output", SIDES[0] * SIDES[1], 128),
    "qwen_image": ("input", SIDES[0] * SIDES[1], 64),
}


def _controlled(model: ModelPatcher, kind: str) -> dict[str, Any]:
    control = Adds(*_CONTROLLED[kind])
    return {"prompts": [_positive(kind, control=control), _negative(kind)]}


def _boxed(model: ModelPatcher, kind: str) -> dict[str, Any]:
    """A prompt with GLIGEN's box, whose weights are random."""
    channels = {"sd15": [32, 64, 128, 64, 64, 32, 32], "sdxl": [64, 128, 128, 128, 128, 64, 64]}
    wide = 16
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fusers = [
            comfy.gligen.GatedSelfAttentionDense(each, wide, 2, each // 2)
            for each in channels[kind]
        ]
        gligen = comfy.gligen.Gligen(fusers, comfy.gligen.PositionNet(wide, wide), wide)
        for name, parameter in gligen.named_parameters():
            parameter.data.normal_(0.5 if "alpha" in name else 0.0, 0.1)
        box = (torch.randn(1, wide), 4, 6, 2, 2)
    cpu = torch.device("cpu")
    placed = ("position", ModelPatcher(gligen, cpu, cpu), [box])
    return {"prompts": [_positive(kind, gligen=placed), _negative(kind)]}


def _hooked(model: ModelPatcher, kind: str) -> dict[str, Any]:
    """A LoRA that holds for the positive prompt only."""
    hooks = comfy.hooks.create_hook_lora(lora_of(model), 1.0, 1.0)
    (hooked,) = comfy.hooks.set_conds_props([_positive(kind)], 1.0, "default", hooks=hooks)
    return {"prompts": [hooked, _negative(kind)]}


def _in_areas(model: ModelPatcher, kind: str) -> dict[str, Any]:
    half = KINDS[kind].size(SIDES[0], SIDES[1] // 2)
    area = _other_prompt(kind, area=(*half, 0, 0), strength=1.0)
    return {"prompts": [_positive(kind) + area, _negative(kind)]}


def _masked(model: ModelPatcher, kind: str) -> dict[str, Any]:
    """A picture, and a mask of how much of it is to change."""
    high, wide = KINDS[kind].size(*SIDES)
    ramp = torch.linspace(0, 1, wide).expand(1, 1, high, wide)
    return {"picture": 0.3, "noise_mask": ramp}


def _several(model: ModelPatcher, kind: str) -> dict[str, Any]:
    return {"batch": 4}


def _several_frames(model: ModelPatcher, kind: str) -> dict[str, Any]:
    """A UNet has a video in its batch, as with AnimateDiff."""
    return {} if kind in _VIDEOS else {"batch": 5}


def _sampler(name: str) -> Sampling:
    return lambda model, kind: {"sampler": name}


def _with_hypernetwork(model: ModelPatcher, kind: str) -> ModelPatcher:
    """What the loader does, with a file that is in no folder of the host."""
    from comfy_extras.nodes_hypernetwork import load_hypernetwork_patch

    random = torch.Generator().manual_seed(0)

    def layer(wide: int) -> dict[str, Tensor]:
        weight = torch.randn(wide, wide, generator=random) * 0.3 * wide**-0.5
        return {"linear.weight": weight, "linear.bias": torch.zeros(wide)}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hypernetwork.pt"
        torch.save({wide: (layer(wide), layer(wide)) for wide in (32, 64, 128)}, path)
        patch = load_hypernetwork_patch(str(path), 1.0)
    clone = model.clone()
    clone.set_model_attn1_patch(patch)
    clone.set_model_attn2_patch(patch)
    return clone


def _tone_mapping(kind: str) -> Any:
    return execute(core_node("nodes_latent", "LatentOperationTonemapReinhard"), multiplier=1.2)


def _predicting_v(model: ModelPatcher, kind: str) -> Any:
    node = core_node("nodes_model_advanced", "ModelSamplingDiscrete")
    return execute(node, model, sampling="v_prediction", zsnr=True)


_SAMPLERS = "comfy_extras/nodes_custom_sampler.py"
_NODES = "nodes.py"
_UNETS = ("sd15", "sdxl")
_VIDEOS = tuple(kind for kind, tiny in KINDS.items() if (tiny.frames or 1) > 1)
_GUIDANCE: Mapping[str, Any] = {"scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}
_MULTIPLIERS: Mapping[str, Any] = {"q": 1.2, "k": 1.1, "v": 0.9, "out": 1.1}
_CACHE: Mapping[str, Any] = {
    "reuse_threshold": 30.0,
    "start_percent": 0.0,
    "end_percent": 1.0,
    "verbose": False,
}

ALL: tuple[Neighbour, ...] = (
    # They change the tokens, the attention or the blocks.
    _core(
        "HyperTile", "nodes_hypertile", tile_size=32, swap_size=2, max_depth=0, scale_depth=False
    ),
    _core(
        "PatchModelAddDownscale",
        "nodes_model_downscale",
        block_number=2,
        downscale_factor=2.0,
        start_percent=0.0,
        end_percent=0.6,
        downscale_after_skip=True,
        downscale_method="bicubic",
        upscale_method="bicubic",
    ),
    _core("TomePatchModel", "nodes_tomesd", ratio=0.6),
    _core("PerturbedAttentionGuidance", "nodes_pag", scale=3.0),
    _core("SelfAttentionGuidance", "nodes_sag", scale=0.5, blur_sigma=2.0),
    _core("NAGuidance", "nodes_nag", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5),
    _core("SkipLayerGuidanceDiT", "nodes_slg", double_layers="0", single_layers="1", **_GUIDANCE),
    _core(
        "SkipLayerGuidanceDiTSimple",
        "nodes_slg",
        double_layers="0",
        single_layers="1",
        start_percent=0.0,
        end_percent=1.0,
    ),
    _core("SkipLayerGuidanceSD3", "nodes_sd3", layers="0", **_GUIDANCE),
    _core("FreeU", "nodes_freelunch", b1=1.1, b2=1.2, s1=0.9, s2=0.2),
    _core("FreeU_V2", "nodes_freelunch", b1=1.3, b2=1.4, s1=0.9, s2=0.2),
    _core("UNetSelfAttentionMultiply", "nodes_attention_multiply", **_MULTIPLIERS),
    _core("UNetCrossAttentionMultiply", "nodes_attention_multiply", **_MULTIPLIERS),
    _core(
        "UNetTemporalAttentionMultiply",
        "nodes_attention_multiply",
        self_structural=1.2,
        self_temporal=0.9,
        cross_structural=1.1,
        cross_temporal=0.9,
    ),
    Neighbour("HypernetworkLoader", "comfy_extras/nodes_hypernetwork.py", patch=_with_hypernetwork),
    Neighbour("GLIGENTextBoxApply", _NODES, sampling=_boxed, only=_UNETS),
    Neighbour("ControlNetApplyAdvanced", _NODES, sampling=_controlled, only=_CONTROLLED),
    _core(
        "ScaleROPE",
        "nodes_rope",
        scale_x=1.5,
        shift_x=1.0,
        scale_y=1.5,
        shift_y=0.0,
        scale_t=1.0,
        shift_t=0.0,
    ),
    # They skip or split evaluations.
    _core("EasyCache", "nodes_easycache", **_CACHE),
    _core("LazyCache", "nodes_easycache", **_CACHE),
    _windows(
        "ContextWindowsManual",
        3,
        1,
        dim=lambda kind: 2 if kind in _VIDEOS else 0,
        sampling=_several_frames,
        only=("sd15", *_VIDEOS),
    ),
    _windows("WanContextWindowsManual", 9, 4, only=["wan21"]),
    _windows("LTXVContextWindows", 17, 8, only=["ltxv"]),
    Neighbour("ConditioningSetArea", _NODES, sampling=_in_areas),
    # They compute the same in another way.
    replace(
        _core("TorchCompileModel", "nodes_torch_compile", backend="eager"),
        only=("sd15", "flux"),
        is_exact=True,
        is_slow=True,
    ),
    # They change the weights.
    Neighbour("LoraLoader", _NODES, patch=_with_lora),
    Neighbour("LoraLoaderBypass", "comfy_extras/nodes_lora_debug.py", patch=_with_bypassed_lora),
    Neighbour("CreateHookLora", "comfy_extras/nodes_hooks.py", sampling=_hooked),
    _core("ModelMergeSimple", "nodes_model_merging", _other_model, ratio=0.5),
    _core("ModelMergeBlocks", "nodes_model_merging", _other_model, input=0.5, middle=0.2, out=0.8),
    # They guide.
    _core("RescaleCFG", "nodes_model_advanced", multiplier=0.7),
    _core("RenormCFG", "nodes_lumina2", cfg_trunc=100.0, renorm_cfg=1.0),
    _core("CFGZeroStar", "nodes_cfg"),
    _core("CFGNorm", "nodes_cfg", strength=0.9),
    _core("TCFG", "nodes_tcfg"),
    _core("APG", "nodes_apg", eta=0.5, norm_threshold=5.0, momentum=-0.5),
    _core("Mahiro", "nodes_mahiro"),
    _core("FreSca", "nodes_fresca", scale_low=1.0, scale_high=1.25, freq_cutoff=2),
    _core("Epsilon Scaling", "nodes_eps", scaling_factor=1.01),
    _core("TemporalScoreRescaling", "nodes_eps", tsr_k=0.95, tsr_sigma=1.0),
    _core("CFGOverride", "nodes_custom_sampler", cfg=1.0, start_percent=0.4, end_percent=1.0),
    _core("VideoLinearCFGGuidance", "nodes_video_model", 1.0, sampling=_several),
    _core("VideoTriangleCFGGuidance", "nodes_video_model", 1.0, sampling=_several),
    _core("LatentApplyOperationCFG", "nodes_latent", _tone_mapping),
    _core("PerpNeg", "nodes_perpneg", _other_prompt, neg_scale=1.0),
    _guider("PerpNegGuider", "nodes_perpneg", _positive, _negative, _other_prompt, 4.0, 1.0),
    _guider(
        "DualCFGGuider",
        "nodes_custom_sampler",
        *(_positive, _other_prompt, _negative, 4.0, 2.0, "regular"),
    ),
    _guider("DualModelGuider", "nodes_custom_sampler", _positive, 4.0, _other_model, _negative),
    _guider("BasicGuider", "nodes_custom_sampler", _positive),
    # They change noise levels, steps or masks.
    Neighbour(
        "ModelSamplingDiscrete",
        "comfy_extras/nodes_model_advanced.py",
        patch=_predicting_v,
        only=_UNETS,
    ),
    _core("ModelSamplingSD3", "nodes_model_advanced", shift=5.0, only=TINY),
    _core("ModelSamplingAuraFlow", "nodes_model_advanced", shift=1.0, only=TINY),
    _core("DifferentialDiffusion", "nodes_differential_diffusion", sampling=_masked),
    Neighbour("KSampler, heun", _NODES, sampling=_sampler("heun")),
    Neighbour("SamplerDPMPP_2S_Ancestral", _SAMPLERS, sampling=_sampler("dpmpp_2s_ancestral")),
    Neighbour("SamplerEulerAncestralCFGPP", _SAMPLERS, sampling=_sampler("euler_ancestral_cfg_pp")),
    # Other packs, by stand-ins.
    Neighbour(
        "Patch Sage Attention KJ",
        "kijai/ComfyUI-KJNodes nodes/model_optimization_nodes.py",
        stand_ins.attend_in_low_precision,
        is_exact=True,
    ),
    Neighbour(
        "Sol-Attn", "Saganaki22/ComfyUI-sol-attn", stand_ins.attend_or_pass_on, is_exact=True
    ),
    Neighbour(
        "TorchCompileModelAdvanced",
        "kijai/ComfyUI-KJNodes nodes/model_optimization_nodes.py",
        stand_ins.compile_blocks,
        only=("flux",),
        is_exact=True,
        is_slow=True,
    ),
    Neighbour(
        "ApplyFBCacheOnModel",
        "chengzeyi/Comfy-WaveSpeed first_block_cache.py",
        stand_ins.cache_by_first_block,
        only=KINDS.keys() - {"wan21"},
    ),
    Neighbour(
        "TeaCache",
        "welltop-cn/ComfyUI-TeaCache nodes.py",
        stand_ins.cache_by_input,
        only=("flux", "wan21"),
    ),
    Neighbour(
        "SpectrumSDXL", "ruwwww/ComfyUI-Spectrum-sdxl src/spectrum_node.py", stand_ins.forecast
    ),
    Neighbour(
        "TiledDiffusion", "shiimizu/ComfyUI-TiledDiffusion tiled_diffusion.py", stand_ins.tile
    ),
    Neighbour(
        "IPAdapter",
        "cubiq/ComfyUI_IPAdapter_plus IPAdapterPlus.py",
        stand_ins.add_attention,
        only=_UNETS,
    ),
    Neighbour(
        "double_block patches",
        "comfy_extras/nodes_model_patch.py (QwenImageDiffsynthControlnet, ZImageFunControlnet)",
        stand_ins.patch_after_blocks,
        only=("qwen_image", "lumina2"),
    ),
)
"""All neighbours, in the order of the table."""

BY_NAME: Mapping[str, Neighbour] = {each.name: each for each in ALL}
