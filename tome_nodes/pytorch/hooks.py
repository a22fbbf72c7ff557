"""Attach token merging to a UNet that is called as a PyTorch module, and take it off again.

This is what the diffusers and latent-diffusion hosts share. There is a pair of hooks on the UNet:
the one before a call puts the overrides on the transformer blocks, and the one after takes them off
again. Between calls the UNet has nothing but the hooks, so copying, offloading, LoRA and saving
work as before. torch.compile runs the hooks of the compiled module outside its graph, so it finds
the same code in each call.
"""

import inspect
import logging
import math
import struct
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from functools import partial
from threading import local
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..merging.grid import Grid
from ..merging.layout import Layout
from ..patching.blocks import Family, Override
from ..patching.engine import MakeStrategy
from ..patching.evaluation import Run
from ..patching.merge_modules import InputSite, InputStack, Part
from ..patching.out_of_memory import WITHOUT_IT
from ..patching.outcome import Evaluated, Observer
from ..patching.schedule import Moment, NoiseRange, is_noise_alone
from ..patching.turns import turns_of
from ..report import log_line
from ..report.counts import Counts
from ..settings.config import ToMeConfig
from ..strategies import make_strategy

log = logging.getLogger("tome_nodes")

RECOMPUTED = "gradient checkpointing runs the transformer blocks again outside of the UNet's call"
"""The obstacle if a model computes gradients by running blocks a second time."""

# Code of this file is on the stack while a module is being called.
_CALLER = nn.Module._call_impl.__code__.co_filename

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")


class HookedStack(InputStack):
    """A spatial transformer, called with the feature map itself.

    Attributes:
        shape: ``[batch, channels, height, width]`` of the feature map in the current call.
    """

    shape: torch.Size | None = None

    def overrides(self) -> list[Override]:
        forward = self.module.forward

        def transformer_forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.shape = x.shape
            try:
                return forward(x, *args, **kwargs)
            except torch.OutOfMemoryError as error:
                if not self.sites.gives_up(error):
                    raise
            log.warning("[ToMe] %s", WITHOUT_IT)
            return forward(x, *args, **kwargs)

        return [(self.module, transformer_forward), *super().overrides()]


class HookedBlock(InputSite):
    """A transformer block of a :class:`HookedStack`: its tokens are one feature map."""

    tokens_changed = "other code changes the tokens of the transformer blocks"
    attention_masked = "other code masks the attention or changes its tokens"
    attention_replaced = "other code replaces the attention of the transformer blocks"

    stack: HookedStack

    context_name: ClassVar[str]
    """The keyword argument of the attention for the source of keys and values."""

    mask_names: ClassVar[tuple[str, ...]]
    """The keyword arguments of the attention that are masks over its tokens."""

    def parts(self) -> list[Part]:
        block = self.module
        attends_to_itself = not self.attends_to_text()
        parts = [Part(block.attn1, "merge_attn", attends_to_itself)]
        if block.attn2 is not None:
            parts.append(Part(block.attn2, "merge_crossattn"))
        return [*parts, Part(block.ff, "merge_mlp")]

    def attends_to_text(self) -> bool:
        """Whether ``attn1`` of the block is a cross-attention."""
        raise NotImplementedError

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

    def layout(self, x: Tensor, *args: Any, **kwargs: Any) -> Layout | None:
        shape = self.stack.shape
        if shape is None or shape[0] != x.shape[0] or shape[-2] * shape[-1] != x.shape[1]:
            return None
        return Layout.filled_by(Grid(*shape[-2:]))

    def is_masked(self, kwargs: Mapping[str, Any]) -> bool:
        return any(kwargs.get(name) is not None for name in self.mask_names)


class HookedFamily(Family):
    """A family of UNets that are called as modules."""

    def find(self, model: object) -> tuple[nn.Module, int | None] | None:
        """The UNet of a model, and its number of noise levels, None if the model does not say.

        None if there is no such UNet.
        """
        raise NotImplementedError

    def obstacle(self, unet: nn.Module, config: ToMeConfig) -> str | None:
        """Why the UNet cannot merge tokens in its current state, None if it can."""
        raise NotImplementedError


