"""Tiny models of every host, with the few verbs that the contract in ``test_contract.py`` needs."""

import gc
import re
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from common import Shuffle, shuffle
from host import compiled
from ldm.models.diffusion.ddim import DDIMSampler
from ldm.models.diffusion.plms import PLMSSampler
from models import comfyui, ldm, pipelines

import tome_nodes
from tome_nodes.comfyui.attachment import attach, detach
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import CUSTOM, settings_of

MERGES = {"ratio": 0.5, "max_downsample": "auto"}
SKIPS = {"ratio": 0.6, "preset": "fast"}
"""Options by which tokens merge, and by which steps are shallow or forecast."""

STEPS = 8
"""A few of which are skipped."""


def steps_for(options):
    """As many as show what options do; in three, samplers of ldm look beyond their noise levels."""
    return STEPS if options is SKIPS else 4


ROUNDING = 5e-5
"""For float32 in these models, whose weights amplify it."""

_BLOCK = re.compile(r".*\.transformer_blocks\.\d+\.attn2\.to_q\.weight")


MAY_STAY = 2 * 192
"""As many numbers: the cells of a grid, for the next run. A latent is four times its tokens."""


def numbers():
    """How many numbers there are in all tensors but weights."""
    gc.collect()
    return sum(each.numel() for each in gc.get_objects() if type(each) is torch.Tensor)


class Step(NamedTuple):
    """A step of a run of a model that predicts a flow.

    Attributes:
        level: the level of noise.
        latent: the noisy latent.
        used: the denoised latent that the sampler gets.
        answer: that of the model, if nothing guides it; None if the model does not run.
    """

    level: float
    latent: torch.Tensor
    used: torch.Tensor
    answer: torch.Tensor | None


def _innermost(module):
    """Its last layer, whose hooks run even where what is around it is replaced."""
    return [*module.modules()][-1]


class Host:
    """A model of a host, whose verbs each host has in its own way.

    - ``host.patch(**options)`` patches it as its users do, and ``patch(lossless=True, **options)``
      with plans that lose nothing; ``undo()`` removes the patch.
    - ``host(steps, size, after_step)`` is the latent that a sampling run ends with, the same each
      time. ``size`` is its height and width, of hosts that compile. ``after_step`` is called with
      the number of each step and its latent, and may return another latent to go on with.
    - ``compile(backend, is_whole, way)`` compiles the network, into whole graphs or not, in one of
      the ways of :data:`models.pipelines.COMPILED` if it is of diffusers.
    - ``half(dtype)`` is the same model in half precision.
    - ``traced(steps, is_guided)`` is each :class:`Step` of a run, of a model that predicts a flow.

    Attributes:
        network: what a patch changes while it is evaluated.
        is_unet: whether its steps are shallow; those of a transformer are forecast.
        blocks: number of blocks whose tokens merge; those of a UNet are counted by their weights.
        deep: layers that run only in whole evaluations.
        left_out: a part of a UNet that shallow evaluations leave out.
        lacks: what this host cannot do.
    """

    lacks = ()

    def __init__(self, network, deep=None, left_out=None, blocks=None):
        self.network, self.is_unet, self.left_out = network, left_out is not None, left_out
        self.blocks = blocks or len([*filter(_BLOCK.fullmatch, network.state_dict())])
        self.lacks += () if self.is_unet else ("shallow steps",)
        self.deep = deep or [_innermost(left_out) if self.is_unet else network]

    def needs(self, part):
        """Skip the test if the host lacks a part."""
        if part in self.lacks:
            pytest.skip(f"{type(self).__name__} has no {part}")

    def skipped(self, steps, after_step=None):
        """The steps of a run that were forecast or shallow, and the latent that it ends with."""
        skipped, ran = set(), []

        def count(step, latent):
            if not ran:
                skipped.add(step)
            ran.clear()
            return after_step and after_step(step, latent)

        with ExitStack() as hooks:
            for layer in self.deep:
                hooks.enter_context(layer.register_forward_hook(lambda *_: ran.append(None)))
            result = self(steps, after_step=count)
        return skipped, result


