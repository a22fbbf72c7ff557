"""How every evaluation of a model runs, in any host.

First it is decided whether to merge, on which device, at which ratio and with which random picks.
Then the overrides go on, the model runs, the overrides come off, and the observer gets the
evaluation.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from .. import reasons
from ..ops.random_picks import step_key
from ..ranks import ranks_of
from ..settings.config import ToMeConfig
from .compiling import has_no_more_graphs, with_graphs_so_far
from .deep_blocks import Before, DeepBlocks
from .engine import Engine, MakeStrategy, first_line, make_engine
from .evaluation import Evaluation, Observer
from .model import ModelFamily, PatchedModel
from .schedule import ratio_at

log = logging.getLogger("tome_nodes")

Answer = TypeVar("Answer")

_locks: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
"""What a thread holds while it evaluates a model; evaluations may be nested."""

_said: WeakSet[nn.Module] = WeakSet()
"""The models of which it was said that the compiler makes no more graphs."""


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
        self._config = config
        self._make_strategy = make_strategy
        self._engines: dict[tuple[torch.device, torch.dtype, bool], Engine] = {}

    def evaluate(
        self, call: Callable[[], Answer], evaluation: Evaluation, may_free: bool = False
    ) -> Answer:
        """The answer of a model that merges tokens; that of the plain model if merging fails.

        Merging fails if there is too little memory, or if a compiler of the model fails on it. If
        that only makes no more graphs, the answer is that of the graphs so far, or of none. The
        observer gets the evaluation, unless it raised. Threads wait for each other.

        Args:
            call: evaluates the model.
            evaluation: what merging has to know.
            may_free: if there is too little memory, raise the error, as the caller can free some.
        """
        # Each attempt is an evaluation of its own.
        attempt, may_compile = replace(evaluation), self.may_compile
        why: reasons.Reason | None = None
        try:
            self.begin(attempt)
            try:
                answer = call() if may_compile else with_graphs_so_far(call)
                self.note(attempt)
            finally:
                self.end(attempt)
            return answer
        except Exception as error:
            if may_compile and has_no_more_graphs(error):
                self.may_compile = False
            else:
                has_merged = attempt.merges and bool(self.model.overridden_blocks(attempt))
                why = why_stopped(error, self.model.model) if has_merged else None
                if why is None or (may_free and why == reasons.NO_MEMORY):
                    raise
        # Not in the except block, where the traceback keeps the tensors of the evaluation.
        if why is None:
            return self.evaluate(call, evaluation, may_free)
        self.stopped = why
        try:
            answer = self.evaluate(call, evaluation)
        except BaseException:
            self.stopped = None
            raise
        log.warning("[ToMe] %s; the rest of this run goes on without merging", why)
        return answer

    def evaluate_watched(
        self, call: Callable[[], Answer], evaluation: Evaluation, deep: DeepBlocks, may_free: bool
    ) -> tuple[Answer, Tensor | None]:
        """The same, and what came up from the deep blocks; see :attr:`DeepBlocks.came`."""
        before = self.begin_deep(deep, None)
        try:
            return self.evaluate(call, evaluation, may_free), deep.came
        finally:
            self.end_deep(deep, before)

    def evaluate_shallow(
        self, call: Callable[[], Answer], evaluation: Evaluation, deep: DeepBlocks, given: Tensor
    ) -> Answer:
        """The same of a model whose deep blocks do not run.

        ``given`` takes the place of what would come up from them. If there is too little memory,
        the error is raised, as the caller can free what it keeps of features.
        """
        shallow = replace(evaluation, left_out=deep.modules)
        own = partial(self._without, deep, given, call)
        return self.evaluate(own, shallow, may_free=True)

    def _without(self, deep: DeepBlocks, given: Tensor, call: Callable[[], Answer]) -> Answer:
        """The answer of a model whose deep blocks do not run."""
        # After the overrides of an evaluation, so that they are the outer ones.
        before = self.begin_deep(deep, given)
        try:
            return call()
        finally:
            self.end_deep(deep, before)

    def begin_deep(self, deep: DeepBlocks, given: Tensor | None) -> Before:
        """Begin an evaluation with the deep blocks, see :meth:`DeepBlocks.begin`."""
        lock = self._lock
        lock.acquire()
        try:
            return deep.begin(given)
        except BaseException:
            lock.release()
            raise

    def end_deep(self, deep: DeepBlocks, before: Before) -> None:
        """End an evaluation with the deep blocks."""
        try:
            deep.end(before)
        finally:
            self._lock.release()

    @property
    def _lock(self) -> RLock:
        """What a thread holds while it evaluates the model."""
        return _locks.setdefault(self.model.model, RLock())

    def begin(self, evaluation: Evaluation) -> None:
        """Begin an evaluation, which is to be ended whatever happens."""
        lock = self._lock
        lock.acquire()
        try:
            evaluation.reason = self._obstacle(evaluation)
            if evaluation.reason is None:
                self._prepare(evaluation)
                evaluation.merges = True
                self.model.begin(evaluation)
        except BaseException:
            lock.release()
            raise

    def note(self, evaluation: Evaluation) -> None:
        """Tell the observer what an evaluation did."""
        model = self.model
        evaluation.blocks = len(model.blocks)
        if evaluation.merges:
            evaluation.outcomes = model.outcomes(evaluation)
        if evaluation.is_uncompiled and model.model not in _said:
            _said.add(model.model)
            log.warning("[ToMe] %s", reasons.NO_MORE_GRAPHS)
        model.observer.note(evaluation)

    def end(self, evaluation: Evaluation) -> None:
        """End an evaluation."""
        try:
            if evaluation.merges:
                self.model.end(evaluation)
        finally:
            self._lock.release()

    def _obstacle(self, evaluation: Evaluation) -> reasons.Reason | None:
        """Why nothing can merge in an evaluation; None if merging may be tried."""
        obstacle = evaluation.off or self.stopped or evaluation.obstacle
        if obstacle is not None:
            return obstacle
        engine = self.engine = self._engine(evaluation.device, evaluation.dtype)
        if engine.error is not None:
            return reasons.cannot_merge(evaluation.device, engine.error)
        return self.model.too_little(evaluation.latent)

    def _prepare(self, evaluation: Evaluation) -> None:
        """Decide how an evaluation merges."""
        config, engine, model = self._config, self.engine, self.model
        assert engine is not None
        key = step_key(config.seed, evaluation.picks)
        engine.strategy.begin(torch.full((), key, dtype=torch.int64, device=evaluation.device))
        evaluation.engine = engine
        evaluation.ratio = ratio_at(config, evaluation.progress)
        evaluation.deepest = model.deepest(evaluation.latent)
        evaluation.by_stack = not (
            evaluation.may_be_patched or torch.is_grad_enabled() or model.observer.follows_blocks
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
