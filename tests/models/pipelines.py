"""Tiny UNets, transformers and pipelines of diffusers with random weights."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import accelerate
import diffusers
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEXT_CHANNELS = 32
TEXT = 7
HEIGHT, WIDTH = 96, 128
GRID = (HEIGHT // 8, WIDTH // 8)

_UNETS: dict[str, dict[str, Any]] = {
    "sd15": {
        "block_out_channels": (32, 64, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "attention_head_dim": 4,
    },
    "one_level": {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "mid_block_type": None,
        "attention_head_dim": 4,
    },
    # It compiles quickly.
    "one_block": {
        "block_out_channels": (32,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("UpBlock2D",),
        "mid_block_type": None,
        "attention_head_dim": 4,
    },
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


def make_unet(family: str = "sd15", **options: Any) -> diffusers.UNet2DConditionModel:
    """A UNet of a family, the same each time, that changes its input substantially."""
    settings = {
        "sample_size": 64,
        "in_channels": 4,
        "layers_per_block": 1,
        "cross_attention_dim": TEXT_CHANNELS,
        "norm_num_groups": 8,
        **_UNETS[family],
        **options,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = diffusers.UNet2DConditionModel(**settings)
    for name, parameter in unet.named_parameters():
        if name.endswith(("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")):
            parameter.data *= 3
    return unet.eval().to(DEVICE)


def inputs(
    unet: Any, batch: int = 2, grid: tuple[int, int] = GRID, seed: int = 0
) -> dict[str, Any]:
    """The arguments of a call of the UNet, except the timestep."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator).to(DEVICE, unet.dtype)

    arguments: dict[str, Any] = {
        "sample": drawn(unet.config.in_channels, *grid),
        "encoder_hidden_states": drawn(TEXT, TEXT_CHANNELS),
    }
    if unet.config.addition_embed_type == "text_time":
        sizes = torch.tensor([[HEIGHT, WIDTH, 0, 0, HEIGHT, WIDTH]], device=DEVICE)
        arguments["added_cond_kwargs"] = {
            "text_embeds": drawn(TEXT_CHANNELS),
            "time_ids": sizes.repeat(batch, 1),
        }
    return arguments


@torch.no_grad()
def call(unet: Any, timestep: float = 500, **options: Any) -> Tensor:
    """One evaluation of a UNet, which may be compiled."""
    arguments = inputs(getattr(unet, "_orig_mod", unet), **options)
    return unet(arguments.pop("sample"), torch.tensor(timestep), **arguments).sample