class ComfyUI(Host):
    """A clone of a model that tests share."""

    def __init__(self, kind, model):
        self._kind, self._model, self._tiny = kind, model.clone(), comfyui.KINDS[kind]
        network, is_unet = model.model.diffusion_model, kind not in comfyui.TINY
        if is_unet:
            super().__init__(network, left_out=network.middle_block[0])
        else:
            super().__init__(network, blocks=self._tiny.blocks)
        # Sides that cells do not divide.
        self._options = {"size": self._tiny.size(*((12, 16) if is_unet else (7, 9)))}
        if kind == "svd":
            # Its frames.
            self._options["batch"] = 3

    def patch(self, lossless=False, preset=CUSTOM, **options):
        if preset == CUSTOM:
            # As in the other hosts, maps of any size merge.
            options = {"min_tokens": 1, **options}
        config = ToMeConfig(**settings_of(preset, options))
        self._model = attach(self._model, config, *([Shuffle] if lossless else []))

    def undo(self):
        self._model = detach(self._model)

    def __call__(self, steps=2, size=None, after_step=None):
        def callback(step, denoised, latent, total):
            changed = after_step(step, latent)
            if changed is not None:
                latent.copy_(changed)

        given = {"callback": callback if after_step else None, **self._options}
        if size is not None:
            given["size"] = size
        return comfyui.sample(self._model, self._tiny, steps=steps, **given)

    def compile(self, backend, is_whole=True, way="before"):
        self._model = compiled(self._model.clone(), backend=backend, fullgraph=is_whole)

    def half(self, dtype):
        model = comfyui.build_class(self._tiny.name, self._tiny.settings, dtype)
        assert model.model.get_dtype_inference() == dtype
        return ComfyUI(self._kind, model)

    def traced(self, steps, is_guided=True):
        model, answers, traced = self._model.clone(), [None], []

        def run(executor, *args, **kwargs):
            answers.append(executor(*args, **kwargs).clone())
            return answers[-1].clone()

        def guided(executor, x, t, *args, **kwargs):
            answers[:] = [None]
            used = executor(x, t, *args, **kwargs)
            traced.append(Step(float(t.max()), x.clone(), used.clone(), answers[-1]))
            return used

        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "traced", run)
        model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "traced", guided)
        cfg = 4.0 if is_guided else 1.0
        comfyui.sample(model, self._tiny, steps=steps, cfg=cfg, **self._options)
        return traced


class PyTorch(Host):
    """What ``apply_patch`` changes in place: a pipeline of diffusers, or a model of ldm."""

    model = None

    def patch(self, lossless=False, **options):
        if not options.keys() & {"preset", "forecast"}:
            self.needs("merging")
        if lossless:
            shuffle(self.model, **options)
        else:
            assert tome_nodes.apply_patch(self.model, **options) is self.model

    def undo(self):
        assert tome_nodes.remove_patch(self.model) is self.model


_WITHOUT_SCALING = {
    "qwen_image": {"true_cfg_scale": 1.0},
    "lumina2": {"cfg_normalization": False},
}
"""Guidance of these scales the answer to its length without guidance, so it follows no line."""


class Diffusers(PyTorch):
    def __init__(self, kind):
        self._kind = kind
        makers = {**pipelines.TRANSFORMERS, **pipelines.CASES}
        self.case = makers[kind]() if kind in makers else pipelines.sd15(kind)
        self.model, network = self.case.pipeline, self.case.network
        self.case.arguments |= _WITHOUT_SCALING.get(kind, {})
        if self.case.part == "unet":
            # The smallest has no middle.
            super().__init__(network, left_out=network.mid_block or network.down_blocks[-1])
        else:
            both = network, getattr(self.model, "transformer_2", None)
            super().__init__(network, [each for each in both if each is not None])
            self.lacks += ("merging",)

    def __call__(self, steps=2, size=None, after_step=None):
        def callback(pipeline, step, timestep, given):
            changed = after_step(step, given["latents"])
            return {} if changed is None else {"latents": changed}

        options = {} if after_step is None else {"callback_on_step_end": callback}
        if size is not None:
            options |= {"height": 8 * size[0], "width": 8 * size[1]}
        return self.case(steps, **options)

    def compile(self, backend, is_whole=True, way="before"):
        self.case.compile(way, backend, is_whole)

    def half(self, dtype):
        host = Diffusers(self._kind)
        host.network.to(dtype)
        arguments = host.case.arguments
        for name, value in arguments.items():
            if torch.is_tensor(value) and value.is_floating_point():
                arguments[name] = value.to(dtype)
        return host

    def traced(self, steps, is_guided=True):
        flows, traced, scheduler = [None], [], self.model.scheduler
        take = scheduler.step

        def step(flow, timestep, latent, *args, **kwargs):
            level = scheduler.sigmas[len(traced)].item()
            used, answer = latent - level * flow, flows[-1]
            if answer is not None and not is_guided:
                answer = latent - level * answer
            traced.append(Step(level, latent, used, answer))
            flows[:] = [None]
            return take(flow, timestep, latent, *args, **kwargs)

        scheduler.step = step
        with ExitStack() as hooks:
            for network in self.deep:
                hook = network.register_forward_hook(lambda *given: flows.append(given[-1][0]))
                hooks.enter_context(hook)
            self.case(steps, **({} if is_guided else {"guidance_scale": 1.0}))
        del scheduler.step
        return traced


