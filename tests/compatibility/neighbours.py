"""Other nodes that people put beside ours, each as it changes a model or its sampling.

Most are ComfyUI's own. Those of other packs cannot run here, so a stand-in does to the model object
what they do, and says where that is to be read.
"""

import asyncio
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import comfy.hooks
import comfy.sd

# Without it, the nodes of latents cannot be imported: the two import each other.
import comfy_extras.nodes_post_processing  # noqa: F401
import torch
from comfy.ldm.modules.attention import attention_basic
from comfy.model_patcher import ModelPatcher
from models.comfyui import KINDS, UNETS, build, conditioning
from torch import Tensor

from benchmarks.patches import Control, execute

SIDES = (8, 16)
"""Height and width of the latents in tokens."""

Patch = Callable[[ModelPatcher, str], Any]
"""Takes a model and the name of its kind; returns what the node makes of the model."""

Sampling = Callable[[ModelPatcher, str], dict[str, Any]]
"""Takes the same; returns further arguments of :func:`models.comfyui.sample`."""


@dataclass(frozen=True, eq=False)
class Neighbour:
    """Another node, by its id and the file that defines it, of ComfyUI or of another repository.

    It patches a model, changes its sampling or makes a guider. It may be made for some kinds
    of models only, hardly change the result but how it is computed (``is_exact``), or compile and
    so meet fewer settings (``is_slow``).
    """

    name: str
    source: str
    patch: Patch = lambda model, kind: model
    sampling: Sampling = lambda model, kind: {}
    guider: Patch | None = None
    only: Collection[str] = ()
    is_exact: bool = False
    is_slow: bool = False

    @property
    def is_of_the_host(self) -> bool:
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


def _made(name: str, module: str, *inputs: Any, **named: Any) -> Patch:
    """What a node of ComfyUI makes of a model; an input may be a function of the model's kind."""

    def patch(model: ModelPatcher, kind: str) -> Any:
        def given(value: Any) -> Any:
            return value(kind) if callable(value) else value

        by_name = {name: given(value) for name, value in named.items()}
        return execute(core_node(module, name), model, *map(given, inputs), **by_name)

    return patch


def _core(
    name: str, module: str, *inputs: Any, traits: Mapping[str, Any] | None = None, **named: Any
) -> Neighbour:
    """A node of ComfyUI that takes a model and returns one; with these traits of a neighbour."""
    patch = _made(name, module, *inputs, **named)
    return Neighbour(name, f"comfy_extras/{module}.py", patch, **traits or {})


_on_unets = partial(_core, traits={"only": UNETS})


def _guider(name: str, *inputs: Any) -> Neighbour:
    module = "nodes_perpneg" if name == "PerpNegGuider" else "nodes_custom_sampler"
    return Neighbour(name, f"comfy_extras/{module}.py", guider=_made(name, module, *inputs))


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


def _with_lora(
    model: ModelPatcher, kind: str, load: Callable[..., Any] = comfy.sd.load_lora_for_models
) -> ModelPatcher:
    return load(model, None, lora_of(model), 1.0, 0.0)[0]


_with_bypassed_lora = partial(_with_lora, load=comfy.sd.load_bypass_lora_for_models)


def _positive(kind: str, **extras: Any) -> Any:
    return conditioning(KINDS[kind], 5, **extras)


def _negative(kind: str) -> Any:
    return conditioning(KINDS[kind], 6)


def _other_prompt(kind: str, **extras: Any) -> Any:
    return conditioning(KINDS[kind], 7, **extras)


_CONTROLLED = dict.fromkeys(("sd15", "sdxl"), ("middle", 128, 4))
_CONTROLLED["flux"] = "input", 64, 2
"""Where a control adds: the place, its channels, and the side of a token in the latent."""


