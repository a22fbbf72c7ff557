"""Attach token merging to a UNet that is called as a PyTorch module, and take it off again.

This is what the diffusers and latent-diffusion hosts share. A patched UNet is of a class made from
its own, whose calls put the overrides on the transformer blocks and take them off again. Between
calls it has nothing but its settings, so copying, offloading, LoRA and saving work as before.
torch.compile runs what surrounds the UNet's forward outside its graph, so it finds the same code in
each call.
"""

import inspect
import logging
import math
import struct
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from itertools import zip_longest
from threading import local
from typing import Any, ClassVar, SupportsFloat, SupportsIndex

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip

from ..merging.layout import Grid
from ..patching.blocks import Reasons
from ..patching.detail_cache import belongs
from ..patching.engine import MakeStrategy
from ..patching.evaluation import Run
from ..patching.merge_modules import UNetRecord
from ..patching.outcome import Evaluated, Observer
from ..patching.schedule import Moment, is_active, is_noise_alone
from ..report import log_line
from ..report.counts import Counts
from ..settings.config import ToMeConfig
from ..strategies import make_strategy

log = logging.getLogger("tome_nodes")

REASONS = Reasons(
    tokens_changed="other code changes the tokens of the transformer blocks",
    attention_masked="other code masks the attention or changes its tokens",
    attention_replaced="other code replaces the attention of the transformer blocks",
)

_UNKNOWN_CALL = (
    "the UNet was called without a sample and a timestep, as other code has replaced its forward"
)

RECOMPUTED = "gradient checkpointing runs the transformer blocks again outside of the UNet's call"
"""The obstacle if a model computes gradients by running blocks a second time."""

_STATE = "_tome_nodes"
"""The attribute of a patched UNet for its :class:`Attachment`."""


class Host:
    """A library whose UNets are called as modules."""

    record: ClassVar[UNetRecord]
    """How its UNets are built."""

    def find(self, model: object) -> tuple[nn.Module, int | None] | None:
        """The UNet of a model, and its number of noise levels, None if the model does not say.

        None if there is no such UNet.
        """
        raise NotImplementedError

    def obstacle(self, unet: nn.Module, config: ToMeConfig) -> str | None:
        """Why a UNet cannot merge tokens in its current state, None if it can."""
        raise NotImplementedError