def make_vae(**options: Any) -> diffusers.AutoencoderKL:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return diffusers.AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=4,
            **options,
        ).eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Case:
    """A pipeline without text encoders, and the arguments of its call, with the output of these."""

    def __init__(self, pipeline: Any, **arguments: Any):
        self.pipeline = pipeline.to(DEVICE)
        self.arguments = arguments
        self.part = "unet" if hasattr(pipeline, "unet") else "transformer"
        pipeline.set_progress_bar_config(disable=True)

    @property
    def network(self) -> Any:
        return getattr(self.pipeline, self.part)

    @torch.no_grad()
    def __call__(self, steps: int = 2, seed: int = 0, **options: Any) -> Tensor:
        arguments: dict[str, Any] = {
            "num_inference_steps": steps,
            "generator": torch.Generator().manual_seed(seed),
            "output_type": "latent",
            "return_dict": False,
        }
        result = self.pipeline(**{**arguments, **self.arguments, **options})[0]
        return torch.stack(result) if isinstance(result, list) else torch.as_tensor(result)

    def compile(self, way: str, backend: Any, is_whole: bool = True) -> None:
        """Compile the network, into whole graphs or not, in one of :data:`COMPILED`."""
        options = {"backend": backend, "fullgraph": is_whole}
        if way in ("before", "after"):
            setattr(self.pipeline, self.part, torch.compile(self.network, **options))
        else:
            getattr(self.network, way)(**options)

    def called(self) -> dict[str, Any]:
        given: dict[str, Any] = {}

        def keep(network: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = [*inspect.signature(type(network).forward).parameters][1:]
            given.update(dict(zip(names, args, strict=False)) | kwargs)

        with self.network.register_forward_pre_hook(keep, with_kwargs=True):
            self(steps=1)
        return given


COMPILED = {
    **dict.fromkeys(("before", "after", "compile"), "one_block"),
    "compile_repeated_blocks": "one_level",
}
"""The ways to compile a network: before it is patched, after it, or by one of its own methods; each
with the family of UNets that compiles fastest and has all that the way is about."""

OFFLOADS: dict[str, Callable[[Any], Any]] = {
    "model": lambda network: accelerate.cpu_offload_with_hook(network, DEVICE),
    "sequential": lambda network: accelerate.cpu_offload(network, DEVICE, offload_buffers=True),
    "group": lambda network: network.enable_group_offload(DEVICE, offload_type="leaf_level"),
}
"""By accelerate and diffusers; without a GPU, the execution device is the CPU, too."""

PROMPTS: dict[str, Any] = {
    "prompt_embeds": noise(1, TEXT, TEXT_CHANNELS),
    "negative_prompt_embeds": noise(1, TEXT, TEXT_CHANNELS, seed=2),
}
_FLUX_TEXT: dict[str, Any] = {
    "prompt_embeds": noise(1, TEXT, TEXT_CHANNELS),
    "pooled_prompt_embeds": noise(1, TEXT_CHANNELS),
}
POOLED_PROMPTS: dict[str, Any] = {
    **PROMPTS,
    **_FLUX_TEXT,
    "negative_pooled_prompt_embeds": noise(1, TEXT_CHANNELS, seed=2),
}
_NO_ENCODER = {"text_encoder": None, "tokenizer": None}
_NO_SECOND = {"text_encoder_2": None, "tokenizer_2": None}

_NO_CHECKER = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
SIZE = {"height": HEIGHT, "width": WIDTH}


def parts_of(family: str, **options: Any) -> dict[str, Any]:
    return {
        "unet": make_unet(family, **options),
        "vae": make_vae(),
        "scheduler": diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        **_NO_ENCODER,
    }


def picture(channels: int = 3, seed: int = 5) -> Tensor:
    """``[1, channels, HEIGHT, WIDTH]`` from 0 to 1."""
    return torch.rand(1, channels, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed))


def sd15(family: str = "sd15") -> Case:
    pipeline = diffusers.StableDiffusionPipeline(**parts_of(family), **_NO_CHECKER)
    return Case(pipeline, **PROMPTS, **SIZE)


def _sdxl(kind: Any, **given: Any) -> Case:
    pipeline = kind(**parts_of("sdxl"), **_NO_SECOND, add_watermarker=False)
    return Case(pipeline, **POOLED_PROMPTS, **given)


def sdxl() -> Case:
    return _sdxl(diffusers.StableDiffusionXLPipeline, **SIZE)


def sdxl_img2img() -> Case:
    return _sdxl(diffusers.StableDiffusionXLImg2ImgPipeline, image=picture(), strength=1.0)


def sd15_inpaint() -> Case:
    pipeline = diffusers.StableDiffusionInpaintPipeline(
        **parts_of("sd15", in_channels=9), **_NO_CHECKER
    )
    mask = (picture(channels=1, seed=6) > 0.5).float()
    return Case(pipeline, **PROMPTS, **SIZE, image=picture(), mask_image=mask)


def sd15_controlnet() -> Case:
    parts = parts_of("sd15")
    controlnet = diffusers.ControlNetModel.from_unet(parts["unet"]).eval()
    for layer in (*controlnet.controlnet_down_blocks, controlnet.controlnet_mid_block):
        torch.nn.init.eye_(layer.weight.data[:, :, 0, 0])
    pipeline = diffusers.StableDiffusionControlNetPipeline(
        **parts, controlnet=controlnet, **_NO_CHECKER
    )
    return Case(pipeline, **PROMPTS, **SIZE, image=picture())


CASES = {case.__name__: case for case in (sd15, sdxl, sdxl_img2img, sd15_inpaint, sd15_controlnet)}


