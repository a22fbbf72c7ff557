"""The models of the runs: small ones of ComfyUI's own classes, of diffusers and of ldm."""

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.sample
import comfy.sd
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.nested_tensor import NestedTensor
from torch import Tensor, nn

from benchmarks.speed.models import PREFIX
from tools import tiny_models, transformers
from tools.checkpoints import write_checkpoint
from tools.environment import ROOT

from .draws import Draw, Sampling, Traits
from .merging import Merging
from .neighbours import ANY_MODEL, SKIP_LAYERS, UNETS, VIDEOS, with_lora, with_neighbour
from .traces import state_of_modules, state_of_patcher

# The tiny models of the tests, and how to sample them.
sys.path.append(str(ROOT / "tests" / "hosts"))
import host
import pipelines

AtStep = Callable[[int], None]
"""Called after each step with its number, from 1."""

_LATENT_CHANNELS = 4
_NARROW = 64
_LDM_TEXT = 32

# Blocks of these can be replaced.
_REPLACEABLE = ("flux", "sd3")

# A step of these takes several times longer than one of the others.
_SLOW = {"mochi": 80, "wan21_i2v": 200}


class Model:
    """A model, and how it is run."""

    traits: Traits

    @property
    def module(self) -> nn.Module:
        """What has to be as it was after a run."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What can be put on the model, and could be left there."""
        return state_of_modules(self.module)

    def prepared(self, draw: Draw, merging: Merging | None) -> AbstractContextManager[Any]:
        """The model with what a draw puts on it; without token merging if ``merging`` is None."""
        raise NotImplementedError

    def sample(self, prepared: Any, sampling: Sampling, at_step: AtStep) -> Tensor:
        """A sampling run."""
        raise NotImplementedError

    def layers(self, prepared: Any) -> list[nn.Module]:
        """The modules in which something may go wrong."""
        module = prepared.model if isinstance(prepared, ModelPatcher) else prepared
        return [each for each in module.modules() if isinstance(each, nn.Linear)]


class ComfyModel(Model):
    """A model of ComfyUI, on which nodes are put."""

    def __init__(self, patcher: ModelPatcher, traits: Traits):
        self.patcher = patcher
        self.traits = traits

    @property
    def module(self) -> nn.Module:
        return self.patcher.model

    def state(self) -> dict[str, Any]:
        patcher = state_of_patcher(self.patcher)
        return super().state() | {f"patcher.{name}": value for name, value in patcher.items()}

    @contextmanager
    def prepared(self, draw: Draw, merging: Merging | None) -> Iterator[ModelPatcher]:
        def others(model: ModelPatcher) -> ModelPatcher:
            model = with_lora(model) if draw.lora else model
            return model if draw.neighbour is None else with_neighbour(model, draw.neighbour)

        def ours(model: ModelPatcher) -> ModelPatcher:
            if merging is None:
                return model
            if draw.replaced:
                model = merging.patch(model, {})
            return merging.patch(model, draw.settings)

        model = self.patcher.clone()
        for node in (others, ours) if draw.others_first else (ours, others):
            model = node(model)
        if draw.removed and merging is not None:
            model = merging.remove(model)
        yield model.clone() if draw.cloned else model

    def sample(self, prepared: ModelPatcher, sampling: Sampling, at_step: AtStep) -> Tensor:
        latent = self.latent(sampling)
        positive, negative = self.prompts()
        sampled = comfy.sample.sample(
            prepared,
            comfy.sample.prepare_noise(latent, sampling.seed),
            sampling.steps,
            sampling.cfg,
            sampling.sampler,
            sampling.scheduler,
            positive,
            negative,
            latent,
            denoise=sampling.denoise,
            callback=lambda step, *_: at_step(step + 1),
            disable_pbar=True,
            seed=sampling.seed,
        )
        return sampled.unbind()[0] if sampled.is_nested else sampled

    def latent(self, sampling: Sampling) -> Any:
        """The latent to begin with: noise alone or a picture of one value."""
        raise NotImplementedError

    def prompts(self) -> tuple[Any, Any]:
        """A positive and a negative prompt."""
        raise NotImplementedError


class UNet(ComfyModel):
    """A UNet of ComfyUI."""

    def __init__(self, patcher: ModelPatcher, family: str, **traits: Any):
        super().__init__(patcher, Traits(worth=8, neighbours=(*ANY_MODEL, *UNETS), **traits))
        self._text = host.CONTEXT_CHANNELS[family]

    def latent(self, sampling: Sampling) -> Tensor:
        # So that the levels below the first have tokens to merge, too.
        sides = [2 * side for side in sampling.size]
        picture = 0.0 if sampling.denoise == 1 else 1.0
        return torch.full((sampling.batch, _LATENT_CHANNELS, *sides), picture)

    def prompts(self) -> tuple[Any, Any]:
        return host.conditioning(self._text, 0.5), host.conditioning(self._text, 0.25)


