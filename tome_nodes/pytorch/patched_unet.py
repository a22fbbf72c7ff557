"""The calls of a UNet and their place in a sampling run, for diffusers and latent-diffusion.

A call puts the overrides on the transformer blocks, runs the model and takes them off again.
"""

import inspect
import math
import struct
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar, SupportsFloat

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip

from .. import reasons
from ..merging.plan import Grid
from ..patching.blocks import Evaluated, Observer
from ..patching.compiling import with_graphs_so_far
from ..patching.evaluation import Run
from ..patching.merge_modules import UNetRecord
from ..patching.prospects import prospects_of
from ..patching.schedule import Moment, is_active
from ..report import log_line
from ..report.counts import Counts
from ..report.gain import gain_of
from ..settings.config import ToMeConfig
from .patched_model import Attachment, Calls, Host

TIMESTEPS = 1000
"""The number of noise levels to assume for a UNet that does not say how many it was trained on."""


class UNetHost(Host):
    """A library whose UNets are called as modules.

    The context of a UNet is the number of noise levels that it was trained on.
    """

    record: ClassVar[UNetRecord]
    """How its UNets are built."""

    def check(self, model: nn.Module, config: ToMeConfig, context: int) -> None:
        if not any(stack.blocks for stack in self.record.stacks(model)):
            raise TypeError(
                "token merging needs a model with transformer blocks, and this "
                f"{type(model).__name__} has none"
            )

    def calls(self, attachment: Attachment, model: nn.Module) -> "UNetCalls":
        return UNetCalls(attachment, self, model)

    def obstacle(self, model: nn.Module, config: ToMeConfig) -> str | None:
        """Why a UNet cannot merge tokens in its current state, None if it can."""
        raise NotImplementedError


class _Latest(Observer):
    """Keeps what the latest evaluation did, as ``result``."""

    result: Evaluated | None = None

    def evaluated(self, result: Evaluated) -> None:
        self.result = result


# torch.compile is to trace nothing around the model's forward.
skip(Run.or_unmerged)
skip(with_graphs_so_far)


class UNetCalls(Calls):
    """The calls of a UNet in one thread, and their place in a sampling run.

    The place follows from the second argument of a call, the timestep. In a run it falls from one
    less than the number of noise levels of training to 0, and ``ratio`` moves to ``ratio_end``
    with it.

    It is a context manager, within which the model runs.
    """

    def __init__(self, attachment: Attachment, host: UNetHost, unet: nn.Module):
        super().__init__(unet)
        self._config = attachment.config
        self._latest = _Latest()
        self._run = Run(self._config, host.record, unet, attachment.make_strategy, self._latest)
        self._host = host
        self._once = attachment.once
        self._arguments: tuple[Any, ...] = ()
        self._completed = True
        self._noisiest = attachment.context - 1
        self._timestep = math.inf

    @skip
    def call(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # Of torch.compile, nothing is traced here.
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
        if is_traced or torch.compiler.is_compiling():
            self._once.warn(f"nothing merged: {reasons.TRACED}")
            return forward(*args, **kwargs)
        if not self._begin(args, kwargs):
            return forward(*args, **kwargs)
        result = self._run.or_unmerged(partial(_evaluate, self, forward, args, kwargs))
        self._complete()
        return result

    @torch.compiler.disable
    def __enter__(self) -> None:
        self._evaluation = self._run.evaluation(*self._arguments)
        self._evaluation.__enter__()

    @torch.compiler.disable
    def __exit__(self, *error: Any) -> bool | None:
        return self._evaluation.__exit__(*error)

    @torch.compiler.disable
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Begin a call; return whether its arguments are understood. If not, log that once."""
        sample, timestep = _first_two_arguments(self.network, args, kwargs)
        is_sample = isinstance(sample, Tensor) and sample.ndim >= 4
        is_timestep = isinstance(timestep, SupportsFloat)
        if not (is_sample and is_timestep):
            self._once.warn(f"nothing merged: {reasons.UNKNOWN_CALL}")
            return False
        noise = timestep.max().item() if isinstance(timestep, Tensor) else timestep
        # A new run may have more memory.
        is_new = noise > self._timestep or not self._completed
        if is_new and self._run.stopped == reasons.NO_MEMORY:
            self._run.stopped = None
        # So may the compiler have more room.
        self._run.may_compile |= is_new
        self._timestep = noise
        self._completed = False
        moment = self._moment(noise)
        # The check may visit every module of the UNet.
        obstacle = self._host.obstacle(self.network, self._config) if moment.is_active else None
        device, latent = _execution_device(self.network, sample), Grid(*sample.shape[-2:])
        self._arguments = moment, latent, device, sample.dtype, obstacle
        return True

    @torch.compiler.disable
    def _complete(self) -> None:
        """End a call: log what merged, once for every size, or why nothing merged, once.

        When a run ends is not known, so what merging gains is counted, not measured.
        """
        self._completed = True
        # Kept, it would hold the plans of all blocks.
        result, self._latest.result = self._latest.result, None
        if result is None or not result.is_active:
            return
        counts = Counts()
        counts.evaluated(result)
        model, latent = self._run.model, self._arguments[1]
        if not counts.merged:
            why = log_line.obstacle(counts, model.max_downsample, model.shallowest)
            if why.endswith(reasons.WORTH_IT):
                why += f"; {prospects_of(model, latent).advice}"
            self._once.warn(f"nothing merged: {why}")
            return
        # Its numbers may change from step to step, so the line itself does not tell.
        kind = latent, *log_line.deviations(counts)
        if self._run.engine is not None and self._once.is_new(kind):
            line = log_line.log_line(counts, self._config, self._run.engine.in_words())
            gain = gain_of(counts, self._config, {}, model.saved(latent), model.shallowest)
            self._once.info(f"{line}; {gain.words}")

    def _moment(self, timestep: float) -> Moment:
        (bits,) = struct.unpack("<Q", struct.pack("<d", timestep))
        done = self._noisiest - min(max(timestep, 0), self._noisiest)
        return Moment(
            # Each call is reported alone.
            step=0,
            progress=done / self._noisiest if self._noisiest > 0 else 0.0,
            picks=bits,
            is_active=is_active(self._config, timestep, self._noise_at),
        )

    def _noise_at(self, percent: float) -> float:
        """The timestep at a share of the sampling from 0 to 1; at 0 and 1, beyond all timesteps."""
        if percent == 0:
            return math.inf
        return -math.inf if percent == 1 else (1 - percent) * self._noisiest


@skip
def _evaluate(
    calls: UNetCalls, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with calls:
        return forward(*args, **kwargs)


def _execution_device(model: nn.Module, sample: Tensor) -> torch.device:
    """The device on which blocks will run. Until then, offloading may keep weights elsewhere."""
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return sample.device if device is None else torch.device(device)


def _first_two_arguments(
    unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """The sample and the timestep of a call, passed by position or by name; None if missing.

    Other code may have replaced ``forward`` by a function with other argument names, or with none.
    """
    own = list(inspect.signature(type(unet).forward).parameters)[1:3]
    replaced = list(inspect.signature(unet.forward).parameters)[:2]
    named = [
        next((kwargs[name] for name in names if name in kwargs), None)
        for names in zip_longest(own, replaced)
    ]
    given = [*args[:2], *named[len(args) :], None, None]
    return given[0], given[1]