def _controlled(model: ModelPatcher, kind: str) -> dict[str, Any]:
    """A control that adds noise: to a map, in Flux to a sequence."""
    place, channels, patch = _CONTROLLED[kind]

    def noise(x: Tensor) -> Tensor:
        high, wide = (-(-side // patch) for side in x.shape[-2:])
        shape = (high * wide, channels) if kind == "flux" else (channels, high, wide)
        return torch.randn(1, *shape, generator=torch.Generator().manual_seed(7))

    control = Control(noise, place).set_cond_hint(None, 1.0, (0.2, 0.8))
    return {"prompts": [_positive(kind, control=control), _negative(kind)]}


def _hooked(model: ModelPatcher, kind: str) -> dict[str, Any]:
    """A LoRA that holds for the positive prompt only."""
    hooks = comfy.hooks.create_hook_lora(lora_of(model), 1.0, 1.0)
    (hooked,) = comfy.hooks.set_conds_props([_positive(kind)], 1.0, "default", hooks=hooks)
    return {"prompts": [hooked, _negative(kind)]}


def _in_areas(model: ModelPatcher, kind: str) -> dict[str, Any]:
    half = KINDS[kind].size(SIDES[0], SIDES[1] // 2)
    area = _other_prompt(kind, area=(*half, 0, 0), strength=1.0)
    return {"prompts": [_positive(kind) + area, _negative(kind)]}


def _in_a_range(model: ModelPatcher, kind: str) -> dict[str, Any]:
    """A second prompt for a part of the steps."""
    second = _other_prompt(kind, start_percent=0.2, end_percent=0.8)
    return {"prompts": [_positive(kind) + second, _negative(kind)]}


def _masked(model: ModelPatcher, kind: str) -> dict[str, Any]:
    """A picture, and a mask that says how much each part is to change."""
    high, wide = KINDS[kind].size(*SIDES)
    ramp = torch.linspace(0, 1, wide).expand(1, 1, high, wide)
    return {"picture": 0.3, "noise_mask": ramp}


def _several(model: ModelPatcher, kind: str) -> dict[str, Any]:
    """Several frames; other models than those of videos have them in the batch."""
    return {} if KINDS[kind].frames else {"batch": 5}


def _sampler(name: str) -> Sampling:
    return lambda model, kind: {"sampler": name}


# What nodes of other packs do to a model, written anew.

_OVERRIDE = "optimized_attention_override"


def _attend_in_low_precision(model: ModelPatcher, kind: str) -> ModelPatcher:
    """An attention override that ignores the function it is given, for one in low precision."""

    def override(func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rounded = (x.bfloat16().to(x.dtype) for x in (q, k, v))
        return attention_basic.__wrapped__(*rounded, *args, **kwargs)

    clone = model.clone()
    clone.model_options["transformer_options"][_OVERRIDE] = override
    return clone


def _attend_or_pass_on(model: ModelPatcher, kind: str) -> ModelPatcher:
    """An attention override that attends itself, or calls what it is given where it cannot.

    It takes no mask, so it passes merged keys on that are weighed by one.
    """
    clone = model.clone()
    options = clone.model_options["transformer_options"]
    before = options.get(_OVERRIDE)

    def override(func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("mask") is not None or q.shape[-2] != k.shape[-2]:
            passed = func if before is None else partial(before, func)
            return passed(q, k, v, *args, **kwargs)
        return attention_basic.__wrapped__(q, k, v, *args, **kwargs)

    options[_OVERRIDE] = override
    return clone


def _forecast(model: ModelPatcher, kind: str) -> ModelPatcher:
    """The output of the third step is a straight line through the last two, without the model."""
    outputs: list[Tensor] = []

    def evaluate(apply: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        if len(outputs) == 2:
            outputs.append(2 * outputs[1] - outputs[0])
        else:
            x, t = arguments["input"], arguments["timestep"]
            outputs.append(apply(x, t, **arguments["c"]))
        return outputs[-1]

    return _evaluating(model, evaluate)


def _tile(model: ModelPatcher, kind: str) -> ModelPatcher:
    def evaluate(apply: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        x, t, conditions = arguments["input"], arguments["timestep"], arguments["c"]
        tiles = x.split(x.shape[-1] // 2, dim=-1)
        return torch.cat([apply(tile, t, **conditions) for tile in tiles], -1)

    return _evaluating(model, evaluate)


def _evaluating(model: ModelPatcher, evaluate: Callable[..., Tensor]) -> ModelPatcher:
    clone = model.clone()
    clone.set_model_unet_function_wrapper(evaluate)
    return clone


def _add_attention(model: ModelPatcher, kind: str) -> ModelPatcher:
    """Cross-attention of every block replaced by itself and another to a picture."""
    random = torch.Generator().manual_seed(0)
    picture = torch.randn(1, 4, 1024, generator=random)

    def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        heads = options["n_heads"]
        own = picture[..., : q.shape[2]].expand(len(q), -1, -1).to(q)
        return attention_basic(q, k, v, heads) + 0.5 * attention_basic(q, own, own, heads)

    clone = model.clone()
    for place, number in (("input", 12), ("middle", 1), ("output", 12)):
        for block in range(number):
            clone.set_model_attn2_replace(attend, place, block)
    return clone


_SAMPLERS = "comfy_extras/nodes_custom_sampler.py"
_NODES = "nodes.py"
_MULTIPLIERS: Mapping[str, Any] = {"q": 1.2, "k": 1.1, "v": 0.9, "out": 1.1}
_CACHE: Mapping[str, Any] = {
    **{"reuse_threshold": 30.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
}
_WINDOWS: Mapping[str, Any] = {
    **{"context_length": 3, "context_overlap": 1, "context_stride": 1, "closed_loop": False},
    **{"context_schedule": "standard_static", "fuse_method": "pyramid", "freenoise": False},
    "dim": lambda kind: 2 if KINDS[kind].frames else 0,
}
_DOWNSCALE: Mapping[str, Any] = {
    **{"block_number": 2, "downscale_factor": 2.0, "downscale_after_skip": True},
    **{"start_percent": 0.0, "end_percent": 0.6},
    **{"downscale_method": "bicubic", "upscale_method": "bicubic"},
}
_TEMPORAL: Mapping[str, Any] = {
    **{"self_structural": 1.2, "self_temporal": 0.9},
    **{"cross_structural": 1.1, "cross_temporal": 0.9},
}

ALL: tuple[Neighbour, ...] = (
    # They change the tokens, the attention or the blocks.
    _on_unets(
        "HyperTile", "nodes_hypertile", tile_size=32, swap_size=2, max_depth=0, scale_depth=False
    ),
    _on_unets("PatchModelAddDownscale", "nodes_model_downscale", **_DOWNSCALE),
    _on_unets("TomePatchModel", "nodes_tomesd", ratio=0.6),
    _on_unets("PerturbedAttentionGuidance", "nodes_pag", scale=3.0),
    _on_unets("SelfAttentionGuidance", "nodes_sag", scale=0.5, blur_sigma=2.0),
    _core("NAGuidance", "nodes_nag", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5),
    _on_unets("FreeU", "nodes_freelunch", b1=1.1, b2=1.2, s1=0.9, s2=0.2),
    _on_unets("FreeU_V2", "nodes_freelunch", b1=1.3, b2=1.4, s1=0.9, s2=0.2),
    _on_unets("UNetSelfAttentionMultiply", "nodes_attention_multiply", **_MULTIPLIERS),
    _on_unets("UNetCrossAttentionMultiply", "nodes_attention_multiply", **_MULTIPLIERS),
    _on_unets("UNetTemporalAttentionMultiply", "nodes_attention_multiply", **_TEMPORAL),
    Neighbour("ControlNetApplyAdvanced", _NODES, sampling=_controlled, only=_CONTROLLED),
    # They skip or split evaluations.
    _core("EasyCache", "nodes_easycache", **_CACHE),
    _core("LazyCache", "nodes_easycache", **_CACHE),
    _core(
        "ContextWindowsManual",
        "nodes_context_windows",
        traits={"sampling": _several, "only": ("sd15", "wan21")},
        **_WINDOWS,
    ),
    Neighbour("ConditioningSetArea", _NODES, sampling=_in_areas),
    Neighbour("ConditioningSetTimestepRange", _NODES, sampling=_in_a_range),
    # They compute the same in another way.
    _core(
        "TorchCompileModel",
        "nodes_torch_compile",
        traits={"only": ("sd15", "flux"), "is_exact": True, "is_slow": True},
        backend="eager",
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
    _core("VideoLinearCFGGuidance", "nodes_video_model", 1.0, traits={"sampling": _several}),
    _core("VideoTriangleCFGGuidance", "nodes_video_model", 1.0, traits={"sampling": _several}),
    _core(
        *("LatentApplyOperationCFG", "nodes_latent"),
        lambda kind: execute(core_node("nodes_latent", "LatentOperationTonemapReinhard"), 1.2),
    ),
    _core("PerpNeg", "nodes_perpneg", _other_prompt, neg_scale=1.0),
    _guider("PerpNegGuider", _positive, _negative, _other_prompt, 4.0, 1.0),
    _guider("DualCFGGuider", _positive, _other_prompt, _negative, 4.0, 2.0, "regular"),
    _guider("DualModelGuider", _positive, 4.0, _other_model, _negative),
    _guider("BasicGuider", _positive),
    # They change noise levels, steps or masks.
    _on_unets("ModelSamplingDiscrete", "nodes_model_advanced", sampling="v_prediction", zsnr=True),
    _core("ModelSamplingSD3", "nodes_model_advanced", traits={"only": ("flux",)}, shift=5.0),
    _core("DifferentialDiffusion", "nodes_differential_diffusion", traits={"sampling": _masked}),
    Neighbour("KSampler, heun", _NODES, sampling=_sampler("heun")),
    Neighbour("SamplerDPMPP_2S_Ancestral", _SAMPLERS, sampling=_sampler("dpmpp_2s_ancestral")),
    Neighbour("SamplerEulerAncestralCFGPP", _SAMPLERS, sampling=_sampler("euler_ancestral_cfg_pp")),
    # Other packs, by stand-ins.
    Neighbour(
        "Patch Sage Attention KJ",
        "kijai/ComfyUI-KJNodes nodes/model_optimization_nodes.py",
        _attend_in_low_precision,
        is_exact=True,
    ),
    Neighbour("Sol-Attn", "Saganaki22/ComfyUI-sol-attn", _attend_or_pass_on, is_exact=True),
    Neighbour(
        *("SpectrumSDXL", "ruwwww/ComfyUI-Spectrum-sdxl src/spectrum_node.py", _forecast),
        only=UNETS,
    ),
    Neighbour("TiledDiffusion", "shiimizu/ComfyUI-TiledDiffusion tiled_diffusion.py", _tile),
    Neighbour(
        *("IPAdapter", "cubiq/ComfyUI_IPAdapter_plus IPAdapterPlus.py", _add_attention), only=UNETS
    ),
)

BY_NAME: Mapping[str, Neighbour] = {node.name: node for node in ALL}