class LatentDiffusion(PyTorch):
    lacks = ("change of a latent between steps", "half precision by itself")

    def __init__(self, family, sampler=DDIMSampler):
        self.model, self._sampler = ldm.make_model(family), sampler
        network = self.model.model.diffusion_model
        super().__init__(network, left_out=network.middle_block)

    def __call__(self, steps=2, after_step=None):
        callback = after_step and (lambda step: after_step(step, None))
        return ldm.run(self.model, self._sampler, steps, callback)


def make(name, models):
    """The model of a name as below; ``models`` are those of ComfyUI that tests share."""
    host, kind = name.split(" ")
    if host == "ComfyUI":
        return ComfyUI(kind, models(kind))
    if host == "diffusers":
        return Diffusers(kind)
    return LatentDiffusion(*{"sd2-PLMS": ("sd2", PLMSSampler)}.get(kind, (kind,)))


both_ways = pytest.mark.parametrize("options", [MERGES, SKIPS], ids=["merging", "skipping"])


def of(names):
    """Run a test for each of these."""
    return pytest.mark.parametrize("host", names, indirect=True)


def param(name, *others):
    """A parameter of a test that is the model of a name, and others."""
    # What is true of the others is the same on every ComfyUI.
    marks = () if name.startswith("ComfyUI ") else (pytest.mark.newest_only,)
    return pytest.param(name, *others, marks=marks)


def _of(host, *kinds):
    return [param(f"{host} {kind}") for kind in kinds]


LDM = _of("ldm", "sd2")

ONE_OF_EACH = [*_of("ComfyUI", "sd15", "flux"), *_of("diffusers", "sd15", "flux"), *LDM]
"""A UNet and a transformer of each host that has them."""

COMPILED_UNETS = [*_of("ComfyUI", "one_level"), *_of("diffusers", "one_block")]
"""UNets that compile quickly."""

SEVERAL = [
    *_of("ComfyUI", "sd15", "sdxl", "svd"),
    *_of("diffusers", "sd15", "sdxl"),
    *_of("ldm", "sd1", "sd2", "x4_upscaler"),
]
"""UNets with all kinds of blocks."""

MERGING = [
    *_of("ComfyUI", *comfyui.KINDS),
    *_of("diffusers", *pipelines.CASES),
    *_of("ldm", "sd1", "sd2", "sd2-PLMS", "x4_upscaler"),
]
"""All whose tokens merge."""

FORECAST = [
    *_of("ComfyUI", "flux", "wan21", "qwen_image", "ltxav", "z_image"),
    *_of("diffusers", *(name for name in pipelines.TRANSFORMERS if name != "cogvideox")),
]
"""Transformers: of ComfyUI, where all are the same to us, some that differ."""

SKIPPING = [
    *FORECAST,
    *_of("ComfyUI", "sd15", "sdxl", "sdxl_refiner"),
    *_of("diffusers", *pipelines.CASES),
    *_of("ldm", "sd1", "sd2-PLMS"),
]
"""All of diffusers, and of the others some, that skip steps."""

in_each = of(ONE_OF_EACH)
