"""The sample workflows that follow ComfyUI's own templates.

Names of files and settings of samplers are those of the template of the same model in
`comfyui-workflow-templates-json` 0.1.123, without its switches and prompt writers. In that package
also stands where the files are.
"""

from __future__ import annotations

from collections.abc import Mapping

from tools.samples import Column, Link, Node, Sample

SEED = 2024
SCENE = "a lighthouse on a rocky coast at dusk, warm light in the windows, towering clouds"
MOVING = "A small sailing boat passes a lighthouse at dusk. Waves roll in, gulls circle, slow pan."
NEGATIVE = "blurry, low quality, text, watermark"

PLACE = "**ToMe Patch Model** stands between the model (after any LoRA) and the sampler."

FORECASTS = "It skips some steps: the output of the model there is forecast from its last two."

USE = """\
- **ratio** says how many: 0.6, the default, forecasts two of 8 steps and ten of 20; 0.3 is \
careful, 0 the plain model.
- What it gains on your card was not measured. A step that is forecast takes next to no time, so 8 \
steps should take about three quarters of the time, and 20 half. On our small trained models, \
pictures changed a quarter as much as by fewer steps in the same time, those of a turbo model half \
as much."""

TRY = """\
- To compare, bypass the node (Ctrl+B) and run again: the seed stays the same.
- A model that you do not have: ComfyUI offers to download it when you open this workflow."""


def note(*sentences: str) -> str:
    """The note of a sample: where the node stands, what is special here, and how to use it.

    Args:
        sentences: what is special.
    """
    return f"{' '.join([PLACE, FORECASTS, *sentences])}\n\n{USE}\n{TRY}"


def unet(path: str, title: str = "") -> Node:
    """The loader of a diffusion model."""
    file = path.rpartition("/")[2]
    return Node(
        "UNETLoader", {"unet_name": file}, title=title, models=(("diffusion_models", path),)
    )


def clip(path: str, kind: str) -> Node:
    """The loader of a text encoder."""
    values = {"clip_name": path.rpartition("/")[2], "type": kind}
    return Node("CLIPLoader", values, models=(("text_encoders", path),))


def vae(path: str, title: str = "") -> Node:
    """The loader of a VAE."""
    values = {"vae_name": path.rpartition("/")[2]}
    return Node("VAELoader", values, title=title, models=(("vae", path),))


def lora(path: str, model: Link, strength: float = 1) -> Node:
    """A LoRA for a model."""
    values = {"lora_name": path.rpartition("/")[2], "strength_model": strength}
    return Node("LoraLoaderModelOnly", values, {"model": model}, models=(("loras", path),))


def prompt(text: str, title: str = "Prompt") -> Node:
    """A prompt for the text encoder named `clip`."""
    return Node("CLIPTextEncode", {"text": text}, {"clip": ("clip", 0)}, title)


def patch(model: str, title: str = "", preset: str = "balanced", ratio: float = 0.6) -> Node:
    """Our node behind a model."""
    return Node("ToMePatchModel", {"preset": preset, "ratio": ratio}, {"model": (model, 0)}, title)


def custom_sampler(latent: Link, ending: str = "") -> Node:
    """A sampler of the nodes `noise`, `guider`, `method` and `steps`, all with an ending."""
    links = {"noise": "noise", "guider": "guider", "sampler": "method", "sigmas": "steps"}
    own: dict[str, Link] = {name: (f"{node}{ending}", 0) for name, node in links.items()}
    return Node("SamplerCustomAdvanced", {}, own | {"latent_image": latent})


def decode(samples: str = "sampler") -> Node:
    """Decodes what a sampler gives, by the node named `vae`."""
    return Node("VAEDecode", {}, {"samples": (samples, 0), "vae": ("vae", 0)})


def save(name: str) -> Node:
    """Saves the pictures of the node named `decode`."""
    return Node("SaveImage", {"filename_prefix": name}, {"images": ("decode", 0)})


