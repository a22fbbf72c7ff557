"""A patched model: its blocks, and the current evaluation."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from torch import nn

from .. import reasons
from ..settings.config import ToMeConfig
from ..settings.presets import FREE, settings_of
from ..strategies.plan import Grid
from .attention_trial import Attention
from .block import Block
from .evaluation import Evaluation, ModelState, Observer, Outcome
from .overrides import Overrides
from .stack import Stack
from .work import Work


class ModelFamily(Protocol):
    """What is known about the models of one kind."""

    def stacks(self, model: Any) -> Iterable[Stack]:
        """The stacks of a model, in running order."""

    def block(self, model: ModelState, stack: Stack, index: int) -> Block:
        """The block at an index of a stack."""

    def work(self, model: Any, blocks: Sequence[Block]) -> Work | None:
        """What an evaluation of a model with these blocks costs; None if that is not known."""

    def attentions(self) -> Iterable[Attention]:
        """The attention functions that the host calls for models at present.

        Empty if the host weighs keys in its own way.
        """


class PatchedModel(ModelState):
    """A model whose blocks merge tokens.

    Attributes:
        family: what is known about models of its kind.
        blocks: all its blocks.
        max_downsample: the level of the smallest grid that merges; never ``auto``. Large grids
            merge at deeper levels, too, see :meth:`deepest`.
    """

    def __init__(
        self,
        config: ToMeConfig,
        family: ModelFamily,
        model: nn.Module,
        observer: Observer,
    ):
        stacks = [*family.stacks(model)]
        levels = Counter(stack.level for stack in stacks for _ in stack.blocks)
        least = config.min_tokens or config.policy.least_tokens
        super().__init__(model, config, observer, min(levels), least)
        self.family = family
        self.max_downsample = deepest_level(config, levels)
        self._levels = sorted(levels)
        self._overrides: dict[tuple[int, bool, bool], Overrides] = {}
        self._deepest: dict[Grid, int] = {}
        self._too_little: dict[Grid, reasons.Reason | None] = {}
        self._overridden: dict[tuple[int, bool], list[Block]] = {}
        self.blocks = [
            family.block(self, stack, index)
            for stack in stacks
            for index in range(len(stack.blocks))
        ]

    def deepest(self, latent: Grid) -> int:
        """The level of the smallest grid that merges, for a latent of this size."""
        if latent not in self._deepest:
            least = max(self.config.policy.deeper_from, self.least_tokens)
            large = [level for level in self._levels if latent.downsampled(level).tokens >= least]
            self._deepest[latent] = max([self.max_downsample, *large])
        return self._deepest[latent]

    def saved(self, latent: Grid) -> float | None:
        """The share of an evaluation's work that merging saves; None if that is not known."""
        if self._work is None:
            return None
        return self._work.saved(self.config, latent, self.least_tokens, self.deepest(latent))

    def too_little(self, latent: Grid) -> reasons.Reason | None:
        """The reason if no block merges because too little would; None if something may merge.

        Only some presets ask how much work is saved.
        """
        least_saved = self.config.policy.least_saved
        if latent not in self._too_little:
            most = latent.downsampled(self.shallowest).tokens
            saved = self.saved(latent) if least_saved else None
            reason = None
            if most < self.least_tokens and not self.observer.follows_blocks:
                reason = self.too_few(most)
            elif saved is not None and saved < least_saved:
                reason = reasons.saves_little(saved, least_saved, self._preset_that_merges(latent))
            self._too_little[latent] = reason
        return self._too_little[latent]

    def _preset_that_merges(self, latent: Grid) -> str:
        """The preset that would merge where this one saves too little; empty if there is none."""
        more = self.config.policy.more
        return more if more and self._would_merge(self._under(more), latent) else ""

    def levels_left_out(self, latent: Grid) -> reasons.Reason:
        """The reason if all blocks are deeper than ``max_downsample``, and which change helps."""
        others = {
            "use preset fast": self._under("fast"),
            "set max_downsample to auto under preset custom": replace(
                self.config, max_downsample="auto"
            ),
        }
        helpful = [do for do, config in others.items() if self._would_merge(config, latent)]
        return reasons.levels_left_out(self.max_downsample, self.shallowest, helpful)

    def _under(self, preset: str) -> ToMeConfig:
        """The settings under another preset."""
        free = {name: getattr(self.config, name) for name in FREE}
        return ToMeConfig(**settings_of(preset, free))

    def _would_merge(self, config: ToMeConfig, latent: Grid) -> bool:
        """Whether anything would merge under other settings."""
        model = PatchedModel(config, self.family, self.model, Observer())
        return model.too_little(latent) is None and model.saved(latent) != 0

    def attentions(self) -> set[Attention]:
        """The attention functions that its blocks will call, as far as the host tells."""
        stored = (block.stored for block in self.blocks)
        return {*self.family.attentions(), *(each for each in stored if each is not None)}

    def begin(self, evaluation: Evaluation) -> None:
        """Put the overrides on for an evaluation, which may be within another."""
        outer = evaluation.outer = self.evaluation
        self.evaluation = evaluation
        if outer is not None:
            self._overrides_for(outer).take_off()
        try:
            self._overrides_for(evaluation).put_on()
        except BaseException:
            self.end(evaluation)
            raise

    def end(self, evaluation: Evaluation) -> None:
        """Take the overrides off again, and drop what the evaluation has left in blocks."""
        self._overrides_for(evaluation).take_off()
        if evaluation.outer is not None:
            self._overrides_for(evaluation.outer).put_on()
        for block in self.overridden_blocks(evaluation):
            if block.outcome.has_run:
                block.forget()
        self.evaluation = evaluation.outer

    def outcomes(self, evaluation: Evaluation) -> list[Outcome]:
        """The outcomes of the blocks that have run."""
        outcomes = []
        for block in self.overridden_blocks(evaluation):
            outcome = block.outcome
            if outcome.has_run:
                if evaluation.by_stack:
                    outcome.blocks = block.names_in_stack
                outcome.complete()
                if outcome.grid is not None and outcome.plan is None and outcome.reason is None:
                    outcome.reason = self.why_no_plan(outcome.grid, evaluation.ratio)
                outcomes.append(outcome)
        return outcomes

    def _overrides_for(self, evaluation: Evaluation) -> Overrides:
        by_stack = evaluation.by_stack
        kind = evaluation.deepest, by_stack, bool(evaluation.left_out)
        if kind not in self._overrides:
            blocks = self.overridden_blocks(evaluation)
            self._overrides[kind] = Overrides(
                lambda: [each for block in blocks for each in block.overrides(by_stack)]
            )
        return self._overrides[kind]

    def overridden_blocks(self, evaluation: Evaluation) -> list[Block]:
        """The blocks that are overridden in an evaluation."""
        deepest, left_out = evaluation.deepest, evaluation.left_out
        kind = deepest, bool(left_out)
        if kind not in self._overridden:
            self._overridden[kind] = [
                block
                for block in self.blocks
                if (self.observer.follows_blocks or block.stack.level <= deepest)
                and block.module not in left_out
            ]
        return self._overridden[kind]

    @cached_property
    def _work(self) -> Work | None:
        return self.family.work(self.model, self.blocks)


def deepest_level(config: ToMeConfig, blocks_by_level: Mapping[int, int]) -> int:
    """The deepest level at which grids of any allowed size merge.

    ``blocks_by_level`` is the number of blocks by :attr:`Stack.level`; not empty.
    """
    if config.max_downsample != "auto":
        return config.max_downsample
    if config.scope == "module":
        return min(blocks_by_level)
    # Merging whole blocks pays off at the level with most blocks: in SDXL, one level deeper.
    return min(blocks_by_level, key=lambda level: (-blocks_by_level[level], level))


def unwrapped(module: Any) -> Any:
    """The module that a compiled or replicated module calls; the module itself if it is neither."""
    wrappers = nn.parallel.DistributedDataParallel, nn.DataParallel
    while True:
        inner = module.module if isinstance(module, wrappers) else None
        inner = getattr(module, "_orig_mod", inner)
        if inner is None:
            return module
        module = inner