class Attachment:
    """The settings of one patched UNet, and its calls.

    A copy of the UNet gets a new attachment with the same settings. Each thread that calls the UNet
    is on a sampling run of its own.
    """

    def __init__(
        self,
        config: ToMeConfig,
        host: Host,
        timesteps: int,
        make_strategy: MakeStrategy = make_strategy,
    ):
        """Prepare the calls.

        Args:
            config: the settings.
            host: that of the UNet.
            timesteps: the number of noise levels that the model was trained on.
            make_strategy: makes the strategy.
        """
        self._settings = (config, host, timesteps, make_strategy)
        self._of_thread = local()
        self._reported: set[Hashable] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._settings

    def attach(self, unet: nn.Module) -> None:
        """Merge tokens in each call of a UNet, in place of any earlier settings.

        Raises:
            TypeError: the UNet has no transformer blocks.
        """
        config, host, *_ = self._settings
        if not any(stack.blocks for stack in host.record.stacks(unet)):
            raise TypeError(
                f"token merging needs a model with transformer blocks, and this "
                f"{type(unet).__name__} has none"
            )
        detach(unet)
        if not config.merges_nothing:
            vars(unet)[_STATE] = self
            kind: Any = type(unet)
            unet.__class__ = _patched(kind)

    @skip
    def call(self, unet: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a UNet, whose call without merging is ``forward``, within an evaluation."""
        calls = self._calls_of(unet)
        if calls.is_running or not calls.begin(args, kwargs):
            return forward(*args, **kwargs)

        result = calls.run.or_unmerged(partial(_evaluate, calls, forward, args, kwargs))
        calls.complete()
        return result

    @torch.compiler.disable
    def _calls_of(self, unet: nn.Module) -> "_Calls":
        """The calls of a UNet in this thread."""
        calls: _Calls | None = getattr(self._of_thread, "calls", None)
        # Shallow copies of a UNet, such as replicas, share its attachment.
        if calls is None or calls.unet is not unet:
            calls = self._of_thread.calls = _Calls(*self._settings, unet, self._reported)
        return calls


@skip
def _evaluate(
    calls: "_Calls", forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with calls:
        return forward(*args, **kwargs)


# Of what surrounds a UNet's forward, torch.compile traces nothing.
skip(Run.or_unmerged)


def detach(unet: nn.Module) -> None:
    """Give a UNet its own class back, if it is patched."""
    kind: Any = type(unet)
    # A class that other code has put on top of ours stays, and finds no attachment.
    if vars(unet).pop(_STATE, None) is not None and kind is _patched(own := kind.__mro__[1]):
        unet.__class__ = own


@lru_cache(maxsize=64)
def _patched(kind: Any) -> Any:
    """A class like ``kind``, whose instances merge tokens while they are called."""

    def calling(name: str) -> Callable[..., Any]:
        own = getattr(kind, name)

        @skip
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            attachment: Attachment | None = vars(self).get(_STATE)
            if attachment is None:
                return own(self, *args, **kwargs)
            return attachment.call(self, partial(own, self), *args, **kwargs)

        return call

    def reduce(self: nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
        _, _, *state = kind.__reduce_ex__(self, protocol)
        return _new, (kind,), *state

    # Whoever asks for the class of a UNet, such as a pipeline that is saved, finds its own names.
    attributes = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    # One that was compiled before calls the second.
    attributes |= {name: calling(name) for name in ("__call__", "_call_impl")}
    return type(kind.__name__, (kind,), attributes | {"__reduce_ex__": reduce})


def _new(kind: Any) -> Any:
    """An empty instance of a patched class, for copies."""
    patched = _patched(kind)
    return patched.__new__(patched)


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
    that failed, and with another sample: at the first timestep, unless that comes from the same
    schedule, as guidance may call the UNet with several samples in each step; and at a smaller one,
    since the run before may have ended early.

    It is a context manager, to be entered for a call that has begun.

    Attributes:
        unet: the one that is called.
        run: its evaluations.
        is_running: whether this is in the middle of a call.
    """

    def __init__(
        self,
        config: ToMeConfig,
        host: Host,
        timesteps: int,
        make_strategy: MakeStrategy,
        unet: nn.Module,
        reported: set[Hashable],
    ):
        self.unet = unet
        self._latest = _Latest()
        self.run = Run(config, host.record, unet, make_strategy, [self._latest])
        self.is_running = False
        self._config = config
        self._host = host
        self._noisiest = timesteps - 1
        self._reported = reported
        self._shape: torch.Size | None = None
        self._timestep = self._first_timestep = math.nan
        # What the first call of the last step got.
        self._first: tuple[Tensor, Tensor | float] | None = None
        self._completed = True
        self._step = 0
        self._call = 0

    @torch.compiler.disable
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Begin a call with these arguments; returns whether they are those of a UNet.

        If not, that is said once.
        """
        sample, timestep = _first_two_arguments(self.unet, args, kwargs)
        is_sample = isinstance(sample, Tensor) and sample.ndim >= 4
        is_timestep = isinstance(timestep, SupportsFloat)
        if not (is_sample and is_timestep):
            self._warn_once(_UNKNOWN_CALL)
            return False
        noise = timestep.max().item() if isinstance(timestep, Tensor) else timestep
        self._follow(noise, sample, timestep)
        self._completed = False
        self._latest.result = None
        self._shape = sample.shape
        moment = self._moment(noise, sample.shape)
        # This may visit every module of the UNet, so only ask if it matters.
        obstacle = self._host.obstacle(self.unet, self._config) if moment.is_active else None
        device, latent = _execution_device(self.unet, sample), Grid(*sample.shape[-2:])
        self._arguments = moment, latent, device, sample.dtype, obstacle
        return True

    @torch.compiler.disable
    def __enter__(self) -> None:
        self._evaluation = self.run.evaluation(*self._arguments)
        self._evaluation.__enter__()
        self.is_running = True

    @torch.compiler.disable
    def __exit__(self, *error: Any) -> bool | None:
        self.is_running = False
        return self._evaluation.__exit__(*error)

    @torch.compiler.disable
    def complete(self) -> None:
        """The call has returned: log what merged, once for each size; or why nothing did, once."""
        self._completed = True
        result = self._latest.result
        if result is None or not result.is_active:
            return
        counts = Counts()
        counts.evaluated(result)
        if not counts.merged_anything:
            model = self.run.model
            reason = log_line.obstacle(counts, model.max_downsample, model.shallowest)
            self._warn_once(reason)
        elif self._is_new(self._shape):
            backend = [] if self.run.engine is None else self.run.engine.in_words()
            log.info("[ToMe] %s", log_line.log_line(counts, self._config, backend))

    def _warn_once(self, reason: str) -> None:
        if self._is_new(reason):
            log.warning("[ToMe] nothing merged: %s", reason)

    def _is_new(self, what: Hashable) -> bool:
        is_new = what not in self._reported
        self._reported.add(what)
        return is_new

    def _follow(self, noise: float, sample: Tensor, timestep: Tensor | float) -> None:
        """Count the steps of a run, and the calls of a step."""
        if self._begins_run(noise, sample, timestep):
            self._step = self._call = 0
            self._first_timestep = noise
            self.run.restart()
        elif noise == self._timestep:
            self._call += 1
        else:
            self._step += 1
            self._call = 0
        if self._call == 0:
            self._first = sample.detach().clone(), timestep
        self._timestep = noise

    def _begins_run(self, noise: float, sample: Tensor, timestep: Tensor | float) -> bool:
        if self._first is None or not (self._completed and noise <= self._timestep):
            return True
        first, its_timestep = self._first
        if noise < self._timestep:
            return not (
                _is_of_one_schedule(timestep, its_timestep)
                or first.shape != sample.shape
                or _goes_on(first, sample.detach().to(first.device))
            )
        return (
            self._step == 0
            and not _may_be_of_one_schedule(timestep, its_timestep)
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
            is_active=is_active(self._config, timestep, self._noise_at),
            from_noise=is_noise_alone(self._first_timestep, self._noisiest),
        )

    def _noise_at(self, percent: float) -> float:
        """The timestep at a share of the sampling from 0 to 1; 0 and 1 leave none out."""
        if percent == 0:
            return math.inf
        return -math.inf if percent == 1 else (1 - percent) * self._noisiest


def _may_be_of_one_schedule(timestep: Tensor | float, other: Tensor | float) -> bool:
    """Whether timesteps may be elements of one tensor."""
    if not (isinstance(timestep, Tensor) and isinstance(other, Tensor)):
        return True
    return timestep.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _is_of_one_schedule(timestep: Tensor | float, other: Tensor | float) -> bool:
    """Whether timesteps are elements of one tensor, which has more of them."""
    return (
        isinstance(timestep, Tensor)
        and isinstance(other, Tensor)
        and _may_be_of_one_schedule(timestep, other)
        and timestep.untyped_storage().nbytes() > timestep.numel() * timestep.element_size()
    )


def _goes_on(before: Tensor, sample: Tensor) -> bool:
    """Whether a sample may be that of the step after another: a sampler does not change it much.

    Both are ``[batch, channels, height, width]``. Channels that say what to paint may be the same
    in each run, so each channel is compared alone.
    """
    before, sample = (each.flatten(2).flatten(0, 1).unsqueeze(2) for each in (before, sample))
    return belongs(before, sample)


def _first_two_arguments(
    unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """The sample and the timestep of a call, by position or name; None if missing.

    Other code may replace ``forward`` by a function whose arguments have other names, or none.
    """
    own = list(inspect.signature(type(unet).forward).parameters)[1:3]
    replaced = list(inspect.signature(unet.forward).parameters)[:2]
    named = [
        next((kwargs[name] for name in names if name in kwargs), None)
        for names in zip_longest(own, replaced)
    ]
    given = [*args[:2], *named[len(args) :], None, None]
    return given[0], given[1]


def _execution_device(unet: nn.Module, sample: Tensor) -> torch.device:
    """Where the blocks will run. Offloaded weights and inputs may be elsewhere before the call."""
    device = getattr(getattr(unet, "_hf_hook", None), "execution_device", None)
    return sample.device if device is None else torch.device(device)