def text_to_image(
    title: str,
    name: str,
    loaders: Mapping[str, Node],
    steps: int,
    special: tuple[str, ...] = (),
    sampler: str = "euler",
) -> Sample:
    """A picture of 1024x1024 by a model without guidance, with a KSampler.

    Args:
        title: of the note.
        name: of the pictures.
        loaders: nodes named `clip`, `vae` and `model`, the last one before ours.
        steps: of the sampler.
        special: what the note says of this model, in sentences.
        sampler: its name.
    """
    settings = {"seed": SEED, "steps": steps, "cfg": 1, "sampler_name": sampler}
    size = {"width": 1024, "height": 1024}
    return Sample(
        title,
        note(*special),
        (
            Column("Models and size", 330, {**loaders, "size": Node("EmptyLatentImage", size)}),
            Column("Token merging", 280, {"patch": patch("model")}),
            Column(
                "Prompt",
                310,
                {
                    "prompt": prompt(SCENE),
                    "nothing": Node("ConditioningZeroOut", {}, {"conditioning": ("prompt", 0)}),
                },
            ),
            Column(
                "Sampling",
                280,
                {
                    "sampler": Node(
                        "KSampler",
                        {**settings, "scheduler": "simple"},
                        {
                            "model": ("patch", 0),
                            "positive": ("prompt", 0),
                            "negative": ("nothing", 0),
                            "latent_image": ("size", 0),
                        },
                    ),
                    "decode": decode(),
                    "save": save(name),
                },
            ),
        ),
    )


KREA_2 = text_to_image(
    "Krea 2 Turbo: text to image",
    "tome_krea_2",
    {
        "model": unet(
            "Comfy-Org/Krea-2/resolve/main/diffusion_models/krea2_turbo_fp8_scaled.safetensors"
        ),
        "clip": clip(
            "Comfy-Org/Krea-2/resolve/main/text_encoders/qwen3vl_4b_fp8_scaled.safetensors", "krea2"
        ),
        "vae": vae("Comfy-Org/Krea-2/resolve/main/vae/qwen_image_vae.safetensors"),
    },
    8,
)

QWEN_IMAGE_21 = text_to_image(
    "Qwen-Image 2.1: text to image",
    "tome_qwen_image_2_1",
    {
        "model": unet(
            "Comfy-Org/Qwen-Image-2.1/resolve/main/diffusion_models/"
            "qwen_image_2.1_int8_convrot.safetensors"
        ),
        "clip": clip(
            "Comfy-Org/Qwen-Image-2.1/resolve/main/text_encoders/"
            "qwen3vl_8b_int8_convrot.safetensors",
            "qwen_image",
        ),
        "vae": vae("Comfy-Org/Qwen-Image-2.1/resolve/main/vae/qwen_image_2.1_vae_bf16.safetensors"),
    },
    25,
    (
        "This model needs a ComfyUI later than 0.30. For the work on edits and references there, "
        "take ComfyUI's own template and put the node before its KSampler.",
    ),
)

_FLUX_2 = "Comfy-Org/flux2-dev/resolve/main/split_files"

