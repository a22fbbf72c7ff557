"""Blocks of published transformers, one or many: their settings, sizes and inputs."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from models.comfyui import TINY
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """A published model.

    Attributes:
        name: as people call it.
        kind: the name of its class in ``comfy.supported_models``.
        settings: those of one block in the published width.
        width: channels of its tokens.
        linear: multiplications per token in the linear layers of a block, over ``width**2``.
        text: channels of the prompt.
    """

    name: str
    kind: str
    settings: Mapping[str, Any]
    width: int
    linear: float
    text: int = 64

    def attention_share(self, tokens: int) -> float:
        """The share of attention in the multiplications of all blocks, by arithmetic."""
        attention = 2 * tokens * self.width
        return attention / (attention + self.linear * self.width**2)


def _wan(width: int, hidden: int, heads: int) -> Mapping[str, Any]:
    """The settings of one block of Wan; ``hidden`` is the width of its feed-forward network."""
    return {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": width,
        "ffn_dim": hidden,
        "text_dim": 64,
        "num_heads": heads,
        "num_layers": 1,
        "in_dim": 16,
    }


MODELS = (
    Model(
        "Z-Image",
        "ZImage",
        {
            "image_model": "lumina2",
            "patch_size": 2,
            "in_channels": 16,
            "dim": 3840,
            "n_layers": 1,
            "n_refiner_layers": 0,
            "n_heads": 30,
            "n_kv_heads": 30,
            "qk_norm": True,
            "cap_feat_dim": 64,
            "axes_dims": [32, 48, 48],
            "axes_lens": [1536, 512, 512],
            "rope_theta": 256.0,
            "ffn_dim_multiplier": 8 / 3,
            "z_image_modulation": True,
            "time_scale": 1000.0,
            "pad_tokens_multiple": 32,
        },
        3840,
        4 + 3 * 8 / 3,
    ),
    Model(
        "Flux",
        "Flux",
        {
            "image_model": "flux",
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 2,
            "vec_in_dim": 64,
            "context_in_dim": 64,
            "hidden_size": 3072,
            "mlp_ratio": 4.0,
            "num_heads": 24,
            "depth": 0,
            "depth_single_blocks": 1,
            "axes_dim": [16, 56, 56],
            "theta": 10000,
            "qkv_bias": True,
            "guidance_embed": True,
            "txt_ids_dims": [],
        },
        3072,
        12,
    ),
    Model(
        "Qwen-Image",
        "QwenImage",
        {
            "image_model": "qwen_image",
            "in_channels": 64,
            "num_layers": 1,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 64,
        },
        3072,
        12,
    ),
    Model("Wan 14B", "WAN21_T2V", _wan(5120, 13824, 40), 5120, 4 + 2 + 2 * 2.7),
    Model("Wan 1.3B", "WAN21_T2V", _wan(1536, 8960, 12), 1536, 4 + 2 + 2 * 5.83),
)


@dataclass(frozen=True)
class Block:
    """A block of a model at a length.

    Attributes:
        model: its name in :data:`MODELS`.
        size: that of the picture or video, in words.
        latent: channels, frames if it is a video, height and width.
        tiny: name of the tiny model that takes its place, if one does.
    """

    model: str
    size: str
    latent: tuple[int, ...]
    tiny: str | None = None

    @property
    def tokens(self) -> int:
        """The length of the sequence, without text."""
        frames = self.latent[1] if len(self.latent) == 4 else 1
        return frames * (self.latent[-2] // 2) * (self.latent[-1] // 2)

    @property
    def published(self) -> Model:
        """The model, or the tiny one that takes its place."""
        model = next(each for each in MODELS if each.name == self.model)
        if self.tiny is None:
            return model
        tiny = TINY[self.tiny]
        return replace(model, settings=tiny.settings, text=tiny.text)


def deepen(model: ModelPatcher, stack: str, layers: int) -> ModelPatcher:
    """Repeat the last block of a stack until it has as many as ``layers``.

    They share its weights, so that a model of published depth is built at once. An evaluation does
    all the work of the full model; the weights of a block, 83 MB and more, are too large for most
    caches to keep.
    """
    blocks = getattr(model.model.diffusion_model, stack)
    shared = {id(weight): weight for weight in [*blocks[-1].parameters(), *blocks[-1].buffers()]}
    while len(blocks) < layers:
        blocks.append(copy.deepcopy(blocks[-1], dict(shared)))
    # The host would count shared weights once for each block.
    model.size = sum(weight.nbytes for weight in model.model.parameters())
    return model


def inputs(model: Model, shape: tuple[int, ...]) -> tuple[Tensor, Any]:
    """The noise of a latent, and a prompt in the form of the host."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(1, 64, model.text, generator=generator)
    pooled = torch.randn(1, 64, generator=generator)
    prompt = [[text, {"pooled_output": pooled}]]
    return comfy.sample.prepare_noise(torch.zeros(1, *shape), 0), prompt
