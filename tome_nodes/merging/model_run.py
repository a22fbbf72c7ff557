"""How every evaluation of a model runs, in any host.

First it is decided whether to merge, on which device, at which ratio and with which random picks.
Then the overrides go on, the model runs, the overrides come off, and the observer gets the result.
"""

import logging
from collections.abc import Callable, Set
from functools import partial
from threading import RLock
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from .. import reasons
from ..ops.random_picks import step_key
from ..ranks import ranks_of
from ..settings.config import ToMeConfig
from ..strategies.plan import Grid
from .compiling import has_no_more_graphs, with_graphs_so_far
from .deep_blocks import Before, DeepBlocks
from .engine import Engine, MakeStrategy, first_line, make_engine
from .evaluation import Evaluation, Observer, Result
from .model import ModelFamily, PatchedModel
from .schedule import MergingStep, ratio_at

log = logging.getLogger("tome_nodes")

Answer = TypeVar("Answer")

_locks: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
"""What a thread holds while it evaluates a model; evaluations may be nested."""

_said: WeakSet[nn.Module] = WeakSet()
"""The models of which it was said that the compiler makes no more graphs."""


class Request(NamedTuple):
    """An evaluation that a host is about to run.

    Attributes:
        step: where it is in its run.
        latent: the grid at level 1: the latent's, or that of the evaluated part.
        device: the device on which the blocks will run.
        dtype: the dtype of their tokens.
        obstacle: why nothing can merge in it, according to the host; else None.
        may_be_patched: whether other code may patch the inside of blocks; False if the host knows
            that none does.
        left_out: the modules of a UNet that do not run in it, as it is shallow.
    """

    step: MergingStep
    latent: Grid
    device: torch.device
    dtype: torch.dtype
    obstacle: reasons.Reason | None = None
    may_be_patched: bool = True
    left_out: Set[nn.Module] = frozenset()


class Begun(NamedTuple):
    """An evaluation that has begun.

    Attributes:
        lock: what this thread holds until it ends.
        step: its step.
        obstacle: why nothing merges in it; None if something may.
        evaluation: its state; None if nothing merges.
        is_shallow: whether the deep blocks are left out.
    """

    lock: RLock
    step: MergingStep
    obstacle: reasons.Reason | None
    evaluation: Evaluation | None
    is_shallow: bool


class BegunDeep(NamedTuple):
    """An evaluation with the deep blocks of a UNet that has begun.

    Attributes:
        lock: what this thread holds until it ends.
        deep: the blocks.
        before: what :meth:`DeepBlocks.end` is to be called with.
    """

    lock: RLock
    deep: DeepBlocks
    before: Before


