"""Tiny instances of diffusers' pipelines with a UNet, made from the signatures of their classes."""

import inspect
from typing import Any

import diffusers
import torch
import transformers
from PIL import Image
from torch import Tensor

from .pipelines import (
    GRID,
    HEIGHT,
    POOLED_PROMPTS,
    PROMPTS,
    SIZE,
    TEXT_CHANNELS,
    WIDTH,
    Case,
    noise,
    parts_of,
    picture,
)

_WORDS = ("<|startoftext|>", "<|endoftext|>", "a</w>", *"acdgot")
_LONGEST = 16

_FROM_WORDS = (
    *("AttendAndExcite", "DiffEdit", "GLIGEN", "LEdits", "Marigold"),
    *("Pix2PixZero", "Safe", "Semantic", "VideoZero"),
)
"""In the names of pipelines that need a text encoder; others are given what it would return."""

# By what is in the name of a pipeline. Where several are, the last decides.
_UNETS: dict[str, dict[str, Any]] = {
    "Depth2Img": {"in_channels": 5},
    "GLIGEN": {"attention_type": "gated"},
    "GLIGENText": {"attention_type": "gated-text-image"},
    "InstructPix2Pix": {"in_channels": 8},
    "LEditsPPPipelineStableDiffusion": {
        # It looks at the attention of the third level.
        "block_out_channels": (32, 64, 64, 64),
        "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
        "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
    },
    "LEditsPPPipelineStableDiffusionXL": {},
    "LatentConsistency": {"time_cond_proj_dim": 8},
    "Marigold": {"in_channels": 8},
    "StableDiffusionUpscale": {"in_channels": 7, "num_class_embeds": 1000},
}
_SCHEDULERS: dict[str, Any] = {
    "LEdits": lambda: diffusers.DPMSolverMultistepScheduler(
        algorithm_type="sde-dpmsolver++", solver_order=2
    ),
    "LatentConsistency": diffusers.LCMScheduler,
    "Paradigms": diffusers.DDIMParallelScheduler,
}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "": {
        **SIZE,
        "image": picture(),
        "control_image": picture(),
        "mask_image": (picture(channels=1, seed=6) > 0.5).float(),
        "strength": 1.0,
        "control_mode": [0],
    },
    "AttendAndExcite": {"token_indices": [2], "max_iter_to_alter": 0, "attn_res": (6, 8)},
    "Depth2Img": {"depth_map": noise(1, HEIGHT, WIDTH)},
    "DiffEdit": {
        "image_latents": noise(1, 2, 4, *GRID),
        "mask_image": (noise(1, *GRID) > 0).float(),
        "inpaint_strength": 1.0,
    },
    "GLIGEN": {"gligen_phrases": ["a cat"], "gligen_boxes": [[0.1, 0.1, 0.6, 0.6]]},
    "LEdits": {"editing_prompt": ["a dog"], "use_cross_attn_mask": True},
    "Marigold": {"processing_resolution": 0, "output_type": "pt"},
    "Pix2PixZero": {
        "source_embeds": noise(1, _LONGEST, TEXT_CHANNELS),
        "target_embeds": noise(1, _LONGEST, TEXT_CHANNELS, seed=3),
    },
    "Semantic": {"editing_prompt": ["a dog"], "edit_warmup_steps": 0},
    "StableDiffusionUpscale": {"image": noise(1, 3, *GRID), "noise_level": 1},
    "VideoZero": {"video_length": 3, "t0": 0, "t1": 1},
}


class Inverted(Case):
    """It edits a picture, which it has to invert before."""

    def __call__(self, steps: int = 2, seed: int = 0, **options: Any) -> Tensor:
        shown = Image.new("RGB", (WIDTH, HEIGHT), "green")
        drawn = torch.Generator().manual_seed(seed)
        self.pipeline.invert(shown, "a cat", num_inversion_steps=steps, generator=drawn, skip=0.0)
        return super().__call__(steps, seed, **options)


def _of(name: str, table: dict[str, Any]) -> Any:
    """What a table has for a pipeline; None if nothing."""
    return ([None] + [entry for part, entry in table.items() if part in name])[-1]


def _text_parts(kind: Any, end: str) -> dict[str, Any]:
    words = {word: index for index, word in enumerate(_WORDS)}
    sizes: dict[str, Any] = {
        **{"vocab_size": len(_WORDS), "hidden_size": TEXT_CHANNELS, "intermediate_size": 32},
        **{"projection_dim": TEXT_CHANNELS, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"max_position_embeddings": _LONGEST},
        **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
    }
    config = transformers.CLIPTextConfig(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = kind(config).eval()
    tokenizer = transformers.CLIPTokenizer(vocab=words, merges=[], model_max_length=_LONGEST)
    return {f"tokenizer{end}": tokenizer, f"text_encoder{end}": encoder}


def _controlnet(name: str, unet: Any) -> Any:
    if "Union" not in name:
        return diffusers.ControlNetModel.from_unet(unet).eval()
    kind = diffusers.ControlNetUnionModel
    shared = inspect.signature(kind.__init__).parameters.keys() & unet.config.keys()
    sizes = {"num_trans_channel": 32, "num_proj_channel": 32, "num_trans_head": 2}
    return kind(**{key: unet.config[key] for key in shared}, **sizes).eval()


def _adapter(is_large: bool) -> Any:
    if is_large:
        return diffusers.T2IAdapter(3, [32, 64, 64, 64], 1, 16, "full_adapter_xl").eval()
    return diffusers.T2IAdapter(3, [32, 64, 64], 1, 8, "full_adapter").eval()


def make(name: str) -> Case:
    """The pipeline of this name, of real parts with random weights."""
    kind: Any = getattr(diffusers, name)
    is_large, takes_words = "XL" in name or "Kolors" in name, any(p in name for p in _FROM_WORDS)
    parts = parts_of("sdxl" if is_large else "sd15", **(_of(name, _UNETS) or {}))
    parts |= {"requires_safety_checker": False, "add_watermarker": False}
    parts |= {"low_res_scheduler": diffusers.DDPMScheduler()}
    if takes_words and is_large:
        parts |= _text_parts(transformers.CLIPTextModelWithProjection, "_2")
    elif takes_words:
        parts |= _text_parts(transformers.CLIPTextModel, "")
    if "ControlNet" in name:
        parts["controlnet"] = _controlnet(name, parts["unet"])
    if "Adapter" in name:
        parts["adapter"] = _adapter(is_large)
    if scheduler := _of(name, _SCHEDULERS):
        parts["scheduler"] = scheduler()
    if "inverse_scheduler" in (accepted := inspect.signature(kind.__init__).parameters):
        parts["inverse_scheduler"] = diffusers.DDIMInverseScheduler()
    required = [key for key, given in accepted.items() if given.default is inspect.Parameter.empty]
    pipeline = kind(
        **dict.fromkeys(required[1:]) | {key: parts[key] for key in accepted if key in parts}
    )
    prompts = POOLED_PROMPTS if is_large else PROMPTS
    given = _ARGUMENTS[""] | ({"prompt": "a cat"} if takes_words else prompts)
    given |= _of(name, _ARGUMENTS)
    takes = inspect.signature(kind.__call__).parameters
    case = Inverted if hasattr(pipeline, "invert") and "LEdits" in name else Case
    return case(pipeline, **{key: value for key, value in given.items() if key in takes})
