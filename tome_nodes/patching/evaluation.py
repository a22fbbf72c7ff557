"""How every evaluation of a model runs, in any host.

First it is decided whether to merge, on which device, at which ratio and with which random picks.
Then the overrides go on, the model runs, the overrides come off, and the observer gets the result.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from .. import reasons
from ..merging.plan import Grid
from ..ops.random_picks import step_key
from ..settings.config import ToMeConfig
from .blocks import Evaluated, Evaluation, ModelRecord, Observer, Outcome, PatchedModel
from .compiling import has_no_more_graphs, with_graphs_so_far
from .engine import Engine, MakeStrategy, first_line, make_engine
from .schedule import Moment, ratio_at

log = logging.getLogger("tome_nodes")

Result = TypeVar("Result")

LEAST_SAVED = 0.05
"""Where a preset saves a smaller share of an evaluation's work, nothing merges: it would cost about
as much time as it saves."""

_locks: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
"""What a thread holds while it evaluates a model; evaluations may be nested."""

_said: WeakSet[nn.Module] = WeakSet()
"""The models of which it was said that the compiler makes no more graphs."""


class Run:
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
        record: ModelRecord,
        model: nn.Module,
        make_strategy: MakeStrategy,
        observer: Observer,
    ):
        self.model = PatchedModel(config, record, model, observer)
        self.engine: Engine | None = None
        self.stopped: str | None = None
        self.may_compile = True
        self._may_merge = False
        self._config = config
        self._make_strategy = make_strategy
        self._engines: dict[tuple[torch.device, torch.dtype, bool], Engine] = {}

    def or_unmerged(self, evaluate: Callable[[], Result]) -> Result:
        """The result of ``evaluate``; the result without merging if that fails for its own reasons.

        These are too little memory, and a compiler of the model that fails on merging. If it only
        makes no more graphs, the result is that of the graphs so far, or of none.

        Args:
            evaluate: evaluates the model within :meth:`evaluation`.
        """
        if not self.may_compile:
            return with_graphs_so_far(evaluate)
        try:
            return evaluate()
        except Exception as error:
            self.may_compile = not has_no_more_graphs(error)
            why = _why_stopped(error) if self._may_merge and self.may_compile else None
            if why is None and self.may_compile:
                raise
        if why is None:
            return with_graphs_so_far(evaluate)
        # Not in the except block, where the traceback keeps the tensors of the evaluation.
        self.stopped = why
        try:
            result = evaluate()
        except BaseException:
            self.stopped = None
            raise
        log.warning("[ToMe] %s; the rest of this run goes on without merging", why)
        return result

    @contextmanager
    def evaluation(
        self,
        moment: Moment,
        latent: Grid,
        device: torch.device,
        dtype: torch.dtype,
        obstacle: str | None = None,
        is_unpatched: bool = False,
    ) -> Iterator[None]:
        """Merge tokens in the model while it is evaluated.

        The observer gets the result, unless the evaluation raised. Threads wait for each other.

        Args:
            moment: where the evaluation is in its run.
            latent: the grid at level 1, of the latent or of the part of it that is evaluated.
            device: the device on which the blocks will run.
            dtype: the dtype of their tokens.
            obstacle: why nothing can merge in this evaluation, according to the host; else None.
            is_unpatched: whether the host knows that no other code patches the inside of blocks.
        """
        with _locks.setdefault(self.model.model, RLock()):
            obstacle = self._obstacle(moment, latent, device, dtype, obstacle)
            self._may_merge = obstacle is None
            outcomes: Sequence[Outcome] = ()
            if obstacle is not None:
                yield
            else:
                evaluation = self._begin(moment, latent, device, is_unpatched)
                with self._installed(evaluation):
                    yield
                    outcomes = self.model.outcomes(evaluation)
                if evaluation.is_uncompiled:
                    self._say_uncompiled()
        blocks = len(self.model.blocks)
        result = Evaluated(moment.step, blocks, outcomes, obstacle, moment.is_active)
        self.model.observer.evaluated(result)

    def _say_uncompiled(self) -> None:
        """Say once of a model that its compiler makes no more graphs."""
        if self.model.model not in _said:
            _said.add(self.model.model)
            log.warning("[ToMe] %s", reasons.NO_MORE_GRAPHS)

    @contextmanager
    def _installed(self, evaluation: Evaluation) -> Iterator[None]:
        """Put the overrides on for an evaluation, which may be nested in another."""
        model = self.model
        outer, model.evaluation = model.evaluation, evaluation
        others = None if outer is None else model.overrides(outer)
        try:
            with model.overrides(evaluation).installed(others):
                yield
        finally:
            model.forget(evaluation)
            model.evaluation = outer

    def _obstacle(
        self,
        moment: Moment,
        latent: Grid,
        device: torch.device,
        dtype: torch.dtype,
        obstacle: str | None,
    ) -> str | None:
        """Why nothing can merge in an evaluation; None if something perhaps can."""
        if not moment.is_active:
            config = self._config
            return reasons.percents(config.start_percent, config.end_percent, moment.begins)
        if self.stopped is not None:
            return self.stopped
        if obstacle is not None:
            return obstacle
        engine = self.engine = self._engine(device, dtype)
        if engine.error is not None:
            return reasons.cannot_merge(device, engine.error)
        model = self.model
        most = latent.downsampled(model.shallowest).tokens
        if most < model.least_tokens and not model.observer.follows_blocks:
            return model.too_few(most)
        saved = model.saved_by_preset(latent)
        if saved is not None and saved < LEAST_SAVED:
            return reasons.saves_little(saved, LEAST_SAVED)
        return None

    def _begin(
        self, moment: Moment, latent: Grid, device: torch.device, is_unpatched: bool
    ) -> Evaluation:
        config, engine = self._config, self.engine
        assert engine is not None
        key = step_key(config.seed, moment.picks)
        engine.strategy.begin(torch.full((), key, dtype=torch.int64, device=device))
        ratio = ratio_at(config, moment.progress)
        model = self.model
        weighs_stacks = (
            is_unpatched and not torch.is_grad_enabled() and not model.observer.follows_blocks
        )
        return Evaluation(engine, ratio, latent, model.deepest(latent), is_unpatched, weighs_stacks)

    def _engine(self, device: torch.device, dtype: torch.dtype) -> Engine:
        # Kernels give no gradients.
        place = device, dtype, torch.is_grad_enabled()
        if place not in self._engines:
            engine = make_engine(self._config, self._make_strategy, device, dtype)
            if self._config.proportional_attn:
                engine.ways.prepare(self.model.attentions())
            self._engines[place] = engine
        return self._engines[place]


def _why_stopped(error: Exception) -> str | None:
    """The reason to merge no more after an error; None if merging is not to blame for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return reasons.NO_MEMORY
    # By name, as importing the compiler takes seconds.
    if not any(kind.__module__.startswith("torch._dynamo") for kind in type(error).__mro__):
        return None
    # If a backend has failed, its own error.
    inner = getattr(error, "inner_exception", error)
    return reasons.not_compiled(f"{type(inner).__name__}: {first_line(inner)}")