class ModelRun:
    """The evaluations of one model in a sampling run.

    Attributes:
        model: the model and its blocks.
        engine: what merging runs on; None before the first evaluation that may merge.
        stopped: why nothing merges any more, as a merged evaluation failed and an unmerged one did
            not; else None.
        may_compile: whether the compiler of the model may make graphs; False once it has said that
            it makes no more.
    """

    def __init__(
        self,
        config: ToMeConfig,
        family: ModelFamily,
        model: nn.Module,
        make_strategy: MakeStrategy,
        observer: Observer,
    ):
        self.model = PatchedModel(config, family, model, observer)
        self.engine: Engine | None = None
        self.stopped: reasons.Reason | None = None
        self.may_compile = True
        self._may_merge = False
        self._config = config
        self._make_strategy = make_strategy
        self._engines: dict[tuple[torch.device, torch.dtype, bool], Engine] = {}

    def evaluate(self, call: Callable[[], Answer], request: Request) -> Answer:
        """The answer of a model that merges tokens; that of the plain model if merging fails.

        Merging fails if there is too little memory, or if a compiler of the model fails on it. If
        that only makes no more graphs, the answer is that of the graphs so far, or of none. The
        observer gets the result, unless the evaluation raised. Threads wait for each other.
        ``call`` evaluates the model.
        """
        if not self.may_compile:
            call = partial(with_graphs_so_far, call)
        try:
            return self._evaluated(call, request)
        except Exception as error:
            self.may_compile = not has_no_more_graphs(error)
            may_go_on = self._may_merge and self.may_compile
            why = why_stopped(error, self.model.model) if may_go_on else None
            if why is None and self.may_compile:
                raise
        # Not in the except block, where the traceback keeps the tensors of the evaluation.
        if why is None:
            return self._evaluated(partial(with_graphs_so_far, call), request)
        self.stopped = why
        try:
            answer = self._evaluated(call, request)
        except BaseException:
            self.stopped = None
            raise
        log.warning("[ToMe] %s; the rest of this run goes on without merging", why)
        return answer

    def _evaluated(self, call: Callable[[], Answer], request: Request) -> Answer:
        begun = self.begin(request)
        try:
            answer = call()
            self.note(begun)
        finally:
            self.end(begun)
        return answer

    def evaluate_watched(
        self, call: Callable[[], Answer], request: Request, deep: DeepBlocks
    ) -> tuple[Answer, Tensor | None]:
        """The same, and what came up from the deep blocks; see :attr:`DeepBlocks.came`."""
        begun = self.begin_deep(deep, None)
        try:
            return self.evaluate(call, request), deep.came
        finally:
            self.end_deep(begun)

    def evaluate_shallow(
        self, call: Callable[[], Answer], request: Request, deep: DeepBlocks, given: Tensor
    ) -> Answer:
        """The same of a model whose deep blocks do not run.

        ``given`` takes the place of what would come up from them.
        """
        request = request._replace(left_out=deep.modules)
        return self.evaluate(partial(self._without, deep, given, call), request)

    def _without(self, deep: DeepBlocks, given: Tensor, call: Callable[[], Answer]) -> Answer:
        """The answer of a model whose deep blocks do not run."""
        # After the overrides of an evaluation, so that they are the outer ones.
        begun = self.begin_deep(deep, given)
        try:
            return call()
        finally:
            self.end_deep(begun)

    def begin_deep(self, deep: DeepBlocks, given: Tensor | None) -> BegunDeep:
        """Begin an evaluation with the deep blocks, see :meth:`DeepBlocks.begin`."""
        lock = self._lock
        lock.acquire()
        try:
            return BegunDeep(lock, deep, deep.begin(given))
        except BaseException:
            lock.release()
            raise

    def end_deep(self, begun: BegunDeep) -> None:
        """End an evaluation with the deep blocks."""
        try:
            begun.deep.end(begun.before)
        finally:
            begun.lock.release()

    @property
    def _lock(self) -> RLock:
        """What a thread holds while it evaluates the model."""
        return _locks.setdefault(self.model.model, RLock())

    def begin(self, request: Request) -> Begun:
        """Begin an evaluation, which is to be ended whatever happens."""
        model = self.model
        lock = self._lock
        lock.acquire()
        try:
            obstacle = self._obstacle(request)
            evaluation = None if obstacle is not None else self._evaluation(request)
            self._may_merge = evaluation is not None and bool(model.overridden_blocks(evaluation))
            if evaluation is not None:
                model.begin(evaluation)
        except BaseException:
            lock.release()
            raise
        return Begun(lock, request.step, obstacle, evaluation, bool(request.left_out))

    def note(self, begun: Begun) -> None:
        """Tell the observer what an evaluation did."""
        model, (_, step, obstacle, evaluation, is_shallow) = self.model, begun
        outcomes = [] if evaluation is None else model.outcomes(evaluation)
        if evaluation is not None and evaluation.is_uncompiled and model.model not in _said:
            _said.add(model.model)
            log.warning("[ToMe] %s", reasons.NO_MORE_GRAPHS)
        blocks = len(model.blocks)
        is_active = step.why_off is None
        model.observer.note(Result(step.index, blocks, outcomes, obstacle, is_active, is_shallow))

    def end(self, begun: Begun) -> None:
        """End an evaluation."""
        try:
            if begun.evaluation is not None:
                self.model.end(begun.evaluation)
        finally:
            begun.lock.release()

    def _obstacle(self, request: Request) -> reasons.Reason | None:
        """Why nothing can merge in an evaluation; None if merging may be tried."""
        if request.step.why_off is not None:
            return request.step.why_off
        if self.stopped is not None:
            return self.stopped
        if request.obstacle is not None:
            return request.obstacle
        engine = self.engine = self._engine(request.device, request.dtype)
        if engine.error is not None:
            return reasons.cannot_merge(request.device, engine.error)
        return self.model.too_little(request.latent)

    def _evaluation(self, request: Request) -> Evaluation:
        config, engine, model, step = self._config, self.engine, self.model, request.step
        assert engine is not None
        key = step_key(config.seed, step.picks)
        engine.strategy.begin(torch.full((), key, dtype=torch.int64, device=request.device))
        return Evaluation(
            engine,
            ratio_at(config, step.progress),
            request.latent,
            model.deepest(request.latent),
            request.may_be_patched,
            by_stack=not (
                request.may_be_patched or torch.is_grad_enabled() or model.observer.follows_blocks
            ),
            left_out=request.left_out,
        )

    def _engine(self, device: torch.device, dtype: torch.dtype) -> Engine:
        # Kernels give no gradients.
        place = device, dtype, torch.is_grad_enabled()
        if place not in self._engines:
            engine = make_engine(self._config, self._make_strategy, device, dtype)
            if self._config.proportional_attn:
                engine.ways.prepare(self.model.attentions())
            self._engines[place] = engine
        return self._engines[place]


def why_stopped(
    error: Exception, model: nn.Module, is_shallow: bool = False
) -> reasons.Reason | None:
    """The reason to run as the plain model after an error; None if that would not help.

    If a shallow evaluation failed, the whole one helps, or fails in the same way. A model that
    other ranks call, too, is not called again, as they would not: only a compiler fails on all
    alike.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return None if ranks_of(model) else reasons.NO_MEMORY
    # By name, as importing the compiler takes seconds.
    if any(kind.__module__.startswith("torch._dynamo") for kind in type(error).__mro__):
        # If a backend has failed, its own error.
        return reasons.not_compiled(_in_words(getattr(error, "inner_exception", error)))
    if not is_shallow or ranks_of(model):
        return None
    return reasons.shallow_failed(_in_words(error))


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