FLUX_2 = Sample(
    "Flux.2 Dev: text to image",
    note(),
    (
        Column(
            "Models and size",
            330,
            {
                "model": unet(f"{_FLUX_2}/diffusion_models/flux2_dev_fp8mixed.safetensors"),
                "clip": clip(
                    f"{_FLUX_2}/text_encoders/mistral_3_small_flux2_bf16.safetensors", "flux2"
                ),
                "vae": vae(
                    "black-forest-labs/FLUX.2-small-decoder/resolve/main/"
                    "full_encoder_small_decoder.safetensors"
                ),
                "size": Node("EmptyFlux2LatentImage", {"width": 1024, "height": 1024}),
            },
        ),
        Column("Token merging", 280, {"patch": patch("model")}),
        Column(
            "Prompt",
            310,
            {
                "prompt": prompt(SCENE),
                "guidance": Node("FluxGuidance", {"guidance": 4}, {"conditioning": ("prompt", 0)}),
                "guider": Node(
                    "BasicGuider", {}, {"model": ("patch", 0), "conditioning": ("guidance", 0)}
                ),
            },
        ),
        Column(
            "Sampling",
            280,
            {
                "noise": Node("RandomNoise", {"noise_seed": SEED}),
                "method": Node("KSamplerSelect", {"sampler_name": "euler"}),
                "steps": Node("Flux2Scheduler", {"steps": 20, "width": 1024, "height": 1024}),
                "sampler": custom_sampler(("size", 0)),
            },
        ),
        Column(
            "Picture",
            280,
            {
                "decode": decode(),
                "save": save("tome_flux_2"),
            },
        ),
    ),
)

_QWEN_EDIT = "Comfy-Org/Qwen-Image-Edit_ComfyUI/resolve/main/split_files"
_QWEN_TEXT = "Comfy-Org/HunyuanVideo_1.5_repackaged/resolve/main/split_files/text_encoders"


def _qwen_prompt(text: str, title: str) -> Node:
    pictures = {"image1": ("scaled", 0), "image2": ("reference", 0)}
    links = {"clip": ("clip", 0), "vae": ("vae", 0), **pictures}
    return Node("TextEncodeQwenImageEditPlus", {"prompt": text}, links, title)


def _qwen_references(conditioning: str) -> Node:
    return Node(
        "FluxKontextMultiReferenceLatentMethod",
        {"reference_latents_method": "index_timestep_zero"},
        {"conditioning": (conditioning, 0)},
    )


QWEN_IMAGE_EDIT = Sample(
    "Qwen-Image-Edit with a reference",
    note(
        "The two pictures that the model looks at make its work about three times as large, so "
        "each step that is forecast saves three times as much.",
    ),
    (
        Column(
            "Models",
            330,
            {
                "full": unet(
                    f"{_QWEN_EDIT}/diffusion_models/qwen_image_edit_2511_fp8mixed.safetensors"
                ),
                "shifted": Node("ModelSamplingAuraFlow", {"shift": 3.1}, {"model": ("full", 0)}),
                "model": Node("CFGNorm", {"strength": 1}, {"model": ("shifted", 0)}),
                "clip": clip(f"{_QWEN_TEXT}/qwen_2.5_vl_7b_fp8_scaled.safetensors", "qwen_image"),
                "vae": vae(
                    "Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/vae/"
                    "qwen_image_vae.safetensors"
                ),
            },
        ),
        Column(
            "Token merging and pictures",
            330,
            {
                "patch": patch("model"),
                "picture": Node("LoadImage", {"image": "example.png"}, title="Image 1: to edit"),
                "reference": Node(
                    "LoadImage", {"image": "example.png"}, title="Image 2: the reference"
                ),
            },
        ),
        Column(
            "Prompt",
            310,
            {
                "scaled": Node("FluxKontextImageScale", {}, {"image": ("picture", 0)}),
                "start": Node("VAEEncode", {}, {"pixels": ("scaled", 0), "vae": ("vae", 0)}),
                "prompt": _qwen_prompt("Paint image 1 in the style of image 2.", "Prompt"),
                "negative": _qwen_prompt("", "Negative prompt"),
            },
        ),
        Column(
            "Sampling",
            290,
            {
                "with": _qwen_references("prompt"),
                "without": _qwen_references("negative"),
                "sampler": Node(
                    "KSampler",
                    {
                        "seed": SEED,
                        "steps": 40,
                        "cfg": 4,
                        "sampler_name": "euler",
                        "scheduler": "simple",
                    },
                    {
                        "model": ("patch", 0),
                        "positive": ("with", 0),
                        "negative": ("without", 0),
                        "latent_image": ("start", 0),
                    },
                ),
            },
        ),
        Column(
            "Picture",
            280,
            {
                "decode": decode(),
                "save": save("tome_qwen_image_edit"),
            },
        ),
    ),
)

