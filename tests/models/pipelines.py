"""Tiny UNets and pipelines of diffusers with random weights."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEXT_CHANNELS = 32
HEIGHT, WIDTH = 96, 128
GRID = (HEIGHT // 8, WIDTH // 8)

_SD: dict[str, Any] = {
    "block_out_channels": (32, 64, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 4,
}
_UNETS: dict[str, dict[str, Any]] = {
    "one_level": {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "mid_block_type": None,
        "attention_head_dim": 4,
    },
    "sd15": _SD,
    "sd21": {**_SD, "use_linear_projection": True, "attention_head_dim": (2, 4, 4)},
    "sd15_inpaint": {**_SD, "in_channels": 9},
    "sdxl": {
        "block_out_channels": (32, 64, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (2, 4, 4),
        "transformer_layers_per_block": (1, 2, 3),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + TEXT_CHANNELS,
    },
}


def make_unet(family: str = "sd15", **options: Any) -> UNet2DConditionModel:
    """A UNet of a family, the same each time, that changes its input substantially."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = UNet2DConditionModel(
            **{
                "sample_size": 64,
                "in_channels": 4,
                "layers_per_block": 1,
                "cross_attention_dim": TEXT_CHANNELS,
                "norm_num_groups": 8,
                **_UNETS[family],
                **options,
            }
        )
        for name, parameter in unet.named_parameters():
            if name.endswith(("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")):
                parameter.data *= 3
    return unet.eval().to(DEVICE)


def inputs(
    unet: UNet2DConditionModel, batch: int = 2, grid: tuple[int, int] = GRID, seed: int = 0
) -> dict[str, Any]:
    """The arguments of a call of the UNet, except the timestep."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator).to(DEVICE, unet.dtype)

    arguments: dict[str, Any] = {
        "sample": noise(unet.config.in_channels, *grid),
        "encoder_hidden_states": noise(7, TEXT_CHANNELS),
    }
    if unet.config.addition_embed_type == "text_time":
        arguments["added_cond_kwargs"] = {
            "text_embeds": noise(TEXT_CHANNELS),
            "time_ids": torch.tensor([[HEIGHT, WIDTH, 0, 0, HEIGHT, WIDTH]], device=DEVICE).repeat(
                batch, 1
            ),
        }
    return arguments


@torch.no_grad()
def call(unet: Any, timestep: float = 500, **options: Any) -> Tensor:
    """One evaluation of a UNet, which may be compiled."""
    arguments = inputs(getattr(unet, "_orig_mod", unet), **options)
    return unet(arguments.pop("sample"), torch.tensor(timestep), **arguments).sample


def _make_vae() -> AutoencoderKL:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=4,
            norm_num_groups=4,
        ).eval()


def _text(batch: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 7, TEXT_CHANNELS, generator=generator).to(DEVICE)


class Case:
    """A pipeline and how to run it; the output of text encoders stands in for them."""

    def __init__(self, pipeline: Any, **arguments: Any):
        self.pipeline = pipeline.to(DEVICE)
        self.arguments = arguments
        pipeline.set_progress_bar_config(disable=True)

    def __call__(
        self,
        steps: int = 2,
        batch: int = 1,
        guidance_scale: float = 4.0,
        seed: int = 0,
        **options: Any,
    ) -> Tensor:
        text: dict[str, Any] = {
            "prompt_embeds": _text(batch, 1),
            "negative_prompt_embeds": _text(batch, 2),
        }
        if isinstance(self.pipeline, StableDiffusionXLPipeline | StableDiffusionXLImg2ImgPipeline):
            text |= {f"pooled_{name}": value.mean(1) for name, value in text.items()} | {
                "negative_pooled_prompt_embeds": text["negative_prompt_embeds"].mean(1)
            }
            del text["pooled_negative_prompt_embeds"]
        return self.pipeline(
            **text,
            **{**self.arguments, **options},
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        ).images


def picture(channels: int = 3, seed: int = 5) -> Tensor:
    """``[1, channels, HEIGHT, WIDTH]`` from 0 to 1."""
    return torch.rand(1, channels, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed))


def _parts(family: str, **scheduler_options: Any) -> dict[str, Any]:
    return {
        "unet": make_unet(family),
        "vae": _make_vae(),
        "text_encoder": None,
        "tokenizer": None,
        "scheduler": DDIMScheduler(clip_sample=False, steps_offset=1, **scheduler_options),
    }


_NO_CHECKER = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
_SIZE = {"height": HEIGHT, "width": WIDTH}
_SECOND_ENCODER = {"text_encoder_2": None, "tokenizer_2": None, "add_watermarker": False}


def sd15() -> Case:
    return Case(StableDiffusionPipeline(**_parts("sd15"), **_NO_CHECKER), **_SIZE)


def sd15_ancestral() -> Case:
    """With a scheduler that adds noise in each step."""
    parts = _parts("sd15") | {"scheduler": EulerAncestralDiscreteScheduler(steps_offset=1)}
    return Case(StableDiffusionPipeline(**parts, **_NO_CHECKER), **_SIZE)


def sd21() -> Case:
    parts = _parts("sd21", prediction_type="v_prediction")
    return Case(StableDiffusionPipeline(**parts, **_NO_CHECKER), **_SIZE)


def sdxl() -> Case:
    return Case(StableDiffusionXLPipeline(**_parts("sdxl"), **_SECOND_ENCODER), **_SIZE)


def sd15_img2img() -> Case:
    pipeline = StableDiffusionImg2ImgPipeline(**_parts("sd15"), **_NO_CHECKER)
    return Case(pipeline, image=picture(), strength=1.0)


def sdxl_img2img() -> Case:
    pipeline = StableDiffusionXLImg2ImgPipeline(**_parts("sdxl"), **_SECOND_ENCODER)
    return Case(pipeline, image=picture(), strength=1.0)


def sd15_inpaint() -> Case:
    pipeline = StableDiffusionInpaintPipeline(**_parts("sd15_inpaint"), **_NO_CHECKER)
    mask = (picture(channels=1, seed=6) > 0.5).float()
    return Case(pipeline, image=picture(), mask_image=mask, **_SIZE)


def sd15_controlnet() -> Case:
    parts = _parts("sd15")
    controlnet = ControlNetModel.from_unet(parts["unet"]).eval()
    for layer in (*controlnet.controlnet_down_blocks, controlnet.controlnet_mid_block):
        torch.nn.init.eye_(layer.weight.data[:, :, 0, 0])
    pipeline = StableDiffusionControlNetPipeline(**parts, controlnet=controlnet, **_NO_CHECKER)
    return Case(pipeline, image=picture(), **_SIZE)


CASES = {
    case.__name__: case
    for case in (
        *(sd15, sd15_ancestral, sd21, sdxl),
        *(sd15_img2img, sdxl_img2img, sd15_inpaint, sd15_controlnet),
    )
}
