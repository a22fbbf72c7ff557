"""Tiny UNets, transformers and pipelines of diffusers with random weights."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    ControlNetModel,
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEXT_CHANNELS = 32
TEXT = 7
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


def make_vae(**options: Any) -> AutoencoderKL:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=4,
            norm_num_groups=4,
            **options,
        ).eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


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
            "prompt_embeds": noise(batch, TEXT, TEXT_CHANNELS),
            "negative_prompt_embeds": noise(batch, TEXT, TEXT_CHANNELS, seed=2),
        }
        if isinstance(self.pipeline, StableDiffusionXLPipeline | StableDiffusionXLImg2ImgPipeline):
            text |= {
                "pooled_prompt_embeds": text["prompt_embeds"].mean(1),
                "negative_pooled_prompt_embeds": text["negative_prompt_embeds"].mean(1),
            }
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
        "vae": make_vae(),
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


def lively(model: Any) -> Any:
    """A model with other weights, the same each time, that changes its input substantially."""
    with torch.no_grad():
        for index, weight in enumerate(model.parameters()):
            # Some are zeros at first, so that blocks would change nothing.
            spread = 1.0 if weight.ndim < 2 else weight[0].numel() ** -0.5
            weight.copy_(spread * noise(*weight.shape, seed=index))
            if weight.ndim < 2:
                weight.mul_(0.1).add_(1.0)
    return model.eval().to(DEVICE)


class TransformerCase:
    """A pipeline with a transformer and how to run it.

    Attributes:
        pipeline: without text encoders, whose output stands in for them, and without a VAE.
        arguments: those of its call.
        picture: the tokens of its picture, which has 80 patches of 16 pixels unless told otherwise.
        beside: the tokens of text that stand in the sequence beside it.
        references: the tokens of other pictures.
    """

    def __init__(
        self,
        pipeline: Any,
        picture: int = 80,
        beside: int = TEXT,
        references: int = 0,
        **arguments: Any,
    ):
        self.pipeline = pipeline
        self.arguments = {"height": 128, "width": 160} | arguments
        self.picture, self.beside, self.references = picture, beside, references
        pipeline.set_progress_bar_config(disable=True)

    @property
    def transformer(self) -> Any:
        return self.pipeline.transformer

    @torch.no_grad()
    def __call__(self, steps: int = 2, seed: int = 0, **options: Any) -> Tensor:
        arguments: dict[str, Any] = {
            "num_inference_steps": steps,
            "generator": torch.Generator().manual_seed(seed),
            "output_type": "latent",
            "return_dict": False,
        }
        result = self.pipeline(**{**self.arguments, **arguments, **options})[0]
        return torch.stack(result) if isinstance(result, list) else result


_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
_NOTHING = {"vae": None, "text_encoder": None, "tokenizer": None}
_SECOND = {"text_encoder_2": None, "tokenizer_2": None}


def make_flux(**options: Any) -> FluxTransformer2DModel:
    return lively(
        FluxTransformer2DModel(
            patch_size=1,
            num_layers=1,
            num_single_layers=2,
            **_HEADS,
            joint_attention_dim=TEXT_CHANNELS,
            pooled_projection_dim=TEXT_CHANNELS,
            axes_dims_rope=(4, 4, 8),
            **{"in_channels": 16, **options},
        )
    )


_FLUX_TEXT: dict[str, Any] = {
    "prompt_embeds": noise(1, TEXT, TEXT_CHANNELS),
    "pooled_prompt_embeds": noise(1, TEXT_CHANNELS),
}


_PROMPTS: dict[str, Any] = {
    "prompt_embeds": noise(1, TEXT, TEXT_CHANNELS),
    "negative_prompt_embeds": noise(1, TEXT, TEXT_CHANNELS, seed=2),
}
_MASK = torch.ones(1, TEXT, dtype=torch.long)
_PROMPT_MASKS: dict[str, Any] = {
    "prompt_attention_mask": _MASK,
    "negative_prompt_attention_mask": _MASK,
}


def _shifted() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


def flux() -> TransformerCase:
    pipeline = FluxPipeline(_shifted(), **_NOTHING, **_SECOND, transformer=make_flux())
    return TransformerCase(pipeline, **_FLUX_TEXT)


def flux_kontext() -> TransformerCase:
    """With a reference picture behind the latent, in the same sequence."""
    pipeline = FluxKontextPipeline(_shifted(), **_NOTHING, **_SECOND, transformer=make_flux())
    pipeline.latent_channels = 4
    return TransformerCase(
        pipeline,
        references=48,
        **_FLUX_TEXT,
        image=noise(1, 4, 12, 16, seed=7),
        max_area=128 * 160,
    )


def flux2() -> TransformerCase:
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        **_HEADS,
        joint_attention_dim=TEXT_CHANNELS,
        axes_dims_rope=(4, 4, 4, 4),
    )
    pipeline = Flux2Pipeline(_shifted(), **_NOTHING, transformer=lively(transformer))
    return TransformerCase(pipeline, prompt_embeds=noise(1, TEXT, TEXT_CHANNELS))


def sd3() -> TransformerCase:
    transformer = SD3Transformer2DModel(
        sample_size=32,
        in_channels=4,
        num_layers=3,
        **_HEADS,
        joint_attention_dim=TEXT_CHANNELS,
        caption_projection_dim=32,
        pooled_projection_dim=TEXT_CHANNELS,
        out_channels=4,
        pos_embed_max_size=32,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    pipeline = StableDiffusion3Pipeline(
        lively(transformer),
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        **_NOTHING,
        **_SECOND,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    negative: dict[str, Any] = {f"negative_{name}": -value for name, value in _FLUX_TEXT.items()}
    return TransformerCase(pipeline, **_FLUX_TEXT, **negative)


def make_qwen(**options: Any) -> QwenImageTransformer2DModel:
    return lively(
        QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=3,
            **_HEADS,
            joint_attention_dim=TEXT_CHANNELS,
            axes_dims_rope=(4, 4, 8),
            **options,
        )
    )


def qwen_image() -> TransformerCase:
    pipeline = QwenImagePipeline(_shifted(), **_NOTHING, transformer=make_qwen())
    return TransformerCase(
        pipeline, **_PROMPTS, prompt_embeds_mask=_MASK, negative_prompt_embeds_mask=_MASK
    )


def z_image() -> TransformerCase:
    """It pads its text and its picture to multiples of 32 tokens."""
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT_CHANNELS,
        axes_dims=[4, 4, 8],
        axes_lens=[256, 64, 64],
    )
    pipeline = ZImagePipeline(
        FlowMatchEulerDiscreteScheduler(shift=3.0), **_NOTHING, transformer=lively(transformer)
    )
    return TransformerCase(
        pipeline,
        beside=32 + 16,
        prompt_embeds=[noise(TEXT, TEXT_CHANNELS)],
        negative_prompt_embeds=[noise(TEXT, TEXT_CHANNELS, seed=2)],
    )


def make_wan(**options: Any) -> WanTransformer3DModel:
    return lively(
        WanTransformer3DModel(
            **_HEADS,
            text_dim=TEXT_CHANNELS,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
            rope_max_seq_len=64,
            **{"in_channels": 4, "out_channels": 4, **options},
        )
    )


def wan() -> TransformerCase:
    """With two experts, one for each half of the steps."""
    pipeline = WanPipeline(
        None,
        None,
        None,
        UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        make_wan(),
        make_wan(),
        boundary_ratio=0.8,
    )
    return TransformerCase(
        pipeline,
        picture=3 * 80,
        beside=0,
        **_PROMPTS,
        num_frames=9,
    )


def ltx() -> TransformerCase:
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        **_HEADS,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=TEXT_CHANNELS,
    )
    pipeline = LTXPipeline(_shifted(), **_NOTHING, transformer=lively(transformer))
    return TransformerCase(
        pipeline,
        picture=3 * 80,
        beside=0,
        **_PROMPTS,
        **_PROMPT_MASKS,
        num_frames=17,
        height=256,
        width=320,
    )


def hunyuan_video(**options: Any) -> TransformerCase:
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        **_HEADS,
        num_layers=1,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=TEXT_CHANNELS,
        pooled_projection_dim=TEXT_CHANNELS,
        rope_axes_dim=(4, 4, 8),
        **options,
    )
    pipeline = HunyuanVideoPipeline(
        None,
        None,
        lively(transformer),
        None,
        FlowMatchEulerDiscreteScheduler(shift=7.0),
        None,
        None,
    )
    return TransformerCase(
        pipeline,
        picture=3 * 80,
        **_FLUX_TEXT,
        prompt_attention_mask=torch.ones(1, TEXT, dtype=torch.bool),
        num_frames=9,
    )


def cogvideox() -> TransformerCase:
    """Its frames come before the channels, and its scheduler counts no steps."""
    transformer = CogVideoXTransformer3DModel(
        **_HEADS,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=TEXT_CHANNELS,
        num_layers=2,
        sample_width=20,
        sample_height=16,
        sample_frames=9,
        max_text_seq_length=TEXT,
    )
    pipeline = CogVideoXPipeline(
        None,
        None,
        None,
        lively(transformer),
        CogVideoXDDIMScheduler(prediction_type="v_prediction"),
    )
    return TransformerCase(
        pipeline,
        picture=3 * 80,
        **_PROMPTS,
        num_frames=9,
    )


def lumina2() -> TransformerCase:
    """With fewer heads of keys than of queries."""
    transformer = Lumina2Transformer2DModel(
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 4, 8),
        axes_lens=(64, 64, 64),
        cap_feat_dim=TEXT_CHANNELS,
    )
    pipeline = Lumina2Pipeline(
        lively(transformer), FlowMatchEulerDiscreteScheduler(shift=6.0), **_NOTHING
    )
    return TransformerCase(pipeline, **_PROMPTS, **_PROMPT_MASKS)


TRANSFORMERS = {
    case.__name__: case
    for case in (
        *(flux, flux_kontext, flux2, sd3, qwen_image, z_image),
        *(wan, ltx, hunyuan_video, cogvideox, lumina2),
    )
}