class Around(torch.nn.Module):
    """What other libraries put around a model: it has what the model has."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        own = self._modules.get(name)
        return getattr(self._modules["inner"], name) if own is None else own


_OF_TIME = re.compile(r"time(step)?_embed|\bt_embedder|time_proj")


def lively(model: Any, of_time: float = 0.1) -> Any:
    """A model with other weights, the same each time, that changes its input substantially.

    With gentle weights ``of_time``, its answers lead on from step to step.
    """
    with torch.no_grad():
        for index, (name, weight) in enumerate(model.named_parameters()):
            # Some are zeros at first, so that blocks would change nothing.
            spread = 1.0 if weight.ndim < 2 else weight[0].numel() ** -0.5
            spread *= of_time if _OF_TIME.search(name) else 1.0
            weight.copy_(spread * noise(*weight.shape, seed=index))
            if weight.ndim < 2:
                weight.mul_(0.1).add_(1.0)
    return model.eval().to(DEVICE)


def _case(
    kind: Any, transformer: Any, scheduler: Any, parts: dict[str, Any] | None = None, **given: Any
) -> Case:
    """Of a pipeline with a transformer, whose picture has 80 patches of 16 pixels."""
    parts = {"transformer": lively(transformer), **_NO_ENCODER, "vae": None, **(parts or {})}
    return Case(kind(scheduler=scheduler, **parts), **{"height": 128, "width": 160, **given})


_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
_JOINT: dict[str, Any] = {**_HEADS, "joint_attention_dim": TEXT_CHANNELS}
_DOUBLE_AND_SINGLE: dict[str, Any] = {"num_layers": 1, "num_single_layers": 2}
_POOLED: dict[str, Any] = {"pooled_projection_dim": TEXT_CHANNELS}
_OF_LATENT: dict[str, Any] = {"in_channels": 4, "out_channels": 4}
_MASK = torch.ones(1, TEXT, dtype=torch.long, device=DEVICE)
_PROMPT_MASKS: dict[str, Any] = {
    "prompt_attention_mask": _MASK,
    "negative_prompt_attention_mask": _MASK,
}


def _flow(shift: float | None = None) -> diffusers.FlowMatchEulerDiscreteScheduler:
    options = {"use_dynamic_shifting": True} if shift is None else {"shift": shift}
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


def make_flux(in_channels: int = 16) -> diffusers.FluxTransformer2DModel:
    sizes: dict[str, Any] = {"in_channels": in_channels, "out_channels": 16, **_JOINT, **_POOLED}
    kind = diffusers.FluxTransformer2DModel
    return lively(kind(**sizes, **_DOUBLE_AND_SINGLE, axes_dims_rope=(4, 4, 8)))


def flux() -> Case:
    return _case(diffusers.FluxPipeline, make_flux(), _flow(), _NO_SECOND, **_FLUX_TEXT)


def flux_with_vae() -> Case:
    case = flux()
    case.pipeline.register_modules(vae=make_vae(shift_factor=0.0))
    case.arguments |= {"height": 256, "width": 256}
    return case


def flux_kontext() -> Case:
    """With a reference picture behind the latent, in the same sequence."""
    given = {**_FLUX_TEXT, "image": noise(1, 4, 12, 16, seed=7), "max_area": 128 * 160}
    case = _case(diffusers.FluxKontextPipeline, make_flux(), _flow(), _NO_SECOND, **given)
    case.pipeline.latent_channels = 4
    return case


def flux2() -> Case:
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16, **_DOUBLE_AND_SINGLE, **_JOINT, axes_dims_rope=(4, 4, 4, 4)
    )
    prompt = PROMPTS["prompt_embeds"]
    return _case(diffusers.Flux2Pipeline, transformer, _flow(), prompt_embeds=prompt)


def sd3() -> Case:
    transformer = diffusers.SD3Transformer2DModel(
        **{**_OF_LATENT, **_JOINT, **_POOLED},
        **{"num_layers": 3, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
        **{"caption_projection_dim": 32, "sample_size": 32, "pos_embed_max_size": 32},
    )
    none = {**_NO_SECOND, "text_encoder_3": None, "tokenizer_3": None}
    kind = diffusers.StableDiffusion3Pipeline
    return _case(kind, transformer, _flow(3.0), none, **POOLED_PROMPTS)


def sd3_controlnet() -> Case:
    case = sd3()
    plain = {"num_extra_conditioning_channels": 0, "load_weights_from_transformer": False}
    make = diffusers.SD3ControlNetModel.from_transformer
    controlnet = lively(make(case.network, num_layers=3, **plain))
    for layer in controlnet.controlnet_blocks:
        torch.nn.init.eye_(layer.weight)
    kind = diffusers.StableDiffusion3ControlNetPipeline
    vae = make_vae(shift_factor=0.0)
    pipeline = kind.from_pipe(case.pipeline, controlnet=controlnet, vae=vae)
    return Case(pipeline, **case.arguments, control_image=picture())


def qwen_image() -> Case:
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=3, **_JOINT, axes_dims_rope=(4, 4, 8)
    )
    masks: dict[str, Any] = {"prompt_embeds_mask": _MASK, "negative_prompt_embeds_mask": _MASK}
    return _case(diffusers.QwenImagePipeline, transformer, _flow(), **PROMPTS, **masks)


def z_image() -> Case:
    """It pads its text and its picture to multiples of 32 tokens."""
    transformer = diffusers.ZImageTransformer2DModel(
        **{"in_channels": 4, "dim": 32, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2},
        **{"n_kv_heads": 2, "cap_feat_dim": TEXT_CHANNELS},
        **{"axes_dims": [4, 4, 8], "axes_lens": [256, 64, 64]},
    )
    prompts: dict[str, Any] = {name: [text[0]] for name, text in PROMPTS.items()}
    return _case(diffusers.ZImagePipeline, transformer, _flow(3.0), **prompts)


def make_wan(in_channels: int = 4) -> diffusers.WanTransformer3DModel:
    channels = {"in_channels": in_channels, "out_channels": 4, "text_dim": TEXT_CHANNELS}
    sizes = {"freq_dim": 32, "ffn_dim": 64, "num_layers": 2, "rope_max_seq_len": 64}
    return lively(diffusers.WanTransformer3DModel(**channels, **sizes, **_HEADS))


def wan() -> Case:
    """With two experts, one for each half of the steps."""
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    parts = {"transformer_2": make_wan(), "boundary_ratio": 0.8}
    return _case(diffusers.WanPipeline, make_wan(), scheduler, parts, **PROMPTS, num_frames=9)


def ltx() -> Case:
    sizes = {"num_layers": 2, "cross_attention_dim": 32, "caption_channels": TEXT_CHANNELS}
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, **_HEADS, **sizes
    )
    size: dict[str, Any] = {"num_frames": 17, "height": 256, "width": 320}
    return _case(diffusers.LTXPipeline, transformer, _flow(), **PROMPTS, **_PROMPT_MASKS, **size)


def hunyuan_video() -> Case:
    sizes: dict[str, Any] = {"num_refiner_layers": 1, "rope_axes_dim": (4, 4, 8)}
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        **{**_OF_LATENT, **_HEADS, **_DOUBLE_AND_SINGLE, **_POOLED, **sizes},
        text_embed_dim=TEXT_CHANNELS,
    )
    given = {**_FLUX_TEXT, "prompt_attention_mask": _MASK.bool(), "num_frames": 9}
    return _case(diffusers.HunyuanVideoPipeline, transformer, _flow(7.0), _NO_SECOND, **given)


def cogvideox() -> Case:
    """Its frames come before the channels, and its scheduler counts no steps."""
    transformer = diffusers.CogVideoXTransformer3DModel(
        **_OF_LATENT,
        **_HEADS,
        **{"time_embed_dim": 8, "text_embed_dim": TEXT_CHANNELS, "num_layers": 2},
        **{"sample_width": 20, "sample_height": 16, "sample_frames": 9},
        max_text_seq_length=TEXT,
    )
    scheduler = diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction")
    return _case(diffusers.CogVideoXPipeline, transformer, scheduler, **PROMPTS, num_frames=9)


def lumina2() -> Case:
    """With fewer heads of keys than of queries."""
    transformer = diffusers.Lumina2Transformer2DModel(
        **{"in_channels": 4, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1},
        **{"num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16},
        **{"axes_dim_rope": (4, 4, 8), "axes_lens": (64, 64, 64)},
        cap_feat_dim=TEXT_CHANNELS,
    )
    prompts = {**PROMPTS, **_PROMPT_MASKS}
    return _case(diffusers.Lumina2Pipeline, transformer, _flow(6.0), **prompts)


TRANSFORMERS = {
    case.__name__: case
    for case in (
        *(flux, flux_kontext, flux2, sd3, qwen_image, z_image),
        *(wan, ltx, hunyuan_video, cogvideox, lumina2),
    )
}