_H3 = "Comfy-Org/MiniMax-H3/resolve/main"

MINIMAX_H3 = Sample(
    "MiniMax H3: text to video in 8 steps",
    note(
        "The sound is forecast with the video.",
    ),
    (
        Column(
            "Models",
            330,
            {
                "full": unet(
                    f"{_H3}/diffusion_models/minimax_h3_fl2va_pruned_int8_convrot.safetensors"
                ),
                "model": lora(
                    "lightx2v/Minimax-h3-Turbo/resolve/main/"
                    "minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors",
                    ("full", 0),
                ),
                "clip": clip(
                    f"{_H3}/text_encoders/qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", "minimax"
                ),
                "vae": vae(f"{_H3}/vae/minimax_h3_video_vae_int8_convrot.safetensors", "Load VAE"),
                "sound": vae(f"{_H3}/vae/minimax_h3_audio_vae_fp32.safetensors", "Load VAE: sound"),
            },
        ),
        Column("Token merging", 280, {"patch": patch("model")}),
        Column(
            "Prompt and size",
            330,
            {
                "prompt": Node(
                    "MiniMaxH3ImageToVideo",
                    {"prompt": MOVING, "width": 1344, "height": 768, "length": 124},
                    {"clip": ("clip", 0), "vae": ("vae", 0)},
                ),
                "guider": Node(
                    "BasicGuider", {}, {"model": ("patch", 0), "conditioning": ("prompt", 0)}
                ),
            },
        ),
        Column(
            "Sampling",
            280,
            {
                "noise": Node("RandomNoise", {"noise_seed": SEED}),
                "method": Node("KSamplerSelect", {"sampler_name": "res_multistep"}),
                "steps": Node(
                    "BasicScheduler", {"scheduler": "simple", "steps": 8}, {"model": ("patch", 0)}
                ),
                "sampler": custom_sampler(("prompt", 1)),
            },
        ),
        Column(
            "Video",
            280,
            {
                "decode": decode(),
                "hear": Node(
                    "VAEDecodeAudio", {}, {"samples": ("sampler", 0), "vae": ("sound", 0)}
                ),
                "video": Node(
                    "CreateVideo", {"fps": 24}, {"images": ("decode", 0), "audio": ("hear", 0)}
                ),
                "save": Node(
                    "SaveVideo",
                    {"filename_prefix": "video/tome_minimax_h3"},
                    {"video": ("video", 0)},
                ),
            },
        ),
    ),
)

_LTX_FILE = "ltx-2.3-22b-dev-fp8.safetensors"
_LTX = ("checkpoints", f"Lightricks/LTX-2.3-fp8/resolve/main/{_LTX_FILE}")
_GEMMA = "gemma_3_12B_it_fp4_mixed.safetensors"
_UPSCALER = "ltx-2.3-spatial-upscaler-x2-1.1.safetensors"


def _ltx_pass(name: str, sigmas: str, latent: Link, prompts: str) -> dict[str, Node]:
    """The sampler of one pass, and what it needs, by names that end with the pass's."""
    return {
        f"noise {name}": Node("RandomNoise", {"noise_seed": SEED}),
        f"method {name}": Node("KSamplerSelect", {"sampler_name": "euler"}),
        f"steps {name}": Node("ManualSigmas", {"sigmas": sigmas}),
        f"guider {name}": Node(
            "CFGGuider",
            {"cfg": 1},
            {"model": ("patch", 0), "positive": (prompts, 0), "negative": (prompts, 1)},
        ),
        f"sampler {name}": custom_sampler(latent, f" {name}"),
        f"parts {name}": Node(
            "LTXVSeparateAVLatent",
            {},
            {"av_latent": (f"sampler {name}", 0)},
            "Video and sound apart",
        ),
    }


