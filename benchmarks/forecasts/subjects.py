"""What graphs are run on: tiny models with the exact denoiser, and a small trained one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import comfy.sample
import comfy.samplers
import torch
from comfy.model_patcher import ModelPatcher
from models.comfyui import TINY, Tiny, build, conditioning
from torch import Tensor

from benchmarks.fidelity.judges import SceneJudge
from benchmarks.fidelity.pictures import rms
from benchmarks.fidelity.scene_transformer import FLUX, LATENT_SIDE, PATCH
from benchmarks.forecasts.denoiser import Denoiser, instead_of_network, mean

Prompt = list[list[Any]]
"""A conditioning of the host."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, and what it paints.

    Attributes:
        model: the plain model.
        shape: the shape of its latents.
        picture: makes the latent that a run begins with, if it begins with a picture.
        positive, negative, other: three prompts.
        short: the negative prompt in fewer tokens, so that it cannot share a call with the others.
        hint: what a ControlNet adds.
        lora: a LoRA that changes what it paints; empty if there is none.
        finish: changes the model after all nodes have changed it.
        difference: says how much a latent differs from another one.
    """

    model: ModelPatcher
    shape: tuple[int, ...]
    picture: Callable[[], Tensor]
    positive: Prompt
    negative: Prompt
    other: Prompt
    short: Prompt
    hint: Tensor
    lora: dict[str, Tensor]
    finish: Callable[[ModelPatcher], ModelPatcher]
    difference: Callable[[Tensor, Tensor], float]


FLOW, TRAINED_FLOW = "flow", "trained flow"
"""The names of subjects."""


@cache
def of_name(name: str, is_video: bool = False) -> Subject:
    """A subject by its name; only the exact denoiser has videos."""
    if name == TRAINED_FLOW:
        return trained_flow()
    if is_video:
        # Long enough for context windows.
        return _exact(replace(TINY["wan21"], frames=24), 4, "blocks.0.self_attn.q.weight")
    return _exact(TINY["flux"], 16, "double_blocks.0.img_attn.qkv.weight")


def _exact(tiny: Tiny, side: int, weight: str) -> Subject:
    model = build(tiny)
    frames = () if tiny.frames is None else (tiny.frames,)
    shape = (1, tiny.channels, *frames, *tiny.size(side, side))
    name = f"diffusion_model.{weight.removesuffix('.weight')}"
    rows, columns = model.model.diffusion_model.get_parameter(weight).shape
    denoiser = Denoiser(model, weight)
    return Subject(
        model=model,
        shape=shape,
        picture=lambda: mean(3, shape),
        positive=conditioning(tiny, 5),
        negative=conditioning(tiny, 6),
        other=conditioning(tiny, 7),
        short=conditioning(tiny, 6, tokens=12),
        hint=torch.tensor(1.0),
        # It adds 1 to each weight.
        lora={f"{name}.lora_down.weight": torch.ones(1, columns)}
        | {f"{name}.lora_up.weight": torch.ones(rows, 1)},
        finish=lambda model: instead_of_network(model, denoiser),
        difference=lambda one, other: float((one - other).norm() / other.norm()),
    )


def trained_flow() -> Subject:
    """The trained Flux; differences are of pixels from 0 to 1."""
    judge = SceneJudge(steps=8, pictures=2)
    empty, prompts, _ = judge.batch()
    first, other = prompts.split(1)
    tokens = (LATENT_SIDE // PATCH) ** 2
    hint = torch.randn(1, tokens, FLUX["hidden_size"], generator=torch.Generator().manual_seed(7))
    return Subject(
        model=judge.model,
        shape=(1, *empty.shape[1:]),
        picture=lambda: empty[:1],
        positive=[[first, {}]],
        negative=[[torch.zeros_like(first), {}]],
        other=[[other, {}]],
        short=[[torch.zeros_like(first[:, :-1]), {}]],
        hint=hint,
        lora={},
        finish=lambda model: model,
        difference=lambda one, other: rms(judge.decode(one) - judge.decode(other)),
    )


def emptied(prompt: Prompt) -> Prompt:
    """A prompt that says nothing, so that any picture will do."""
    return [[torch.zeros_like(text), extras] for text, extras in prompt]


def sigmas_of(model: ModelPatcher, sampler: str, scheduler: str, steps: int) -> Tensor:
    """The noise levels that the host's KSampler gives a sampler."""
    cpu = torch.device("cpu")
    sampling = comfy.samplers.KSampler(model, steps, cpu, sampler, scheduler, denoise=1.0)
    return sampling.sigmas
