"""The part of a UNet's calls that merges tokens, for diffusers and latent-diffusion.

A call puts the overrides on the transformer blocks, runs the model and takes them off again.
"""

import math
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip

from .. import reasons
from ..patching.compiling import with_graphs_so_far
from ..patching.engine import MakeStrategy
from ..patching.evaluation import Observer, Result
from ..patching.model_run import ModelRun, Request
from ..patching.schedule import MergingStep, is_active
from ..patching.unet import UNetRecord
from ..report import log_line
from ..report.counts import Counts
from ..report.run_record import RunRecord, merging_record
from ..settings.config import ToMeConfig
from ..strategies.plan import Grid
from .log_once import LogOnce
from .model_call import first_two_arguments


class _Latest(Observer):
    """Keeps what the latest evaluation did, as ``result``."""

    result: Result | None = None

    def note(self, result: Result) -> None:
        self.result = result


class _Untraced(ModelRun):
    """Evaluations within a model that torch.compile compiles: it traces nothing around forward."""

    begin = torch.compiler.disable(ModelRun.begin)
    note = torch.compiler.disable(ModelRun.note)
    end = torch.compiler.disable(ModelRun.end)


for _function in (ModelRun.evaluate, ModelRun._evaluated, with_graphs_so_far):
    skip(_function)


class MergingCalls:
    """Merges tokens in the calls of a UNet in one thread, whose place in a sampling run it follows.

    The place follows from the second argument of a call, the timestep. In a run it falls from one
    less than the number of noise levels of training to 0, and ``ratio`` moves to ``ratio_end``
    with it.
    """

    def __init__(
        self,
        config: ToMeConfig,
        record: UNetRecord,
        unet: nn.Module,
        make_strategy: MakeStrategy,
        levels: int,
        find_obstacle: Callable[[nn.Module, ToMeConfig], str | None],
        once: LogOnce,
    ):
        """Prepare to merge in a UNet that was trained on ``levels`` noise levels.

        ``find_obstacle`` returns why it cannot merge tokens in its current state, None if it can;
        ``once`` logs what is said of it.
        """
        self._config = config
        self._unet = unet
        self._latest = _Latest()
        self._run = _Untraced(config, record, unet, make_strategy, self._latest)
        self._find_obstacle = find_obstacle
        self._once = once
        self._latent = Grid(0, 0)
        self._completed = True
        self._noisiest = levels - 1
        self._timestep = math.inf

    @skip
    def call(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        step: int,
        counts: Counts | None,
    ) -> Any:
        """What a call of the UNet returns, which merges tokens; ``forward`` calls the UNet itself.

        ``step`` is the step that it belongs to, and ``counts`` counts what merges in its run; None
        if that is not known, and each call is reported alone.
        """
        request = self._begin(args, kwargs, step)
        if request is None:
            return forward(*args, **kwargs)
        answer = self._run.evaluate(partial(forward, *args, **kwargs), request)
        self._complete(counts)
        return answer

    def warn(self, reason: str) -> None:
        """Log why nothing merges, once."""
        self._once.warn(f"nothing merged: {reason}")

    @torch.compiler.disable
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> Request | None:
        """Begin a call; None if its arguments are not understood, which is logged once."""
        sample, timestep = first_two_arguments(self._unet, args, kwargs)
        is_sample = isinstance(sample, Tensor) and sample.ndim >= 4
        is_timestep = isinstance(timestep, SupportsFloat)
        if not (is_sample and is_timestep):
            self.warn(reasons.UNKNOWN_CALL)
            return None
        noise = timestep.max().item() if isinstance(timestep, Tensor) else timestep
        # A new run may have more memory.
        is_new = noise > self._timestep or not self._completed
        if is_new and self._run.stopped == reasons.NO_MEMORY:
            self._run.stopped = None
        # So may the compiler have more room.
        self._run.may_compile |= is_new
        self._timestep = noise
        self._completed = False
        at = self._step(noise, step)
        # The check may visit every module of the UNet.
        obstacle = self._find_obstacle(self._unet, self._config) if at.is_active else None
        device, self._latent = _execution_device(self._unet, sample), Grid(*sample.shape[-2:])
        return Request(at, self._latent, device, sample.dtype, obstacle)

    @torch.compiler.disable
    def _complete(self, counts: Counts | None) -> None:
        """End a call: count what merged in its run, or report the call alone."""
        self._completed = True
        # Kept, it would hold the plans of all blocks.
        result, self._latest.result = self._latest.result, None
        if result is None:
            return
        if counts is not None:
            counts.note(result)
        elif result.is_active:
            self._report(result)

    def _report(self, result: Result) -> None:
        """Log what merged in a call, once for every size, or why nothing merged, once.

        When its run ends is not known, so what merging gains is counted, not measured.
        """
        counts = Counts()
        counts.note(result)
        # Its numbers may change from step to step, so the line itself does not tell. To count what
        # was saved, or would be, takes time.
        obstacle = None if counts.merged else counts.most_common_reason
        kind = self._latent, bool(counts.merged), obstacle, *log_line.deviations(counts)
        if not self._once.is_new(kind):
            return
        record = self.finish(counts, {})
        if record.nothing is not None:
            self._once.warn(record.nothing)
        elif record.gain is not None:
            self._once.info(f"{record.line}; {record.gain.words}")

    def finish(self, counts: Counts, begun: Mapping[int, float]) -> RunRecord:
        """The record of a run: what was counted, and when each step began, in seconds."""
        name = type(self._unet).__name__
        return merging_record(name, self._run, counts, self._latent, lambda: begun)

    def _step(self, timestep: float, step: int) -> MergingStep:
        (bits,) = struct.unpack("<Q", struct.pack("<d", timestep))
        done = self._noisiest - min(max(timestep, 0), self._noisiest)
        return MergingStep(
            index=step,
            progress=done / self._noisiest if self._noisiest > 0 else 0.0,
            picks=bits,
            is_active=is_active(self._config, timestep, self._noise_at),
        )

    def _noise_at(self, percent: float) -> float:
        """The timestep at a share of the sampling from 0 to 1; at 0 and 1, beyond all timesteps."""
        if percent == 0:
            return math.inf
        return -math.inf if percent == 1 else (1 - percent) * self._noisiest


def _execution_device(model: nn.Module, sample: Tensor) -> torch.device:
    """The device on which blocks will run. Until then, offloading may keep weights elsewhere."""
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return sample.device if device is None else torch.device(device)
