"""The calls of a UNet that merges tokens and may run shallowly, for diffusers and latent-diffusion.

A call puts the overrides on the transformer blocks, runs the model and takes them off again.
"""

import math
import struct
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, SupportsFloat

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip

from .. import reasons
from ..merging.compiling import with_graphs_so_far
from ..merging.engine import MakeStrategy
from ..merging.evaluation import Evaluation, Observer
from ..merging.model_run import ModelRun, why_stopped
from ..ranks import Ranks
from ..run import log_line
from ..run.counts import Counts
from ..run.record import Merged, make_record
from ..run.span import Span
from ..settings.config import ToMeConfig
from ..strategies.plan import Grid
from .arguments import first_two_arguments
from .log_once import LogOnce
from .patched_calls import PatchedCalls
from .scheduling import Scheduling
from .unet_run import UNetRun
from .unets import Arguments, UNets


class _Latest(Observer):
    """Keeps the latest evaluation."""

    evaluation: Evaluation | None = None

    def note(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation


class _Untraced(ModelRun):
    """Evaluations within a model that torch.compile compiles: it traces nothing around forward."""

    begin = torch.compiler.disable(ModelRun.begin)
    note = torch.compiler.disable(ModelRun.note)
    end = torch.compiler.disable(ModelRun.end)
    begin_deep = torch.compiler.disable(ModelRun.begin_deep)
    end_deep = torch.compiler.disable(ModelRun.end_deep)


for _function in (
    ModelRun.evaluate,
    ModelRun.evaluate_watched,
    ModelRun.evaluate_shallow,
    ModelRun._without,
    with_graphs_so_far,
):
    skip(_function)


class _Call(NamedTuple):
    """A call that has begun.

    Attributes:
        evaluation: what merging has to know of it.
        keys: what its features are kept under; None if it keeps none and has none.
        outside: the arguments of a shallow call, by position and by name; None if it is whole.
    """

    evaluation: Evaluation
    keys: list[Hashable] | None = None
    outside: Arguments | None = None


class MergingCalls(PatchedCalls):
    """Merges tokens in the calls of a UNet in one thread, whose place in a sampling run it follows.

    The place follows from the second argument of a call, the timestep. In a run it falls from one
    less than the number of noise levels of training to 0, and ``ratio`` moves to ``ratio_end``
    with it.
    """

    def __init__(
        self,
        config: ToMeConfig,
        unets: UNets,
        unet: nn.Module,
        make_strategy: MakeStrategy,
        levels: int,
        scheduling: Scheduling,
        once: LogOnce,
    ):
        """Prepare to merge in a UNet that was trained on ``levels`` noise levels.

        ``scheduling`` knows the scheduler of its pipeline, if it has one; ``once`` logs what is
        said of it.
        """
        super().__init__(unet)
        self._config = config
        self._unets = unets
        self._latest = _Latest()
        self._merging = _Untraced(config, unets.family, unet, make_strategy, self._latest)
        self._scheduling = scheduling
        self._once = once
        self._latent = Grid(0, 0)
        self._completed = True
        self._levels = levels
        self._noisiest = levels - 1
        self._span = Span(config, self._noise_at)
        self._timestep = math.inf
        may_be_shallow = config.forecast and config.ratio > 0
        self._deep = unets.deep_blocks(unet) if may_be_shallow else None
        self._run: UNetRun | None = None
        self._ranks = Ranks(unet)

    @skip
    def answer(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call of the UNet returns, which merges tokens or runs shallowly."""
        try:
            call = self._begin(args, kwargs)
            if call is None:
                return forward(*args, **kwargs)
            answer = self._evaluated(forward, args, kwargs, call)
        except BaseException:
            self.end_run()
            raise
        self._complete(answer)
        return answer

    @skip
    def _evaluated(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: _Call,
    ) -> Any:
        merging, deep, evaluation = self._merging, self._deep, call.evaluation
        whole = partial(forward, *args, **kwargs)
        if deep is None or call.keys is None:
            return merging.evaluate(whole, evaluation)
        given = came = answer = None
        try:
            given = self._given(call)
            if given is not None and call.outside is not None:
                own = partial(forward, *call.outside[0], **call.outside[1])
                return merging.evaluate_shallow(own, evaluation, deep, given)
            answer, came = merging.evaluate_watched(whole, evaluation, deep, self._may_free())
            self._keep(call.keys, came)
            return answer
        except Exception as error:
            why = self._stopped(error, given is not None)
            if why is None:
                raise
            given = came = None
        # Not in the except block, where the traceback keeps the tensors of the evaluation.
        return merging.evaluate(whole, evaluation) if answer is None else answer

    def end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None and run.counts.skipped_steps:
            self._report_run(run)

    def warn_of_tracing(self) -> None:
        self._warn(reasons.TRACED)

    def _warn(self, reason: reasons.Reason) -> None:
        """Log why nothing merges, once."""
        self._once.warn(f"nothing merged: {reason}")

    @torch.compiler.disable
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Begin a call; None if its arguments are not understood, which is logged once."""
        sample, timestep = first_two_arguments(self.network, args, kwargs)
        is_sample = isinstance(sample, Tensor) and sample.ndim >= 4
        is_timestep = isinstance(timestep, SupportsFloat)
        if not (is_sample and is_timestep):
            self._warn(reasons.UNKNOWN_CALL)
            return None
        noise = float(timestep.max() if isinstance(timestep, Tensor) else timestep)
        # A new run may have more memory.
        is_new = noise > self._timestep or not self._completed
        if is_new and self._merging.stopped == reasons.NO_MEMORY:
            self._merging.stopped = None
        # So may the compiler have more room.
        self._merging.may_compile |= is_new
        self._timestep = noise
        self._completed = False
        run, off = None, None
        if self._deep is not None:
            others = {
                name: value
                for name, value in kwargs.items()
                if value is not sample and value is not timestep
            }
            run = self._follow(sample, noise, self._unets.conditions(args[2:], others))
            off = run.sampling_run.why_off
        elif not self._span.covers(noise):
            # Where the run of this call began is not known.
            off = self._span.reason(math.inf)
        # The checks may visit every module of the UNet.
        obstacle = self._obstacle() if off is None else None
        device, self._latent = _execution_device(self.network, sample), Grid(*sample.shape[-2:])
        evaluation = Evaluation(
            step=0 if run is None else run.sampling_run.index,
            progress=self._progress(noise),
            picks=_bits(noise),
            latent=self._latent,
            device=device,
            dtype=sample.dtype,
            off=off,
            obstacle=obstacle,
        )
        if run is None:
            return _Call(evaluation)
        keys, outside = run.shallow.keys_of([0], sample.shape, sample.device), None
        if keys is not None and run.shallow.is_shallow:
            outside = self._unets.shallow_arguments(args, kwargs)
            # Others of the evaluation are shallow, so nothing is kept of one that has to be whole.
            keys = None if outside is None else keys
        if keys is None:
            # Before every call, all ranks are asked.
            self._ranks.agree(False)
        return _Call(evaluation, keys, outside)

    def _obstacle(self) -> reasons.Reason | None:
        """Why the UNet cannot merge tokens in its current state, None if it can."""
        # Weights that are offloaded come in when they are called for.
        places = {weight.device for weight in self.network.parameters()}
        if sum(place.type not in ("cpu", "meta") for place in places) > 1:
            return reasons.SEVERAL_DEVICES
        return self._unets.obstacle(self.network, self._config)

    def _follow(self, sample: Tensor, timestep: float, conditions: Hashable) -> UNetRun:
        """The run that a call belongs to, which has begun it."""
        run = self._run
        if run is None or not run.takes(sample, timestep):
            self.end_run()
            run = self._run = UNetRun(self._config, self._span, self._scheduling, self._levels)
            run.shallow.obstacle = self._unets.whole_only(self.network)
            run.strengths = self._unets.strengths(self.network)
        run.begin(sample, timestep, (conditions, run.strengths()))
        return run

    @torch.compiler.disable
    def _given(self, call: _Call) -> Tensor | None:
        """What takes the place of what would come up in a call; None if the deep blocks run."""
        run, given = self._run, None
        assert run is not None
        if call.keys is not None and call.outside is not None:
            given = run.shallow.given(call.keys)
        if self._ranks.agree(given is not None):
            return given
        if given is not None:
            run.shallow.run_whole(reasons.OTHER_RANKS)
        return None

    @torch.compiler.disable
    def _may_free(self) -> bool:
        """Whether features are kept, which can be dropped if memory is short."""
        return self._run is not None and self._run.shallow.keeps_features

    @torch.compiler.disable
    def _keep(self, keys: Sequence[Hashable], came: Tensor | None) -> None:
        """Keep what came up in a whole call that has ended well."""
        assert self._run is not None
        self._run.shallow.keep(keys, came)

    @torch.compiler.disable
    def _stopped(self, error: Exception, is_shallow: bool) -> reasons.Reason | None:
        """Why the rest of this run is whole after an error; None if that would not help."""
        why = why_stopped(error, self.network, is_shallow)
        if why is not None and self._run is not None:
            self._run.stop(why)
        return why

    @torch.compiler.disable
    def _complete(self, answer: Any) -> None:
        """End a call: count what merged in its run, or report the call alone."""
        self._completed = True
        if self._run is not None:
            self._run.note(answer)
        # Kept, it would hold the plans of all blocks.
        evaluation, self._latest.evaluation = self._latest.evaluation, None
        if evaluation is None:
            return
        run = self._run
        if run is not None:
            run.counts.note(evaluation)
        is_unknown = run is None or not run.is_known
        if is_unknown and evaluation.is_active and not evaluation.is_shallow:
            with self._once.guarded():
                self._report(evaluation)
        if run is not None and run.is_last:
            self._report_run(run)
            if run.is_over:
                self._run = None

    def _report(self, evaluation: Evaluation) -> None:
        """Log what merged in a call, once for every size, or why nothing merged, once.

        When its run ends is not known, so what merging gains is counted, not measured.
        """
        counts = Counts()
        counts.note(evaluation)
        # Its numbers may change from step to step, so the line itself does not tell. To count what
        # was saved takes time.
        obstacle = None if counts.merged else counts.most_common_reason
        kind = self._latent, bool(counts.merged), obstacle, *log_line.deviations(counts)
        if not self._once.is_new(kind):
            return
        record = make_record(self._name, self._config, counts, dict, self._merged, None)
        why = record.unmerged
        if why is not None:
            # Steps may still be shallow, so ToMe is not to be left out.
            is_open = self._run is not None and self._run.shallow.obstacle is None
            self._once.warn(f"nothing merged: {why.why if is_open and not why.helps else why}")
        elif record.gain is not None:
            self._once.info(f"{record.line}; {record.gain.words}")

    def _report_run(self, run: UNetRun) -> None:
        """Log what was done in a run, once."""
        self._once.report(run.sampling_run, lambda: run.record(self._name, self._merged))

    @property
    def _name(self) -> str:
        return type(self.network).__name__

    @property
    def _merged(self) -> Merged:
        return Merged(model_run=self._merging, latent=self._latent)

    def _progress(self, timestep: float) -> float:
        """How far the sampling is at a timestep, from 0 to 1."""
        done = self._noisiest - min(max(timestep, 0), self._noisiest)
        return done / self._noisiest if self._noisiest > 0 else 0.0

    def _noise_at(self, percent: float) -> float:
        """The timestep at a share of the sampling from 0 to 1; at 0 and 1, beyond all timesteps."""
        if percent == 0:
            return math.inf
        return -math.inf if percent == 1 else (1 - percent) * self._noisiest


def _bits(timestep: float) -> int:
    """A number that is another one for each timestep."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", timestep))
    return int(bits)


def _execution_device(model: nn.Module, sample: Tensor) -> torch.device:
    """The device on which blocks will run. Until then, offloading may keep weights elsewhere."""
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return sample.device if device is None else torch.device(device)