LTX = Sample(
    "LTX-2.3: text to video in two passes",
    note(
        "It counts for both passes. The second has only three steps, too few to forecast any, so "
        "the first gains.",
    ),
    (
        Column(
            "Models and size",
            340,
            {
                "checkpoint": Node(
                    "CheckpointLoaderSimple", {"ckpt_name": _LTX_FILE}, models=(_LTX,)
                ),
                "model": lora(
                    "Comfy-Org/ltx-2.3/resolve/main/split_files/loras/"
                    "ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors",
                    ("checkpoint", 0),
                    0.5,
                ),
                "clip": Node(
                    "LTXAVTextEncoderLoader",
                    {"text_encoder": _GEMMA, "ckpt_name": _LTX_FILE},
                    models=(
                        (
                            "text_encoders",
                            f"Comfy-Org/ltx-2/resolve/main/split_files/text_encoders/{_GEMMA}",
                        ),
                        _LTX,
                    ),
                ),
                "sound": Node("LTXVAudioVAELoader", {"ckpt_name": _LTX_FILE}, models=(_LTX,)),
                "upscaler": Node(
                    "LatentUpscaleModelLoader",
                    {"model_name": _UPSCALER},
                    models=(
                        (
                            "latent_upscale_models",
                            f"Lightricks/LTX-2.3/resolve/main/{_UPSCALER}",
                        ),
                    ),
                ),
                "size": Node(
                    "EmptyLTXVLatentVideo",
                    {"width": 640, "height": 352, "length": 121},
                    title="Half of the size",
                ),
                "silence": Node(
                    "LTXVEmptyLatentAudio",
                    {"frames_number": 121, "frame_rate": 25},
                    {"audio_vae": ("sound", 0)},
                ),
                "both": Node(
                    "LTXVConcatAVLatent",
                    {},
                    {"video_latent": ("size", 0), "audio_latent": ("silence", 0)},
                    "Video with sound",
                ),
            },
        ),
        Column(
            "Prompt",
            310,
            {
                "prompt": prompt(MOVING),
                "negative": prompt(NEGATIVE, "Negative prompt"),
                "rate": Node(
                    "LTXVConditioning",
                    {"frame_rate": 25},
                    {"positive": ("prompt", 0), "negative": ("negative", 0)},
                ),
            },
        ),
        Column("Token merging", 280, {"patch": patch("model")}),
        Column(
            "First pass",
            300,
            _ltx_pass(
                "first",
                "1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0",
                ("both", 0),
                "rate",
            ),
        ),
        Column(
            "Twice the size",
            300,
            {
                "upscale": Node(
                    "LTXVLatentUpsampler",
                    {},
                    {
                        "samples": ("parts first", 0),
                        "upscale_model": ("upscaler", 0),
                        "vae": ("checkpoint", 2),
                    },
                ),
                "larger": Node(
                    "LTXVConcatAVLatent",
                    {},
                    {"video_latent": ("upscale", 0), "audio_latent": ("parts first", 1)},
                    "Larger video with sound",
                ),
                "prompts": Node(
                    "LTXVCropGuides",
                    {},
                    {
                        "positive": ("rate", 0),
                        "negative": ("rate", 1),
                        "latent": ("parts first", 0),
                    },
                ),
            },
        ),
        Column(
            "Second pass",
            300,
            _ltx_pass("second", "0.85, 0.7250, 0.4219, 0.0", ("larger", 0), "prompts"),
        ),
        Column(
            "Video",
            280,
            {
                "decode": Node(
                    "VAEDecodeTiled",
                    {"tile_size": 768, "overlap": 64, "temporal_size": 4096, "temporal_overlap": 4},
                    {"samples": ("parts second", 0), "vae": ("checkpoint", 2)},
                ),
                "hear": Node(
                    "LTXVAudioVAEDecode",
                    {},
                    {"samples": ("parts second", 1), "audio_vae": ("sound", 0)},
                ),
                "video": Node(
                    "CreateVideo", {"fps": 25}, {"images": ("decode", 0), "audio": ("hear", 0)}
                ),
                "save": Node(
                    "SaveVideo", {"filename_prefix": "video/tome_ltx_2"}, {"video": ("video", 0)}
                ),
            },
        ),
    ),
)

