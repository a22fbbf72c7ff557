"""Tiny instances of ComfyUI's own model classes with random weights, and their inputs.

Import this after ComfyUI is on the path and told how to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.supported_models
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.model_patcher import ModelPatcher
from comfy.nested_tensor import NestedTensor

from .checkpoints import unet_settings

TEXT = 20

HEADS = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32}
"""What many transformers call their size."""

PAIRS = {
    **{"in_channels": 16, "out_channels": 16, "patch_size": 2, "qkv_bias": True},
    **{"vec_in_dim": 32, "context_in_dim": 32, "hidden_size": 64, "mlp_ratio": 2.0},
    **{"num_heads": 2, "depth": 2, "depth_single_blocks": 2},
    **{"axes_dim": [8, 12, 12], "theta": 10000},
}
"""Blocks with two streams, and behind them blocks with one."""

FLUX = {**PAIRS, "txt_ids_dims": []}
LUMINA = {
    **{"in_channels": 16, "dim": 96, "n_heads": 4, "cap_feat_dim": 32, "axes_dims": [8, 8, 8]},
    **{"n_layers": 3, "n_refiner_layers": 1, "multiple_of": 16, "qk_norm": True},
}
WAN = {"dim": 96, "ffn_dim": 64, "text_dim": 32, "num_heads": 4, "num_layers": 2}
COSMOS = {
    **{"max_img_h": 64, "max_img_w": 64, "max_frames": 32, "patch_spatial": 2, "patch_temporal": 1},
    **{"in_channels": 16, "out_channels": 16, "model_channels": 96, "num_blocks": 2},
    **{"num_heads": 4, "crossattn_emb_channels": 32, "pos_emb_cls": "rope3d"},
    **{"use_adaln_lora": True, "adaln_lora_dim": 16},
}
LTX = {**HEADS, "cross_attention_dim": 64, "caption_channels": 32}
HUNYUAN = {
    **PAIRS,
    **{"patch_size": [1, 2, 2], "theta": 256, "guidance_embed": True, "vision_in_dim": None},
    **dict.fromkeys(("byt5", "meanflow", "meanflow_sum", "use_cond_type_embedding"), False),
}


@dataclass(frozen=True)
class Tiny:
    """A tiny model of a class of ``comfy.supported_models``.

    Attributes:
        blocks: number of blocks that merge.
        before: number of tokens before the picture.
        channels: those of the latent.
        text: channels of the prompt.
        frames: those of the latent; None if it has no such dimension.
        patch: side of a patch.
        prompt: makes further conditions.
        sound: channels and sides of the latent of its sound.
        settings: those of the class, as its loader would read them from a file.
    """

    name: str
    blocks: int = 2
    before: int = 0
    channels: int = 16
    text: int = 32
    frames: int | None = None
    patch: int = 2
    prompt: Callable[[torch.Generator], dict[str, Any]] = lambda random: {}
    sound: tuple[int, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def of(self, shared: Mapping[str, Any] | None = None, /, **own: Any) -> Tiny:
        """The model of these settings, and of the settings that it shares with others."""
        return replace(self, settings={**(shared or {}), **own})

    def size(self, high: int, wide: int) -> tuple[int, ...]:
        return (high * self.patch, wide * self.patch)


def _every_token(random: torch.Generator) -> dict[str, Any]:
    """The attention mask of a prompt without padding."""
    return {"attention_mask": torch.ones(1, TEXT, dtype=torch.int64)}


def _states_of_llama(random: torch.Generator) -> dict[str, Any]:
    """What HiDream takes of the layers of a language model."""
    return {"conditioning_llama3": torch.randn(1, 4, TEXT, 32, generator=random)}


TINY: dict[str, Tiny] = {
    "flux": Tiny("Flux", blocks=4, before=TEXT).of(FLUX, guidance_embed=True),
    "flux2": Tiny("Flux2", blocks=4, before=512, patch=1).of(
        FLUX,
        **{"axes_dim": [8, 8, 8, 8], "txt_ids_dims": [3], "vec_in_dim": None, "patch_size": 1},
        **{"guidance_embed": True, "global_modulation": True, "mlp_silu_act": True},
        **{"qkv_bias": False, "ops_bias": False},
        **{"default_ref_method": "index", "ref_index_scale": 10.0},
    ),
    "chroma": Tiny("Chroma", blocks=4, before=TEXT).of(
        FLUX, in_channels=64, out_channels=64, in_dim=64, out_dim=64, hidden_dim=64, n_layers=1
    ),
    "sd3": Tiny("SD3", before=TEXT).of(
        in_channels=16,
        depth=2,
        adm_in_channels=32,
        context_embedder_config={
            "target": "torch.nn.Linear",
            "params": {"in_features": 32, "out_features": 128},
        },
        pos_embed_max_size=64,
        num_patches=4096,
        qk_norm="rms",
        x_block_self_attn_layers=[0],
    ),
    "qwen_image": Tiny("QwenImage", before=TEXT, frames=1).of(
        HEADS, joint_attention_dim=32, axes_dims_rope=(8, 12, 12)
    ),
    "lumina2": Tiny("Lumina2", blocks=3, before=TEXT).of(LUMINA),
    "z_image": Tiny("ZImage", blocks=3, before=32).of(
        LUMINA,
        **{"dim": 288, "n_heads": 12, "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3},
        **{"z_image_modulation": True, "pad_tokens_multiple": 32},
    ),
    "krea2": Tiny("Krea2", before=TEXT, text=64, frames=1).of(
        features=64, txtdim=32, heads=2, kvheads=1, layers=2, txtlayers=2, txtheads=2, txtkvheads=2
    ),
    "hidream": Tiny("HiDream", blocks=4, prompt=_states_of_llama).of(
        HEADS,
        **{"patch_size": 2, "in_channels": 16, "num_single_layers": 2},
        **{"caption_channels": [32, 32], "text_emb_dim": 32, "llama_layers": [0, 1, 2, 3]},
        axes_dims_rope=(8, 12, 12),
    ),
    "wan21": Tiny("WAN21_T2V", frames=5).of(WAN),
    "wan21_vace": Tiny("WAN21_Vace", blocks=3, frames=3).of(WAN, vace_layers=1, vace_in_dim=96),
    "wan21_camera": Tiny("WAN21_Camera", frames=3).of(WAN, in_dim=32),
    "wan21_fun": Tiny("WAN21_T2V", frames=3).of(WAN, in_dim_ref_conv=16),
    "wan21_humo": Tiny("WAN21_HuMo", frames=3).of(WAN, in_dim=36),
    "wan22_s2v": Tiny("WAN22_S2V", frames=3).of(WAN, audio_inject_layers=[0], audio_dim=32),
    "wan22_animate": Tiny("WAN22_Animate", frames=3).of(WAN, in_dim=36),
    "wan22_dancer": Tiny("WAN22_WanDancer", frames=3).of(WAN, in_dim=36),
    "hunyuan_image": Tiny("HunyuanImage21", blocks=4, before=TEXT, channels=64, patch=1).of(
        HUNYUAN,
        **{"in_channels": 64, "out_channels": 64, "patch_size": [1, 1], "axes_dim": [16, 16]},
        **{"vec_in_dim": None, "guidance_embed": False},
    ),
    "hunyuan_video": Tiny("HunyuanVideo", blocks=4, before=TEXT, frames=4).of(HUNYUAN),
    "ltxv": Tiny("LTXV", channels=128, frames=5, patch=1, prompt=_every_token).of(LTX),
    "cosmos_predict2": Tiny("CosmosT2IPredict2", frames=3).of(COSMOS),
    "anima": Tiny("Anima", frames=1).of(COSMOS),
    "ltxav": Tiny(
        "LTXAV", channels=128, text=64, frames=4, patch=1, prompt=_every_token, sound=(8, 6, 16)
    ).of(
        LTX,
        audio_attention_head_dim=16,
        audio_num_attention_heads=2,
        audio_cross_attention_dim=32,
        connector_attention_head_dim=16,
        connector_num_attention_heads=2,
    ),
    "minimax_h3": Tiny("MiniMaxH3", before=TEXT + 12, channels=24, frames=3, sound=(32, 2, 6)).of(
        **{"num_layers": 2, "num_attention_heads": 1, "hidden_size": 96, "ffn_hidden_size": 64},
        **{"text_dim": 32, "time_embed_dim": 32},
    ),
}
"""Transformers whose tokens can merge, by a name for tests."""

AURA_FLOW = Tiny("AuraFlow", blocks=3, before=8 + TEXT, channels=4).of(
    dim=64, n_layers=3, n_double_layers=1, n_heads=2, global_conddim=64, cond_seq_dim=32
)
"""A transformer of no known family, whose tokens do not merge."""


def _unet(
    name: str,
    depths: tuple[int, ...] = (1, 1, 0),
    *,
    residuals: int = 1,
    middle: int = 1,
    **settings: Any,
) -> Tiny:
    """A UNet with as many residual blocks in each level, and stacks of these depths behind them."""
    shape = {"model_channels": 32, "channel_mult": (1, 2, 4), "context_dim": 32}
    shape["transformer_depth_middle"] = middle
    blocks = (2 * residuals + 1) * sum(depths) + middle
    settings = unet_settings(depths, residuals, **shape | settings)
    return Tiny(name, blocks, channels=4, patch=1).of(settings)


def sd15(levels: int) -> Tiny:
    """The first levels of Stable Diffusion 1.x, with all of their blocks."""
    return _unet("SD15", (1,) * levels, residuals=2, channel_mult=(1,) * levels)


_SDXL: dict[str, Any] = {
    "use_linear_in_transformer": True,
    "num_classes": "sequential",
    "num_head_channels": 16,
}

_VIDEO: dict[str, Any] = {
    **{"in_channels": 8, "adm_in_channels": 3 * 256, "video_kernel_size": [3, 1, 1]},
    **{"use_temporal_attention": True, "use_temporal_resblock": True, "extra_ff_mix_layer": True},
    **{"use_spatial_context": True, "merge_strategy": "learned_with_images", **_SDXL},
}
_UPSCALER: dict[str, Any] = {
    **{"in_channels": 7, "use_linear_in_transformer": True, "num_heads": 4},
    "disable_self_attentions": [True, True, False],
}

UNETS: dict[str, Tiny] = {
    "sd15": _unet("SD15"),
    "sdxl": _unet("SDXL", (0, 1, 2), middle=2, adm_in_channels=32 + 6 * 256, **_SDXL),
    "sd15_inpaint": _unet("SD15", in_channels=9),
    "sdxl_refiner": _unet(
        "SDXLRefiner", (0, 4, 0), middle=4, adm_in_channels=32 + 5 * 256, **_SDXL
    ),
    "sd2": _unet("SD20", use_linear_in_transformer=True, num_head_channels=16),
    "x4_upscaler": _unet("SD_X4Upscaler", (0, 1, 1), **_UPSCALER),
    "svd": _unet("SVD_img2vid", **_VIDEO),
}
"""UNets with all kinds of levels that the published ones have, by a name for tests."""

_ONE_LEVEL: dict[str, Any] = {
    **{"channel_mult": (1,), "num_res_blocks": [1], "transformer_depth": [2]},
    **{"transformer_depth_middle": -1, "transformer_depth_output": [1, 0]},
}

KINDS = UNETS | TINY | {"one_level": UNETS["sd15"].of(UNETS["sd15"].settings, **_ONE_LEVEL)}
"""The last compiles quickly. It has a stack of two blocks and one of one."""


def build(tiny: Tiny) -> ModelPatcher:
    return build_class(tiny.name, tiny.settings)


def build_class(
    name: str, settings: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> ModelPatcher:
    """A model with random weights that the host runs on its device, inferring in ``dtype``.

    Its name is that of a class in ``comfy.supported_models``, its settings those of the class, as
    its loader would read them from a file.
    """
    config = getattr(comfy.supported_models, name)(dict(settings))
    # The class has put sizes of the published model in their place.
    config.unet_config.update(settings)
    config.set_inference_dtype(dtype, None)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        # Fills memory that a file would be read into with NaN: some buffers are not parameters.
        torch.use_deterministic_algorithms(True)
        base = config.get_model({}, device=torch.device("cpu"))
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    generator = torch.Generator().manual_seed(0)
    for buffer in base.buffers():
        if buffer.isnan().all():
            buffer.data.normal_(0.0, 0.3, generator=generator)
    is_unet = isinstance(base.diffusion_model, UNetModel)
    for name, parameter in base.named_parameters():
        is_matrix = parameter.ndim > 1
        mean, std = (0.0, parameter[0].numel() ** -0.5) if is_matrix else (0.3, 0.3)
        # In single precision, which a CPU fills several times faster than half precision.
        values = torch.empty(parameter.shape).normal_(mean, std, generator=generator)
        # With gentle weights for the time, answers lead on from step to step, as a trained model's.
        is_of_time = not is_unet and ("time" in name or "t_embed" in name)
        parameter.data.copy_(0.1 * values if is_of_time else values)
    load_device = comfy.model_management.get_torch_device()
    return ModelPatcher(base, load_device=load_device, offload_device=torch.device("cpu"))


def sample(
    model: Any,
    tiny: Tiny,
    size: tuple[int, ...] | None = None,
    *,
    steps: int = 2,
    batch: int = 1,
    cfg: float = 4.0,
    seed: int = 1,
    prompts: Any = None,
    extras: Mapping[str, Any] | None = None,
    picture: float = 0.0,
    sampler: str = "euler",
    scheduler: str = "simple",
    **options: Any,
) -> torch.Tensor:
    """Sample a latent from noise or from a ``picture`` of one value; no sound.

    Unless its ``size`` is given, it is of 8 by 10 patches. Unless there are ``prompts``, they are
    random and have the ``extras``.
    """
    frames = () if tiny.frames is None else (tiny.frames,)
    empty = torch.full((batch, tiny.channels, *frames, *(size or tiny.size(8, 10))), picture)
    if tiny.sound is not None:
        empty = NestedTensor([empty, torch.zeros(batch, *tiny.sound)])
    noise = comfy.sample.prepare_noise(empty, seed)
    prompts = prompts or [conditioning(tiny, each, **extras or {}) for each in (5, 6)]
    run = (noise, steps, cfg, sampler, scheduler, *prompts, empty)
    sampled = comfy.sample.sample(model, *run, disable_pbar=True, seed=seed, **options)
    return sampled if tiny.sound is None else sampled.unbind()[0]


def conditioning(tiny: Tiny, seed: int, tokens: int = TEXT, **extras: Any) -> list[list[Any]]:
    """A random prompt in the form of the host."""
    random = torch.Generator().manual_seed(seed)
    text = torch.randn(1, tokens, tiny.text, generator=random)
    pooled = torch.randn(1, 32, generator=random)
    return [[text, {"pooled_output": pooled, **tiny.prompt(random), **extras}]]
