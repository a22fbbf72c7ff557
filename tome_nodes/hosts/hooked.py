"""Attach token merging to a UNet that is called as a PyTorch module, and take it off again.

What the diffusers and ldm hosts share. A pair of hooks on the UNet does it: the one before a call
puts the overrides on the transformer blocks, the one after takes them off again. Between calls the
UNet carries nothing but the hooks, so copying, offloading, LoRA and saving go on as before, and
torch.compile, which runs the hooks of the module it is given outside of its graph, finds the same
code in each call.
"""

import inspect
import logging
import math
import struct
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ToMeConfig
from ..grid import Grid
from ..picks import step_key
from ..schedule import NoiseRange, ratio_at
from ..statistics import RunStatistics, settings_in_words
from ..strategies import Strategy, make_strategy
from .blocks import MergedBlock, MergedStack, MergedUNet, deepest_level
from .engine import Engine, make_engine

log = logging.getLogger("tome_nodes")

# Calls at one timestep whose plans are kept for the next step; pipelines that tile make many.
_CALLS_KEPT = 64

RECOMPUTED = "gradient checkpointing runs the transformer blocks again outside of the UNet's call"
"""The obstacle that a model may be to compute gradients by running blocks a second time."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")


class HookedUNet(MergedUNet):
    """The overrides for the transformer blocks of one UNet, as long as it is patched.

    Attributes:
        latent: the grid of the sample in the present call.
    """

    latent: Grid


class HookedStack(MergedStack):
    """A spatial transformer, called with the feature map itself.

    Attributes:
        shape: ``[batch, channels, height, width]`` of the feature map in the present call.
    """

    shape: torch.Size | None = None

    def overrides(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        forward = self.module.forward

        def transformer_forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.shape = x.shape
            return forward(x, *args, **kwargs)

        return [(self.module, transformer_forward), *super().overrides()]


class HookedBlock(MergedBlock):
    """A transformer block of a :class:`HookedStack`."""

    tokens_changed = "other code changes the tokens of the transformer blocks"
    attention_masked = "other code masks the attention or changes its tokens"
    attention_replaced = "other code replaces the attention of the transformer blocks"

    context_name: str
    """The keyword argument of the attention that is the source of keys and values."""

    mask_names: tuple[str, ...]
    """Keyword arguments of the attention that hold a mask over its tokens."""

    def self_attention(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = self.context_name

        def attention(
            x: Tensor, context: Tensor | None = None, value: Tensor | None = None, **kwargs: Any
        ) -> Tensor:
            source = context if value is None else value
            if source is not None and source is not x:
                kwargs[name] = source
            return forward(x, **kwargs)

        return attention

    def grids(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Grid, Grid] | None:
        shape = self.stack.shape
        if shape is None or shape[0] != x.shape[0] or shape[-2] * shape[-1] != x.shape[1]:
            return None
        return Grid.of(shape, x.shape[1]), self.stack.unet.latent

    def is_masked(self, kwargs: dict[str, Any]) -> bool:
        return any(kwargs.get(name) is not None for name in self.mask_names)


class Attachment:
    """The hooks of one patched UNet, and what they keep from call to call.

    A copy of the UNet gets a copy of this that has the settings and finds its own blocks.

    The UNet's call tells where the sampling is: its second argument, the timestep, falls from the
    number of noise levels the model was trained on to 0. That is also how far ``ratio`` is on its
    way to ``ratio_end``. A new run begins where the timestep is larger than in the call before.
    """

    stack_class: type[HookedStack]
    """What the host knows of its spatial transformers."""

    def __init__(
        self,
        config: ToMeConfig,
        timesteps: int,
        make_strategy: Callable[[ToMeConfig], Strategy] = make_strategy,
    ):
        self._settings = (config, timesteps, make_strategy)
        self.config = config
        self._make_strategy = make_strategy
        self._timesteps = timesteps
        self._merged: HookedUNet | None = None
        self._shallowest = 0
        self._overrides = ExitStack()
        self._shape: torch.Size | None = None
        self._timestep = math.nan
        self._step = 0
        self._call = 0
        self._engines: dict[tuple[torch.device, torch.dtype], Engine] = {}
        self._told: set[Hashable] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._settings

    @staticmethod
    def transformers(unet: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """The spatial transformers of a UNet, by name."""
        raise NotImplementedError

    @staticmethod
    def blocks_by_level(unet: nn.Module) -> Mapping[int, int]:
        """Transformer blocks, but for the way up, by how much smaller than the latent they work."""
        raise NotImplementedError

    def obstacle(self, unet: nn.Module) -> str | None:
        """Why tokens cannot be merged in the UNet as it is now, None if they can."""
        raise NotImplementedError

    def attach(self, unet: nn.Module) -> None:
        """Merge tokens in each call of a UNet, in place of any earlier settings.

        Raises:
            TypeError: the UNet has no transformer blocks.
        """
        self._merged = self._blocks_of(unet)
        detach(unet)
        if not self.config.merges_nothing:
            unet.register_forward_pre_hook(self.before_call, with_kwargs=True)
            unet.register_forward_hook(self.after_call, always_call=True)

    @torch.compiler.disable
    def before_call(self, unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put the overrides on, if this call is to merge."""
        # A call that a keyboard interrupt ended has not come to its second hook.
        self.end_call()
        sample, timestep = _first_two_arguments(unet, args, kwargs)
        if sample is None or timestep is None:
            return
        if isinstance(timestep, Tensor):
            timestep = timestep.max().item()
        if self._merged is None:
            self._merged = self._blocks_of(unet)
        self._follow(timestep)
        if timestep not in self._active_range():
            return
        device = _execution_device(unet, sample)
        engine = self._engine(device, sample.dtype)
        reason = self._obstacle(unet, device, engine)
        if reason is not None:
            self._warn(reason)
            return
        self._begin_step(timestep, device, engine)
        self._merged.latent = Grid(*sample.shape[-2:])
        self._shape = sample.shape
        if self.config.reuse_steps == 0:
            self._merged.plans = None
        elif self._call < _CALLS_KEPT:
            self._merged.plans = self._merged.plans_for(self._step, (self._call, sample.shape))
        else:
            self._merged.plans = {}
        self._overrides.enter_context(self._merged.installed())

    @torch.compiler.disable
    def after_call(self, unet: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take the overrides off, and tell what the first call of a kind merged."""
        if self._shape is not None and output is not None:
            statistics = RunStatistics()
            self._merged.note(statistics, self._step)
            self._tell(statistics)
        self.end_call()

    def end_call(self) -> None:
        """Take the overrides off."""
        self._overrides.close()
        self._shape = None

    def _blocks_of(self, unet: nn.Module) -> HookedUNet:
        levels = self.blocks_by_level(unet)
        if not levels:
            raise TypeError(
                f"token merging needs a model with transformer blocks, and this "
                f"{type(unet).__name__} has none"
            )
        self._shallowest = min(levels)
        deepest = deepest_level(self.config, levels)
        return HookedUNet(self.config, deepest, self.stack_class, self.transformers(unet))

    def _follow(self, timestep: float) -> None:
        """Count the steps of a run, and the calls of a step."""
        if timestep == self._timestep:
            self._call += 1
        elif timestep < self._timestep:
            self._step += 1
            self._call = 0
        else:
            self._step = self._call = 0
            self._merged.forget_plans()
        self._timestep = timestep

    def _active_range(self) -> NoiseRange:
        """The timesteps between ``start_percent`` and ``end_percent``; 0 and 1 leave none out."""
        start, end = self.config.start_percent, self.config.end_percent
        noisiest = self._timesteps - 1
        return NoiseRange(
            math.inf if start == 0 else (1 - start) * noisiest,
            -math.inf if end == 1 else (1 - end) * noisiest,
        )

    def _engine(self, device: torch.device, dtype: torch.dtype) -> Engine:
        key = device, dtype
        if key not in self._engines:
            self._engines[key] = make_engine(self.config, self._make_strategy, device, dtype)
        return self._engines[key]

    def _obstacle(self, unet: nn.Module, device: torch.device, engine: Engine) -> str | None:
        """Why tokens cannot be merged in this call."""
        if (obstacle := self.obstacle(unet)) is not None:
            return obstacle
        return None if engine.lacks is None else f"the device {device} cannot do it: {engine.lacks}"

    def _begin_step(self, timestep: float, device: torch.device, engine: Engine) -> None:
        (bits,) = struct.unpack("<Q", struct.pack("<d", timestep))
        key = torch.full((), step_key(self.config.seed, bits), dtype=torch.int64, device=device)
        noisiest = self._timesteps - 1
        progress = noisiest - min(max(timestep, 0), noisiest)
        ratio = ratio_at(self.config, progress, self._timesteps)
        self._merged.start_step(engine, key, ratio)

    def _tell(self, statistics: RunStatistics) -> None:
        """Tell what a call merged, once for each size; or why it did not, once for each reason."""
        if statistics.merged_anything:
            if self._shape not in self._told:
                self._told.add(self._shape)
                words = [statistics.merged_blocks(), *settings_in_words(self.config)]
                words += self._merged.engine.in_words()
                words += statistics.deviations()
                log.info("[ToMe] %s", ", ".join(words))
        else:
            self._warn(statistics.obstacle(self._merged.max_downsample, self._shallowest))

    def _warn(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.warning("[ToMe] nothing merged: %s", reason)


def detach(unet: nn.Module) -> None:
    """Take off the hooks, and the overrides where a call was interrupted."""
    for name in _HOOKS:
        for key, hook in list(getattr(unet, name).items()):
            attachment = getattr(hook, "__self__", None)
            if isinstance(attachment, Attachment):
                attachment.end_call()
                for each in (*_HOOKS, *_HOOK_FLAGS):
                    getattr(unet, each).pop(key, None)


def _first_two_arguments(
    unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """The sample and the timestep of a call, by place or by name; None where there is none."""
    names = list(inspect.signature(unet.forward).parameters)[:2]
    first, second = [*args[:2], *(kwargs.get(name) for name in names[len(args) :])]
    return first, second


def _execution_device(unet: nn.Module, sample: Tensor) -> torch.device:
    """Where the blocks will run: offloaded weights and inputs may be elsewhere before the call."""
    device = getattr(getattr(unet, "_hf_hook", None), "execution_device", None)
    return sample.device if device is None else torch.device(device)
