"""The course of every model evaluation, in any host.

First it is settled whether to merge now, on which device, at which ratio, with which picks, and
which plans of an earlier step are kept. Then the overrides go on, the model runs, the overrides
come off, and the observers get the result.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from ..merging.grid import Grid
from ..merging.layout import Picture
from ..merging.plan import in_own_memory
from ..merging.random_picks import step_key
from ..ops.probe import Probe
from ..settings.config import ToMeConfig
from .blocks import Evaluation, Family, ModelSites, SharedPlans
from .detail_cache import Detail, Details
from .engine import Engine, MakeStrategy, make_engine
from .out_of_memory import NO_MEMORY
from .outcome import Evaluated, Observer, Outcome
from .schedule import Moment, ratio_at
from .turns import turns_of
from .whole_model import WholeModel

# How many parts of a step keep their plans for the next; samplers that tile have many parts.
_PARTS_KEPT = 64

_REFRESHED = "every step that could merge ran on all tokens, as refresh_steps says"
"""The reason to report if there was no other step."""


class Run:
    """The evaluations of one model, in one sampling run after another.

    Attributes:
        sites: the blocks of the model.
        engine: what merging runs on; None before the first evaluation that may merge.
    """

    def __init__(
        self,
        config: ToMeConfig,
        family: Family,
        model: nn.Module,
        make_strategy: MakeStrategy,
        observers: Sequence[Observer] = (),
        probe: Probe | None = None,
    ):
        self.sites = ModelSites(config, family, model, observers)
        self.engine: Engine | None = None
        self._make_strategy = make_strategy
        self._probe = probe
        self._engines: dict[tuple[torch.device, torch.dtype], Engine] = {}
        self._kept: dict[Hashable, SharedPlans] = {}
        self._period = 0
        self._details = Details(config)
        self._whole_failed: str | None = None

    def restart(self) -> None:
        """Drop the plans and the detail of earlier steps: another sampling run begins."""
        self._kept.clear()
        self._details.clear()
        self.sites.has_no_memory = False

    @property
    def whole(self) -> WholeModel | None:
        """What runs the model on merged tokens of its latent in this evaluation, else None."""
        return self.sites.evaluation.whole

    @contextmanager
    def evaluation(
        self,
        moment: Moment,
        latent: Grid,
        device: torch.device,
        dtype: torch.dtype,
        obstacle: str | None = None,
        caller: str | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> Iterator[bool]:
        """Merge tokens in the model while it is evaluated; yields whether anything may merge.

        Observers get the result, unless the evaluation raised.

        Args:
            moment: where the evaluation is in its run.
            latent: the grid of the latent, or of the part of it that is evaluated.
            device: where the blocks will run.
            dtype: of their tokens.
            obstacle: why the host says that nothing can merge in this evaluation, None if it can.
            caller: see :meth:`tome_nodes.patching.turns.Turns.turn`.
            pictures: those in the sequence of a transformer, in order.
        """
        with turns_of(self.sites.model).turn(caller) as exits:
            engine = None
            if not moment.is_active:
                obstacle = (
                    f"start_percent={self.sites.config.start_percent} to "
                    f"end_percent={self.sites.config.end_percent} covers no step of this run"
                )
            elif self.sites.has_no_memory:
                obstacle = NO_MEMORY
            elif obstacle is None:
                engine = self.engine = self._engine(device, dtype)
                obstacle = self._obstacle(engine, device, latent, pictures)
            outcomes: Sequence[Outcome] = ()
            if engine is None or obstacle is not None:
                yield False
            else:
                evaluation = self._begin(moment, latent, engine, device, pictures)
                exits.enter_context(self.sites.installed(evaluation))
                yield True
                if self.sites.kept_in_graph:
                    self._take_out_of_graph(evaluation)
                outcomes = self.sites.outcomes()
                if evaluation.whole is not None:
                    self._whole_failed = evaluation.whole.failed
                detail = evaluation.detail
                merged = any(outcome.plan is not None for outcome in outcomes)
                if self.sites.has_no_memory and not merged:
                    obstacle = NO_MEMORY
                if detail is not None and detail.is_full and not (detail.is_empty or merged):
                    obstacle = _REFRESHED
        result = Evaluated(
            moment.step,
            len(self.sites.blocks),
            outcomes,
            obstacle,
            moment.is_active and obstacle is not _REFRESHED,
        )
        for observer in self.sites.observers:
            observer.evaluated(result)

    def _take_out_of_graph(self, evaluation: Evaluation) -> None:
        """Copy what is kept over evaluations: CUDA graphs write to the same memory each time."""
        shared, detail = evaluation.plans, evaluation.detail
        if shared is not None:
            for place, plans in shared.items():
                shared[place] = [None if plan is None else in_own_memory(plan) for plan in plans]
        if detail is not None and detail.is_full:
            detail.changes = {stack: change.clone() for stack, change in detail.changes.items()}

    def _obstacle(
        self,
        engine: Engine,
        device: torch.device,
        latent: Grid,
        pictures: tuple[Picture, ...],
    ) -> str | None:
        """Why no block can merge on a device, None if one perhaps can."""
        if engine.lacks is not None:
            return f"the device {device} cannot do it: {engine.lacks}"
        sites = self.sites
        most = sites.most_tokens(latent, pictures)
        least = min(engine.least_tokens, engine.least_in_attention)
        return sites.too_few(most, least) if most < least and not sites.follows_blocks else None

    def _begin(
        self,
        moment: Moment,
        latent: Grid,
        engine: Engine,
        device: torch.device,
        pictures: tuple[Picture, ...],
    ) -> Evaluation:
        key = step_key(self.sites.config.seed, moment.picks)
        engine.strategy.begin(torch.full((), key, dtype=torch.int64, device=device))
        for observer in self.sites.observers:
            observer.begins(moment.step)
        ratio = ratio_at(self.sites.config, moment.progress)
        plans = self._plans_for(moment)
        config, index = self.sites.config, self.sites.family.latent_among(pictures)
        if config.scope != "stack" or config.refresh_steps == 0:
            return Evaluation(engine, ratio, latent, plans, None, pictures)
        detail = whole = None
        if index is not None:
            detail = Detail() if self._whole_failed else self._details.at(moment, device)
            if not self._whole_failed and detail.denoised is None and not detail.is_coarse:
                detail.is_full = True
            grid = pictures[index].grid
            whole = WholeModel(index, grid, ratio, engine, detail, self._whole_failed)
        elif any(stack.keeps_detail for stack in self.sites.stacks):
            detail = self._details.at(moment, device)
        return Evaluation(engine, ratio, latent, plans, detail, pictures, whole)

    def _engine(self, device: torch.device, dtype: torch.dtype) -> Engine:
        place = device, dtype
        if place not in self._engines:
            config, family = self.sites.config, self.sites.family
            in_blocks = config.scope != "module" and family.merges_blocks
            engine = make_engine(
                config,
                self._make_strategy,
                device,
                dtype,
                in_blocks,
                family.merges_at_calls,
                self._probe,
            )
            for observer in self.sites.observers:
                engine = replace(engine, plans_of=observer.watched(engine.plans_of))
            self._engines[place] = engine
        return self._engines[place]

    def _plans_for(self, moment: Moment) -> SharedPlans | None:
        """The plans to share in this evaluation: those of an earlier step, or none yet.

        A plan fits only the samples of its batch, so it is kept under what the batch is made of.
        """
        every = self.sites.config.reuse_steps
        if every == 0:
            return None
        if moment.step // every != self._period:
            self._period = moment.step // every
            self._kept.clear()
        if moment.part not in self._kept and len(self._kept) == _PARTS_KEPT:
            return {}
        return self._kept.setdefault(moment.part, {})