class Attachment:
    """The hooks of one patched UNet.

    A copy of the UNet gets a new attachment with the same settings. Each thread that calls the UNet
    is on a sampling run of its own.
    """

    def __init__(
        self,
        config: ToMeConfig,
        family: HookedFamily,
        timesteps: int,
        make_strategy: MakeStrategy = make_strategy,
    ):
        """Prepare the hooks.

        Args:
            config: the settings.
            family: that of the UNet.
            timesteps: the number of noise levels that the model was trained on.
            make_strategy: makes the strategy.
        """
        self._settings = (config, family, timesteps, make_strategy)
        self._of_thread = local()
        self._told: set[Hashable] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._settings

    def attach(self, unet: nn.Module) -> None:
        """Merge tokens in each call of a UNet, in place of any earlier settings.

        Raises:
            TypeError: the UNet has no transformer blocks.
        """
        config, family, *_ = self._settings
        if not family.has_blocks(unet):
            raise TypeError(
                f"token merging needs a model with transformer blocks, and this "
                f"{type(unet).__name__} has none"
            )
        detach(unet)
        if not config.merges_nothing:
            unet.register_forward_pre_hook(self.before_call, with_kwargs=True)
            unet.register_forward_hook(self.after_call, always_call=True)

    @torch.compiler.disable
    def before_call(self, unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put the overrides on, if this call is going to merge."""
        sample, timestep = _first_two_arguments(unet, args, kwargs)
        if sample is None or timestep is None:
            self.end_call()
            return
        calls = getattr(self._of_thread, "calls", None)
        # Shallow copies of a UNet, such as replicas, share its hooks.
        if calls is None or calls.unet is not unet:
            calls = self._of_thread.calls = _Calls(*self._settings, unet, self._told)
        calls.begin(sample, timestep)

    @torch.compiler.disable
    def after_call(self, unet: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take the overrides off, and log what merged if it is new."""
        self.end_call(completed=output is not None)

    def end_call(self, completed: bool = False) -> None:
        """Take the overrides off."""
        calls = getattr(self._of_thread, "calls", None)
        if calls is not None:
            calls.end(completed)


class _NotCompletedError(Exception):
    """Marks an evaluation as not completed."""


class _Latest(Observer):
    """Keeps what the latest evaluation did."""

    result: Evaluated | None = None

    def evaluated(self, result: Evaluated) -> None:
        self.result = result


class _Calls:
    """The calls of a UNet in one thread, and their place in a sampling run.

    The place follows from the second argument of a call, the timestep. It falls from the number of
    noise levels that the model was trained on, less one, to 0, and ``ratio`` moves to ``ratio_end``
    in step with it. A new run begins at a larger timestep than in the call before, after a call
    that failed, and with another sample at the first timestep, unless that comes from the same
    schedule: guidance may call the UNet with several samples in each step.

    Attributes:
        unet: the one that is called.
    """

    def __init__(
        self,
        config: ToMeConfig,
        family: HookedFamily,
        timesteps: int,
        make_strategy: MakeStrategy,
        unet: nn.Module,
        told: set[Hashable],
    ):
        self._config = config
        self._family = family
        self._noisiest = timesteps - 1
        self.unet = unet
        self._told = told
        self._latest = _Latest()
        self._run = Run(config, family, unet, make_strategy, [self._latest])
        self._run.sites.interrupted = partial(self.end, completed=False)
        self._exits = ExitStack()
        self._shape: torch.Size | None = None
        self._timestep = self._first_timestep = math.nan
        # What the first call of a run got, until the next step.
        self._first: tuple[Tensor, Tensor | float] | None = None
        self._completed = True
        self._step = 0
        self._call = 0

    def begin(self, sample: Tensor, timestep: Tensor | float) -> None:
        """Begin a call."""
        # A call that was interrupted between the UNet's modules has not run its second hook.
        self.end(completed=False)
        noise = timestep.max().item() if isinstance(timestep, Tensor) else timestep
        self._follow(noise, sample, timestep)
        self._completed = False
        self._shape = sample.shape
        moment = self._moment(noise, sample.shape)
        # This may visit every module of the UNet, so only ask if it matters.
        obstacle = self._family.obstacle(self.unet, self._config) if moment.is_active else None
        evaluation = self._run.evaluation(
            moment,
            Grid(*sample.shape[-2:]),
            _execution_device(self.unet, sample),
            sample.dtype,
            obstacle,
            _CALLER,
        )
        self._exits.enter_context(evaluation)

    def end(self, completed: bool) -> None:
        """End a call, and log what it did unless it was not completed."""
        self._latest.result = None
        if completed:
            self._completed = True
            self._exits.close()
            if self._latest.result is not None:
                self._tell(self._latest.result)
        else:
            self._exits.__exit__(_NotCompletedError, _NotCompletedError(), None)

    def _tell(self, result: Evaluated) -> None:
        """Log what merged, once for each size; or why nothing did, once for each reason."""
        if not result.is_active:
            return
        counts = Counts()
        counts.evaluated(result)
        if not counts.merged_anything:
            sites = self._run.sites
            reason = log_line.obstacle(counts, sites.max_downsample, sites.shallowest)
            if self._is_new(reason):
                log.warning("[ToMe] nothing merged: %s", reason)
        elif self._is_new(self._shape):
            backend = [] if self._run.engine is None else self._run.engine.in_words()
            log.info("[ToMe] %s", log_line.log_line(counts, self._config, backend))

    def _is_new(self, what: Hashable) -> bool:
        is_new = what not in self._told
        self._told.add(what)
        return is_new

    def _follow(self, noise: float, sample: Tensor, timestep: Tensor | float) -> None:
        """Count the steps of a run, and the calls of a step."""
        if self._begins_run(noise, sample, timestep):
            self._step = self._call = 0
            self._first_timestep, self._first = noise, (sample.detach().clone(), timestep)
            self._run.restart()
        elif noise == self._timestep:
            self._call += 1
        else:
            self._step += 1
            self._call = 0
            self._first = None
        self._timestep = noise

    def _begins_run(self, noise: float, sample: Tensor, timestep: Tensor | float) -> bool:
        if not (self._completed and noise <= self._timestep):
            return True
        if noise != self._timestep or self._first is None:
            return False
        first, its_timestep = self._first
        return (
            not _is_of_one_schedule(timestep, its_timestep)
            and first.shape == sample.shape
            and not torch.equal(first, sample.to(first.device))
        )

    def _moment(self, timestep: float, shape: torch.Size) -> Moment:
        (bits,) = struct.unpack("<Q", struct.pack("<d", timestep))
        done = self._noisiest - min(max(timestep, 0), self._noisiest)
        return Moment(
            step=self._step,
            progress=done / self._noisiest if self._noisiest > 0 else 0.0,
            picks=bits,
            part=(self._call, shape),
            is_active=timestep in NoiseRange.of(self._config, self._noise_at),
            from_noise=is_noise_alone(self._first_timestep, self._noisiest),
        )

    def _noise_at(self, percent: float) -> float:
        """The timestep at a share of the sampling from 0 to 1; 0 and 1 leave none out."""
        if percent == 0:
            return math.inf
        return -math.inf if percent == 1 else (1 - percent) * self._noisiest


def _is_of_one_schedule(timestep: Tensor | float, other: Tensor | float) -> bool:
    """Whether timesteps may be elements of one tensor."""
    if not (isinstance(timestep, Tensor) and isinstance(other, Tensor)):
        return True
    return timestep.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def detach(unet: nn.Module) -> None:
    """Take off the hooks, and the overrides if a call was interrupted."""
    for name in _HOOKS:
        for key, hook in list(getattr(unet, name).items()):
            attachment = getattr(hook, "__self__", None)
            if isinstance(attachment, Attachment):
                attachment.end_call()
                turns_of(unet).undo_if_left()
                for each in (*_HOOKS, *_HOOK_FLAGS):
                    getattr(unet, each).pop(key, None)


def _first_two_arguments(
    unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """The sample and the timestep of a call, by position or name; None if missing."""
    names = list(inspect.signature(unet.forward).parameters)[:2]
    given = [*args[:2], *(kwargs.get(name) for name in names[len(args) :]), None, None]
    return given[0], given[1]


def _execution_device(unet: nn.Module, sample: Tensor) -> torch.device:
    """Where the blocks will run. Offloaded weights and inputs may be elsewhere before the call."""
    device = getattr(getattr(unet, "_hf_hook", None), "execution_device", None)
    return sample.device if device is None else torch.device(device)