class Transformer(ComfyModel):
    """A transformer of ComfyUI."""

    def __init__(self, kind: str):
        self._tiny = tiny_models.TINY[kind]
        neighbours = [*ANY_MODEL]
        if kind in _REPLACEABLE:
            neighbours += SKIP_LAYERS
        if (self._tiny.frames or 0) > 3:
            neighbours += VIDEOS
        traits = Traits(patches=_SLOW.get(kind, 324), neighbours=tuple(neighbours))
        super().__init__(tiny_models.build(self._tiny), traits)

    def latent(self, sampling: Sampling) -> Any:
        tiny = self._tiny
        frames = () if tiny.frames is None else (tiny.frames,)
        picture = 0.0 if sampling.denoise == 1 else 1.0
        sides = tiny.size(*sampling.size)
        latent = torch.full((sampling.batch, tiny.channels, *frames, *sides), picture)
        if tiny.sound is None:
            return latent
        return NestedTensor([latent, torch.zeros(sampling.batch, *tiny.sound)])

    def prompts(self) -> tuple[Any, Any]:
        first, second = (tiny_models.conditioning(self._tiny, seed) for seed in (5, 6))
        return first, second


class PlainUNet(Model):
    """A UNet that is called as a module and patched in place.

    Attributes:
        unet: the module.
        text: channels of its prompt.
    """

    def __init__(self, unet: nn.Module, text: int):
        self.traits = Traits(weight=2.0, patches=150, worth=8, has_nodes=False)
        self.unet = unet
        self.text = text

    @property
    def module(self) -> nn.Module:
        return self.unet

    def denoise(self, unet: Any, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """One evaluation of the UNet or of a copy."""
        raise NotImplementedError

    @contextmanager
    def prepared(self, draw: Draw, merging: Merging | None) -> Iterator[nn.Module]:
        if merging is None:
            yield self.unet
            return
        merging.apply_patch(self.unet, draw.settings)
        try:
            yield copy.deepcopy(self.unet) if draw.cloned else self.unet
        finally:
            merging.remove_patch(self.unet)

    @torch.no_grad()
    def sample(self, prepared: nn.Module, sampling: Sampling, at_step: AtStep) -> Tensor:
        random = torch.Generator().manual_seed(sampling.seed)
        sides = [2 * side for side in sampling.size]
        x = torch.randn(sampling.batch, _LATENT_CHANNELS, *sides, generator=random)
        text = torch.randn(sampling.batch, 7, self.text, generator=random)
        for step, timestep in enumerate(torch.linspace(999, 100, sampling.steps).long(), 1):
            x = x - 0.1 * self.denoise(prepared, x, timestep, text)
            at_step(step)
        return x


class UNetOfDiffusers(PlainUNet):
    """A UNet of diffusers."""

    def __init__(self) -> None:
        super().__init__(pipelines.make_unet(), pipelines.TEXT_CHANNELS)

    def denoise(self, unet: Any, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        return unet(x, timestep, encoder_hidden_states=text).sample


class UNetOfLdm(PlainUNet):
    """A UNet of latent-diffusion."""

    def __init__(self) -> None:
        from ldm.modules.diffusionmodules.openaimodel import UNetModel

        with torch.random.fork_rng():
            torch.manual_seed(0)
            unet = UNetModel(
                image_size=64,
                in_channels=_LATENT_CHANNELS,
                out_channels=_LATENT_CHANNELS,
                model_channels=32,
                num_res_blocks=1,
                attention_resolutions=[1, 2],
                channel_mult=(1, 2),
                num_heads=4,
                use_spatial_transformer=True,
                context_dim=_LDM_TEXT,
                legacy=False,
            )
            for parameter in unet.parameters():
                if not parameter.any():
                    # Untrained, its output would be zero.
                    parameter.data.normal_(0, 0.1)
        super().__init__(unet.eval(), _LDM_TEXT)

    def denoise(self, unet: Any, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        return unet(x, timestep.repeat(len(x)), context=text)


def _from_file(folder: Path, family: str, **options: Any) -> ModelPatcher:
    """A UNet as ComfyUI's loader makes it."""
    path = write_checkpoint(folder / f"{family}.ckpt", family, unet_only=True, **options)
    return comfy.sd.load_diffusion_model(str(path))


def _narrow(folder: Path, family: str, **options: Any) -> ModelPatcher:
    """A UNet as ComfyUI detects it in a file, but with fewer channels and other weights."""
    path = write_checkpoint(folder / f"{family}.ckpt", family, unet_only=True, **options)
    weights = comfy.utils.state_dict_prefix_replace(
        comfy.utils.load_torch_file(str(path)), {PREFIX: ""}, filter_keys=True
    )
    config = comfy.model_detection.model_config_from_unet(weights, "")
    settings = {**config.unet_config, "model_channels": _NARROW}
    return transformers.build(type(config).__name__, settings)


def all_models() -> dict[str, Model]:
    """Every model of the runs by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unets = {
            "sd15 from a file": UNet(
                _from_file(folder, "sd15", levels=1), "sd15", weight=0.3, patches=36
            ),
            "sd15": UNet(_narrow(folder, "sd15", levels=2), "sd15", weight=4.0, patches=150),
            "sd2": UNet(_narrow(folder, "sd2", levels=1), "sd2", weight=1.0, patches=150),
            "sdxl": UNet(_narrow(folder, "sdxl"), "sdxl", weight=4.0, patches=150),
            "x4_upscaler": UNet(_narrow(folder, "x4_upscaler"), "x4_upscaler", patches=36),
        }
    kinds: Mapping[str, Any] = tiny_models.TINY
    models = {kind: Transformer(kind) for kind in kinds}
    return {**unets, **models, "diffusers": UNetOfDiffusers(), "ldm": UNetOfLdm()}


def release() -> None:
    """Have ComfyUI take patches of weights off its models, and keep none of them loaded."""
    comfy.model_management.unload_all_models()
    comfy.model_management.cleanup_models()