_WAN = "Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files"


def _wan_model(noise: str) -> dict[str, Node]:
    """One of the two models."""
    return {
        f"full {noise}": unet(
            f"{_WAN}/diffusion_models/wan2.2_i2v_{noise}_noise_14B_fp8_scaled.safetensors",
            f"Load Diffusion Model: {noise} noise",
        ),
        noise: Node("ModelSamplingSD3", {"shift": 5}, {"model": (f"full {noise}", 0)}),
    }


def _wan_sampler(noise: str, latent: Link) -> Node:
    is_first = noise == "high"
    return Node(
        "KSamplerAdvanced",
        {
            "add_noise": "enable" if is_first else "disable",
            "noise_seed": SEED if is_first else 0,
            "steps": 20,
            "cfg": 3.5,
            "sampler_name": "euler",
            "scheduler": "simple",
            "start_at_step": 0 if is_first else 10,
            "end_at_step": 10 if is_first else 20,
            "return_with_leftover_noise": "enable" if is_first else "disable",
        },
        {
            "model": (f"patch {noise}", 0),
            "positive": ("video", 0),
            "negative": ("video", 1),
            "latent_image": latent,
        },
        f"KSampler: {noise} noise",
    )


WAN = Sample(
    "Wan 2.2: image to video in 20 steps",
    note(
        "Wan 2.2 has two models, so there are two nodes: give both the same ratio. Each runs ten "
        "steps and forecasts four. With a LoRA for four steps each would run two, too few to "
        "forecast any.",
    ),
    (
        Column(
            "Models",
            340,
            {
                **_wan_model("high"),
                **_wan_model("low"),
                "clip": clip(
                    "Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/text_encoders/"
                    "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
                    "wan",
                ),
                "vae": vae(f"{_WAN}/vae/wan_2.1_vae.safetensors"),
            },
        ),
        Column(
            "Token merging",
            280,
            {
                "patch high": patch("high", "ToMe Patch Model: high noise"),
                "patch low": patch("low", "ToMe Patch Model: low noise"),
            },
        ),
        Column(
            "Prompt and picture",
            330,
            {
                "picture": Node("LoadImage", {"image": "example.png"}),
                "prompt": prompt(MOVING),
                "negative": prompt(NEGATIVE, "Negative prompt"),
                "video": Node(
                    "WanImageToVideo",
                    {"width": 640, "height": 640, "length": 81},
                    {
                        "positive": ("prompt", 0),
                        "negative": ("negative", 0),
                        "vae": ("vae", 0),
                        "start_image": ("picture", 0),
                    },
                ),
            },
        ),
        Column(
            "Sampling",
            280,
            {
                "first": _wan_sampler("high", ("video", 2)),
                "last": _wan_sampler("low", ("first", 0)),
            },
        ),
        Column(
            "Video",
            280,
            {
                "decode": decode("last"),
                "frames": Node("CreateVideo", {"fps": 16}, {"images": ("decode", 0)}),
                "save": Node(
                    "SaveVideo",
                    {"filename_prefix": "video/tome_wan_video"},
                    {"video": ("frames", 0)},
                ),
            },
        ),
    ),
)

SAMPLES: Mapping[str, Sample] = {
    "tome_flux_2": FLUX_2,
    "tome_krea_2": KREA_2,
    "tome_ltx_2": LTX,
    "tome_minimax_h3": MINIMAX_H3,
    "tome_qwen_image_2_1": QWEN_IMAGE_21,
    "tome_qwen_image_edit": QWEN_IMAGE_EDIT,
    "tome_wan_video": WAN,
}
"""By the names of their files."""
