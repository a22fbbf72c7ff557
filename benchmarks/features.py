"""The judge of features: photos with noise through one real transformer block of SD's shape.

The block is ComfyUI's own, as wide as SD 1.5's top level, with random weights. Its queries are
scaled until attention is about as wide as in a trained model. The change that a method makes is
measured at two places: in what self-attention adds to the tokens, and in what the block adds.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.latent_formats
import comfy.model_management
import comfy.ops
import comfy.sample
import torch
import torch.nn.functional as F
from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import TimestepEmbedSequential, UNetModel
from comfy.model_base import BaseModel, ModelType
from comfy.model_patcher import ModelPatcher
from comfy.supported_models_base import BASE
from torch import Tensor, nn

from benchmarks.photos import PHOTOS, photo

CHANNELS, HEADS, CONTEXT_CHANNELS = 320, 8, 768
SIDE = 64
NOISE_LEVELS = (0.0, 0.5, 1.0)
"""Strength of the noise relative to that of the photo."""

KEYS_IN_USE = 0.1
"""Share of the keys over which attention spreads, by the perplexity of its weights."""


class OneBlock(UNetModel):
    """A UNet of one spatial transformer that runs on given features instead of its input."""

    def __init__(self, dtype: torch.dtype, device: Any = None, operations: Any = None):
        nn.Module.__init__(self)
        self.dtype = dtype
        self.transformer = SpatialTransformer(
            CHANNELS,
            HEADS,
            CHANNELS // HEADS,
            context_dim=CONTEXT_CHANNELS,
            use_linear=True,
            dtype=dtype,
            device=device,
            operations=operations,
        )
        self.input_blocks = nn.ModuleList([TimestepEmbedSequential(self.transformer)])
        self.middle_block = None
        self.output_blocks = nn.ModuleList()
        self.features = torch.zeros(())
        self.added: dict[str, Tensor] = {}
        self.seconds = 0.0

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Zeros; the result is in ``added``."""
        options = dict(transformer_options or {})
        options["original_shape"] = list(x.shape)
        options["activations_shape"] = list(self.features.shape)
        options["block"] = ("input", 0)
        start = time.perf_counter()
        self.transformer(self.features, context.expand(len(x), -1, -1), options)
        self.seconds = time.perf_counter() - start
        return torch.zeros_like(x)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record what self-attention and the block add to the tokens that enter the block."""
        (block,) = self.transformer.transformer_blocks
        entered: list[Tensor] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entered[:] = [args[0]]

        def attended(module: nn.Module, args: tuple[Any, ...]) -> None:
            # If the block as a whole runs on merged tokens, so does everything after attention.
            if args[0].shape == entered[0].shape:
                self.added["attention"] = args[0] - entered[0]

        def leave(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self.added["block"] = output - entered[0]

        self.added = {}
        hooks = [
            block.register_forward_pre_hook(enter, with_kwargs=True),
            block.norm2.register_forward_pre_hook(attended),
            block.register_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _Settings(BASE):
    latent_format = comfy.latent_formats.SD15
    unet_extra_config: dict[str, Any] = {}  # noqa: RUF012


class FeatureJudge:
    """Evaluates the block on the photos, plain and patched."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        settings = _Settings({"dtype": torch.float32})
        model = BaseModel(settings, ModelType.EPS, unet_model=OneBlock)
        for parameter in model.diffusion_model.parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 0
            parameter.data = (
                torch.randn(parameter.shape, generator=generator) / math.sqrt(fan_in)
                if fan_in
                else torch.zeros(parameter.shape)
            )
        for module in model.diffusion_model.modules():
            if isinstance(module, nn.LayerNorm | nn.GroupNorm):
                nn.init.ones_(module.weight)
        self.unet: OneBlock = model.diffusion_model
        self.model = ModelPatcher(
            model, comfy.model_management.get_torch_device(), torch.device("cpu")
        )
        self.prompt = torch.randn(1, 77, CONTEXT_CHANNELS, generator=generator)

        def convolution(inputs: int) -> Tensor:
            """Random, but with correlated taps, as in trained filters."""
            filters = torch.randn(CHANNELS, inputs, 1, 1, generator=generator)
            return filters * (1 + torch.randn(CHANNELS, inputs, 3, 3, generator=generator))

        # Stands in for the layers before: two convolutions and their input.
        first, second = convolution(4), convolution(CHANNELS)
        pixels = torch.stack([photo(name, SIDE)[:, :SIDE, :SIDE] for name in PHOTOS])
        latent = torch.cat([pixels, pixels.mean(1, keepdim=True)], 1)
        latent = (latent - latent.mean((2, 3), keepdim=True)) / latent.std()
        noise = torch.randn(latent.shape, generator=generator)
        self.features = {}
        for level in NOISE_LEVELS:
            noisy = (latent + level * noise) / math.sqrt(1 + level**2)
            wide = F.conv2d(noisy, first, padding=1)
            wide = wide / wide.std()
            deep = F.conv2d(F.silu(wide), second, padding=1)
            self.features[level] = wide + deep / deep.std()
        self._calibrate()
        self._expected = {level: self.added(self.model, level) for level in NOISE_LEVELS}

    def added(self, patched: ModelPatcher, level: float) -> dict[str, Tensor]:
        """What each place adds to the tokens at a noise level."""
        self.unet.features = self.features[level]
        latent = torch.zeros(len(self.unet.features), 4, SIDE, SIDE)
        prompt = [[self.prompt, {}]]
        with self.unet.watched():
            comfy.sample.sample(
                *(patched, latent, 1, 1.0, "euler", "normal", prompt, prompt, latent),
                disable_pbar=True,
                seed=0,
            )
        return dict(self.unet.added)

    def seconds(self, patched: ModelPatcher) -> float:
        """Seconds of the block at the middle noise level."""
        self.added(patched, NOISE_LEVELS[1])
        return self.unet.seconds

    def errors(self, patched: ModelPatcher) -> dict[float, dict[str, float]]:
        """Norm of a method's change divided by that of what is added, by level and place."""
        result = {}
        for level, expected in self._expected.items():
            actual = self.added(patched, level)
            result[level] = {
                place: ((actual[place] - expected[place]).norm() / expected[place].norm()).item()
                for place in actual
            }
        return result

    def _calibrate(self) -> None:
        """Scale the queries until attention at the middle noise level has the required width."""
        (block,) = self.unet.transformer.transformer_blocks
        inputs: list[Tensor] = []
        hook = block.attn1.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        self.added(self.model, 0.5)
        hook.remove()
        x = inputs[0][:, ::16]
        every = inputs[0]

        def keys_in_use() -> float:
            shares = []
            for sample, all_tokens in zip(x, every, strict=True):
                q = block.attn1.to_q(sample).unflatten(1, (HEADS, -1)).transpose(0, 1)
                k = block.attn1.to_k(all_tokens).unflatten(1, (HEADS, -1)).transpose(0, 1)
                logs = torch.log_softmax(q @ k.mT / math.sqrt(q.shape[2]), 2)
                entropy = -(logs.exp() * logs).sum(2)
                shares.append(entropy.exp().mean().item() / k.shape[1])
            return sum(shares) / len(shares)

        weight, low, high = block.attn1.to_q.weight.data.clone(), 0.1, 30.0
        for _ in range(12):
            middle = math.sqrt(low * high)
            block.attn1.to_q.weight.data = weight * middle
            low, high = (middle, high) if keys_in_use() > KEYS_IN_USE else (low, middle)
