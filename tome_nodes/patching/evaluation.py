"""How every evaluation of a model runs, in any host.

First it is decided whether to merge, on which device, at which ratio and with which random picks.
Then the overrides go on, the model runs, the overrides come off, and the observer gets the result.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .. import reasons
from ..merging.plan import Grid
from ..ops.random_picks import step_key
from ..settings.config import ToMeConfig
from .blocks import Evaluated, Evaluation, ModelRecord, Observer, Outcome, PatchedModel
from .detail_cache import Details
from .engine import Engine, MakeStrategy, make_engine
from .schedule import Moment, ratio_at

log = logging.getLogger("tome_nodes")

Result = TypeVar("Result")

LEAST_SAVED = 0.05
"""Where a preset saves a smaller share of an evaluation's work, nothing merges: it would cost about
as much time as it saves."""

_locks: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
"""What a thread holds while it evaluates a model; evaluations may be nested."""


class Run:
    """The evaluations of one model in a sampling run.

    Attributes:
        model: the model and its blocks.
        engine: what merging runs on; None before the first evaluation that may merge.
        out_of_memory: whether to stop merging, since a merged evaluation ran out of memory and an
            unmerged one did not.
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
        self.out_of_memory = False
        self._may_merge = False
        self._config = config
        self._make_strategy = make_strategy
        self._engines: dict[tuple[torch.device, torch.dtype], Engine] = {}
        self._details = Details(config)
        self._module_scope_reason: str | None = None

    def restart(self) -> None:
        """Drop everything that is kept from step to step: another sampling run begins."""
        self._details.clear()
        self.out_of_memory = False
        self._module_scope_reason = None

    def or_unmerged(self, evaluate: Callable[[], Result]) -> Result:
        """The result of ``evaluate``; if merging runs out of memory, the result without it.

        Args:
            evaluate: evaluates the model within :meth:`evaluation`.
        """
        try:
            return evaluate()
        except torch.OutOfMemoryError:
            if not self._may_merge:
                raise
        # Not in the except block, where the traceback keeps the tensors of the evaluation.
        self.out_of_memory = True
        try:
            result = evaluate()
        except BaseException:
            self.out_of_memory = False
            raise
        log.warning(
            "[ToMe] the device ran out of memory; the rest of this run goes on without merging"
        )
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
    ) -> Iterator[Evaluation | None]:
        """Merge tokens in the model while it is evaluated; yields None if nothing may merge.

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
            self._may_merge, is_full = obstacle is None, False
            if obstacle is not None:
                yield None
                outcomes: Sequence[Outcome] = ()
            else:
                evaluation = self._begin(moment, latent, device, is_unpatched)
                with self._installed(evaluation):
                    yield evaluation
                    outcomes = self.model.outcomes(evaluation)
                self._keep(evaluation)
                is_full = evaluation.is_full_step
                detail = evaluation.detail
                merged = any(outcome.plan is not None for outcome in outcomes)
                if detail is not None and detail.is_full and detail.changes and not merged:
                    obstacle = reasons.ALL_FULL_STEPS
        result = Evaluated(
            moment.step,
            len(self.model.blocks),
            outcomes,
            obstacle,
            moment.is_active and obstacle != reasons.ALL_FULL_STEPS,
            is_full,
        )
        self.model.observer.evaluated(result)

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
            model.forget()
            model.evaluation = outer

    def in_modules(self, evaluation: Evaluation, reason: str) -> AbstractContextManager[None]:
        """Go on without stacks, as kept detail was of another place; ``reason`` says so."""
        others = self.model.overrides(evaluation)
        evaluation.detail, evaluation.module_scope_reason = None, reason
        evaluation.has_whole_stacks, evaluation.deepest_in_blocks = False, evaluation.deepest
        return self.model.overrides(evaluation).installed(others)

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
            return reasons.percents(self._config.start_percent, self._config.end_percent)
        if self.out_of_memory:
            return reasons.NO_MEMORY
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
            return reasons.saves_little(saved, LEAST_SAVED, self._config.scope == "stack")
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
        evaluation = Evaluation(engine, ratio, latent, model.deepest(latent))
        evaluation.is_unpatched = is_unpatched
        if config.scope != "stack":
            return evaluation
        of_keys = model.deepest_of_keys
        has_gradients = torch.is_grad_enabled()
        if config.refresh_steps == 0:
            pass
        elif has_gradients:
            evaluation.module_scope_reason = reasons.WITH_GRADIENTS
        elif self._module_scope_reason is not None:
            evaluation.module_scope_reason = self._module_scope_reason
        elif model.has_stacks and evaluation.deepest > of_keys:
            detail = evaluation.detail = self._details.at(moment, device)
            evaluation.is_full_step = detail.is_full
        if evaluation.is_full_step:
            # Only attention merges, and blocks of other levels run untouched.
            if config.merge_attn and config.attn_tokens == "k,v":
                of_keys = max(of_keys, model.attends_to(latent))
            evaluation.deepest_in_blocks = min(evaluation.deepest, of_keys)
        elif (
            is_unpatched
            and evaluation.module_scope_reason is None
            and not has_gradients
            and not model.observer.follows_blocks
        ):
            evaluation.has_whole_stacks, evaluation.deepest_in_blocks = True, of_keys
        return evaluation

    def _keep(self, evaluation: Evaluation) -> None:
        """Keep what later evaluations need from this one."""
        if not torch.is_grad_enabled():
            self._module_scope_reason = evaluation.module_scope_reason
        detail = evaluation.detail
        if detail is not None and detail.is_full:
            # Copies, since a compiled graph may reuse the memory of its results.
            for stack, change in detail.changes.items():
                detail.changes[stack] = change.clone()

    def _engine(self, device: torch.device, dtype: torch.dtype) -> Engine:
        place = device, dtype
        if place not in self._engines:
            self._engines[place] = make_engine(self._config, self._make_strategy, device, dtype)
        return self._engines[place]
