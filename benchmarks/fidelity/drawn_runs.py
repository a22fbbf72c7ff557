"""Runs that are drawn by chance, and the painting of them, for :mod:`benchmarks.fidelity.drawn`."""

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import comfy.model_sampling
import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.samplers import CFGGuider, KSampler, sampler_object
from comfy_extras.nodes_apg import APG
from comfy_extras.nodes_custom_sampler import Guider_DualCFG
from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete, RescaleCFG
from comfy_extras.nodes_perpneg import Guider_PerpNeg
from torch import Tensor

from benchmarks.fidelity import latents, sticker_unet
from benchmarks.fidelity.meter import Meter
from benchmarks.patches import Patch, execute, node

PICTURES, SIDE = 8, 32

FIRST_OF_KINDS = 4
"""Runs of smaller seeds have plain guidance, and a model that is told to predict noise."""

Guidance = Literal["plain", "PerpNeg", "DualCFG", "APG", "RescaleCFG"]
Prediction = Literal["noise", "v", "v, zsnr"]

_SAMPLERS = (
    *("euler", "dpmpp_2m", "dpmpp_2m_sde", "euler_ancestral") * 2,
    *("dpmpp_3m_sde", "lms", "ddim", "uni_pc", "uni_pc_bh2", "res_multistep", "er_sde", "deis"),
    *("ipndm", "lcm", "ddpm", "res_multistep_ancestral", "gradient_estimation", "sa_solver"),
)
"""Samplers that evaluate a step once. Those that most people use are here twice."""
_TWICE = (
    *("dpmpp_sde", "dpmpp_2s_ancestral", "heun", "dpm_2", "dpm_2_ancestral", "seeds_2", "heunpp2"),
)
"""Samplers that evaluate a step more than once; they take at most 20 steps."""
_PLUS = ("euler_cfg_pp", "dpmpp_2m_cfg_pp", "euler_ancestral_cfg_pp")
"""Samplers whose guidance is at most 2, and of their own kind."""
_SCHEDULERS = (
    *("karras", "normal") * 2,
    *("simple", "sgm_uniform", "exponential", "ddim_uniform", "beta", "kl_optimal"),
    "linear_quadratic",
)
_GUIDANCE: tuple[Guidance, ...] = ("PerpNeg", "DualCFG", "APG", "RescaleCFG")
_PREDICTIONS: tuple[Prediction, ...] = ("v", "v, zsnr", "v, zsnr")


@dataclass(frozen=True)
class Run:
    """What is sampled, apart from the model.

    Attributes:
        start: the index of the first kind of sticker.
        has_negative: whether the negative prompt names other stickers.
        guided: how conditions are put together.
        predicts: what the model is told to predict, and whether noise begins in none of a picture.
    """

    sampler: str
    scheduler: str
    steps: int
    guidance: float
    has_negative: bool
    denoise: float
    start: int
    seed: int
    guided: Guidance = "plain"
    predicts: Prediction = "noise"


def draw(chance: random.Random, seed: int) -> Run:
    """A random run of a seed."""
    sampler = chance.choice((*_SAMPLERS, *_TWICE, *_PLUS))
    steps = chance.choice(
        (8, 9, 10, 12, 14, 15, 16, 18, 20, 20, 21, 22, 24, 25, 26, 28, 30, 35, 40)
    )
    guidance = chance.choice((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0))
    run = partial(
        Run,
        sampler=sampler,
        scheduler=chance.choice(_SCHEDULERS),
        steps=min(steps, 20) if sampler in _TWICE else steps,
        guidance=min(guidance, 2.0) if sampler in _PLUS else guidance,
        has_negative=chance.random() < 0.5,
        denoise=1.0 if chance.random() < 0.65 else chance.choice((0.3, 0.4, 0.5, 0.6, 0.75)),
        start=chance.choice((0, 4, 8)),
        seed=chance.randrange(1000),
    )
    if seed < FIRST_OF_KINDS:
        return run()
    guided = chance.choice(_GUIDANCE) if chance.random() < 0.35 else "plain"
    predicts = chance.choice(_PREDICTIONS) if chance.random() < 0.2 else "noise"
    # At a scale of 1, there is one condition only.
    is_plain = sampler in _PLUS or guidance == 1
    return run(guided="plain" if is_plain else guided, predicts=predicts)


class Painter:
    """Paints with one model."""

    def __init__(self, model: ModelPatcher):
        self.model = model
        self._first = cache(self._painted)

    def paint(
        self, run: Run, attach: Patch = lambda model: model, meter: Meter | None = None
    ) -> Tensor:
        """The latent of a run, by the plain model unless it is attached to."""
        empty = torch.zeros(PICTURES, latents.CHANNELS, SIDE, SIDE)
        begin = empty if run.denoise == 1 else self._first(run.start)
        model = attach(_predicting(run.predicts)(self.model))
        sampled = (model, run.steps, model.load_device, run.sampler, run.scheduler, run.denoise)
        counting = meter.watching(model) if meter else nullcontext()
        with counting, torch.inference_mode():
            latent: Tensor = _guider(run, model).sample(
                *(comfy.sample.prepare_noise(begin, run.seed), begin),
                *(sampler_object(run.sampler), KSampler(*sampled).sigmas),
                disable_pbar=True,
                seed=run.seed,
            )
        return latent

    def _painted(self, start: int) -> Tensor:
        """The latents that a second pass begins with."""
        return self.paint(Run("dpmpp_2m", "karras", 10, 5.0, False, 1.0, start, 77))


def _guider(run: Run, model: ModelPatcher) -> CFGGuider:
    positive = _prompts(run.start)
    empty = torch.zeros_like(positive)
    negative = _prompts(run.start + 5) if run.has_negative else empty
    first, last = [[positive, {}]], [[negative, {}]]
    if run.guided == "PerpNeg":
        guider = Guider_PerpNeg(model)
        guider.set_conds(first, last, [[empty, {}]])
        guider.set_cfg(run.guidance, 1.0)
        return guider
    if run.guided == "DualCFG":
        guider = Guider_DualCFG(model)
        guider.set_conds(first, [[_prompts(run.start + 3), {}]], last)
        guider.set_cfg(run.guidance, run.guidance / 2)
        return guider
    guider = CFGGuider(_GUIDED[run.guided](model) if run.guided in _GUIDED else model)
    guider.set_conds(first, last)
    guider.set_cfg(run.guidance)
    return guider


_GUIDED: Mapping[str, Patch] = {
    "APG": node(APG, eta=0.0, norm_threshold=15.0, momentum=-0.5),
    "RescaleCFG": node(RescaleCFG, multiplier=0.7),
}


def _predicting(what: Prediction) -> Patch:
    """Has a model that predicts noise be told that it predicts something else, and do so."""
    return (lambda model: model) if what == "noise" else partial(_as_v, zsnr="zsnr" in what)


def _as_v(model: ModelPatcher, zsnr: bool) -> ModelPatcher:
    """A model that predicts v, the noise times the share of the picture minus the opposite.

    Where there is more noise than it was trained on, it takes the latent for one of the most noise
    that it was.
    """
    # What a model has while it samples, it keeps until another one does.
    trained = comfy.model_sampling.ModelSamplingDiscrete(model.model.model_config)

    def predict(network: Callable[..., Tensor], latent: Tensor, time: Tensor, *args: Any) -> Tensor:
        # The transformer options are the last but those that are given by name.
        noise = args[-1]["sigmas"].max().double()
        told = noise.clamp(max=trained.sigma_max)
        predicted = network(latent, trained.timestep(told.float()).expand_as(time), *args)
        picture = latent * (1 + told**2).sqrt() - predicted * told
        return ((latent - picture * (1 + noise**2).sqrt()) / noise).to(latent.dtype)

    told = execute(ModelSamplingDiscrete, model, "v_prediction", zsnr)
    told.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "v", predict)
    return told


def _prompts(start: int) -> Tensor:
    kinds, clouds = len(sticker_unet.KINDS), sticker_unet.CLOUDS
    each = range(start, start + PICTURES)
    return torch.stack([sticker_unet.prompt(index % kinds, index % clouds) for index in each])
