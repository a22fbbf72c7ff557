"""The places in a model that may merge: its blocks, and the stacks that they are in.

A block merges what enters its modules (:mod:`tome_nodes.patching.merge_modules`), or queries, keys
and values where attention is called (:mod:`tome_nodes.patching.merge_attention`). Subclasses hold
what differs between families of models. Overrides are put on for one evaluation at a time.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..merging.grid import Grid
from ..merging.layout import Layout, LayoutKey, Picture
from ..merging.plan import Plan, plans_of_sequence
from ..ops import Operations
from ..settings.config import ToMeConfig
from .detail_cache import Detail
from .engine import Engine
from .notes import Notes
from .out_of_memory import ran_out_while_merging
from .outcome import Observer, Outcome
from .whole_model import WholeModel

Forward = Callable[..., Any]
Override = tuple[nn.Module, Forward]
"""A module, and what it runs instead of its ``forward``."""

StackParts = tuple[str, nn.Module, Iterable[nn.Module], int]
"""The name of a stack, the module that holds it, its blocks, and its level.

The level is how many times smaller than the latent its feature map is; 1 for a transformer's.
"""

SharedPlans = dict[tuple[str, LayoutKey], list[Plan | None]]
"""Plans that blocks share, by purpose and layout."""


@dataclass(frozen=True)
class Evaluation:
    """What the blocks need to know about the current evaluation.

    Attributes:
        engine: makes the plans.
        ratio: that of the current step.
        latent: the grid of the latent, or of the part of it that is evaluated.
        plans: shared by the blocks; None if each makes its own.
        detail: what stacks keep from step to step, None for nothing.
        pictures: those in the sequence of a transformer, in order.
        whole: the evaluation of a model that runs as a whole on merged tokens, else None.
        log_sizes: those of merged tokens and what is beside them, by the sequence, shared by the
            blocks of a model that runs as a whole.
    """

    engine: Engine
    ratio: float
    latent: Grid
    plans: SharedPlans | None
    detail: Detail | None = None
    pictures: tuple[Picture, ...] = ()
    whole: WholeModel | None = None
    log_sizes: dict[Hashable, Tensor] = field(default_factory=dict)


class BlockSite:
    """The overrides for one block.

    The only side effects of overrides are attribute writes, so that torch.compile can trace them.

    Attributes:
        name: path of the block within the model.
        index: its index in the stack.
        module: the block.
        stack: the stack that it is in.
        notes: what it has done so far in the current evaluation.
    """

    tokens_changed: ClassVar[str]
    """The reason to report if the tokens of a block do not fit its layout."""

    attention_masked: ClassVar[str]
    """The reason to report if the attention is masked, or called with other tokens."""

    attention_replaced: ClassVar[str]
    """The reason to report if the modules of a block were not called."""

    def __init__(self, name: str, index: int, module: nn.Module, stack: "StackSite"):
        self.name = name
        self.index = index
        # Only its family knows the names of its modules.
        self.module: Any = module
        self.stack = stack
        self.forget()

    def forget(self) -> None:
        """Drop the notes and plans of an evaluation."""
        self.notes = Notes()

    def overrides(self) -> list[Override]:
        """The block and its modules, with what each of them runs instead.

        They are made once for many evaluations, so they ask for the current one when they run.
        """
        raise NotImplementedError

    @property
    def ops(self) -> Operations:
        """The operations of the current evaluation."""
        return self.stack.sites.evaluation.engine.strategy.ops

    def note_unweighted(self, reason: str | None) -> None:
        """Note why each merged key weighs as one token, None if it does not."""
        self.notes.unweighted = reason

    def note_masked(self) -> None:
        """Note that the attention is masked, or called with other tokens."""
        self.notes.reason = self.attention_masked

    def log_sizes(self, plan: Plan, like: Tensor) -> Tensor | None:
        """What to add to the logits of merged keys, ``[batch, keys]``; None for nothing."""
        if not self.stack.sites.config.proportional_attn or plan.is_even():
            return None
        return plan.log_sizes_in(like.dtype)

    def timed(self, forward: Forward) -> Forward:
        """The forward of the block, timed by the observers that want to."""
        for observer in self.stack.sites.observers:
            forward = observer.timed(self.name, forward)
        return forward

    def worthy(self, layout: Layout, least: int) -> Layout | None:
        """The layout with only the pictures of at least so many tokens, None if there is none.

        The reason for None is noted.
        """
        sites = self.stack.sites
        worthy = tuple(span for span in layout.spans if span.grid.tokens >= least)
        if not worthy:
            largest = max(span.grid.tokens for span in layout.spans)
            self.notes.reason = sites.too_few(largest, least)
            return None
        return layout if worthy == layout.spans else Layout(layout.length, worthy)

    def ratios(self) -> tuple[float, float]:
        """The ratio of the tokens, and that of keys and values."""
        config, ratio = self.stack.sites.config, self.stack.sites.evaluation.ratio
        if config.kv_ratio < 0 or config.scope != "module":
            return ratio, ratio
        return ratio, config.kv_ratio

    def plans(
        self, kind: str, features: Tensor, layout: Layout, ratios: Sequence[float]
    ) -> list[Plan | None]:
        """Plans at some ratios: shared ones if there are any that fit, else new ones."""
        evaluation = self.stack.sites.evaluation
        self.notes.layout = layout.key
        place = kind, self.notes.layout
        shared = evaluation.plans
        if shared is not None and place in shared:
            kept = shared[place]
            if all(plan is None or plan.fits(features) for plan in kept):
                self.notes.plans_reused += any(plan is not None for plan in kept)
                return kept
        plans_of = evaluation.engine.plans_of
        plans = plans_of_sequence(layout, features, lambda own, grid: plans_of(own, grid, ratios))
        self.notes.plans_made += any(plan is not None for plan in plans)
        if shared is not None:
            shared[place] = plans
            if torch.compiler.is_compiling():
                self.stack.sites.kept_in_graph = True
        return plans

    def why_no_plan(self, layout: Layout, ratio: float) -> str:
        """The reason to report if the strategy made no plan."""
        sites = self.stack.sites
        config = sites.config
        if ratio == 0:
            return "the ratio is 0 at every step that could merge"
        grid = max((span.grid for span in layout.spans), key=lambda grid: grid.tokens)
        uses_cells = sites.evaluation.engine.strategy.uses_cells
        if grid.frames == 1 and uses_cells and grid.cells(config.sy, config.sx).tokens == 0:
            return (
                f"a feature map of {grid.height}x{grid.width} tokens holds no cell of "
                f"sy={config.sy} by sx={config.sx}"
            )
        return f"{grid.tokens} tokens are too few for ratio={ratio:g}"


class StackSite:
    """Consecutive blocks.

    Attributes:
        name: path of the stack within the model.
        module: holds them.
        level: how many times smaller than the latent their grid is.
        sites: all stacks of the model.
        blocks: in the order in which they run.
    """

    block_class: ClassVar[type[BlockSite]]
    """The class of its blocks."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        blocks: Iterable[nn.Module],
        level: int,
        sites: "ModelSites",
    ):
        self.name = name
        self.module = module
        self.level = level
        self.sites = sites
        self.blocks: list[Any] = [
            self.block_class(f"{name}.{index}", index, block, self)
            for index, block in enumerate(blocks)
        ]

    @property
    def keeps_detail(self) -> bool:
        """Whether it may keep the detail of what its blocks change together."""
        return False

    def overrides(self) -> list[Override]:
        """Modules, with what each of them runs instead."""
        return [override for block in self.blocks for override in block.overrides()]

    def end(self) -> None:
        """Drop the tensors of an evaluation."""
        for block in self.blocks:
            block.forget()


class Family:
    """What is special about a family of models; there is one instance of each."""

    stack_class: ClassVar[type[StackSite]]
    """The class of its stacks."""

    merges_at_calls: ClassVar[bool] = False
    """Whether attention merges where it is called, not where tokens enter its module."""

    full_steps_may_merge_keys: ClassVar[bool] = True
    """Whether attention may merge keys and values in steps on all tokens (FIDELITY.md)."""

    def stacks(self, model: nn.Module) -> Iterator[StackParts]:
        """The stacks of a model."""
        raise NotImplementedError

    def has_blocks(self, model: nn.Module) -> bool:
        """Whether a model has any transformer block."""
        return any(True for _, _, blocks, _ in self.stacks(model) for _ in blocks)

    def latent_among(self, pictures: Sequence[Picture]) -> int | None:
        """The index of the latent among the pictures in the sequence of a transformer.

        None if its blocks cannot all run on merged tokens, or the latent is not one picture.
        """
        return None

    @property
    def merges_blocks(self) -> bool:
        """Whether whole blocks may run on merged tokens."""
        return True


def deepest_level(config: ToMeConfig, blocks_by_level: Mapping[int, int]) -> int:
    """How many times smaller than the latent a grid may be to be merged.

    Args:
        config: the settings.
        blocks_by_level: number of blocks by how many times smaller their grid is; not empty.
    """
    if config.max_downsample != "auto":
        return config.max_downsample
    if config.scope == "module":
        return min(blocks_by_level)
    # Whole blocks are worth merging where most of them are: in SDXL, one level deeper.
    return min(blocks_by_level, key=lambda level: (-blocks_by_level[level], level))


class ModelSites:
    """All stacks of one model, and its current evaluation.

    Attributes:
        config: the settings.
        family: that of the model.
        model: the model itself.
        shallowest: how many times smaller than the latent the largest grid with blocks is.
        max_downsample: the same for the smallest grid that merges, with ``auto`` resolved.
        stacks: those of the model.
        blocks: those of all stacks.
        observers: may time the blocks.
        evaluation: the current one.
        interrupted: ends the evaluation where the host may not, see :func:`called_by`; else None.
        has_no_memory: whether merging has run out of memory in this run.
        kept_in_graph: whether a compiled graph has made what the last evaluation keeps.
    """

    evaluation: Evaluation

    def __init__(
        self,
        config: ToMeConfig,
        family: Family,
        model: nn.Module,
        observers: Sequence[Observer] = (),
    ):
        self.config = config
        self.family: Any = family
        self.model: Any = model
        self.observers = observers
        self.stacks = [family.stack_class(*each, self) for each in family.stacks(model)]
        self.blocks = [block for stack in self.stacks for block in stack.blocks]
        levels: Counter[int] = Counter()
        for stack in self.stacks:
            if stack.blocks:
                levels[stack.level] += len(stack.blocks)
        self.shallowest = min(levels)
        self.max_downsample = deepest_level(config, levels)
        self.interrupted: Callable[[], None] | None = None
        self.has_no_memory = False
        self.kept_in_graph = False
        self._placed: list[_Placed] = []
        self._is_on = False
        self._thread: int | None = None

    @property
    def is_full_step(self) -> bool:
        """Whether the blocks run on all tokens in the current evaluation."""
        detail = self.evaluation.detail
        return detail is not None and detail.is_full

    @property
    def merges_keys_in_full_steps(self) -> bool:
        """Whether attention merges keys and values where the blocks run on all tokens."""
        config = self.config
        return (
            self.family.full_steps_may_merge_keys
            and config.merge_attn
            and config.attn_tokens == "k,v"
        )

    @property
    def follows_blocks(self) -> bool:
        """Whether an observer follows the blocks that cannot merge, too."""
        return any(observer.follows_blocks for observer in self.observers)

    def most_tokens(self, latent: Grid, pictures: Sequence[Picture]) -> int:
        """The most tokens of a picture in any block."""
        if pictures:
            return max(picture.grid.tokens for picture in pictures)
        return latent.downsampled(self.shallowest).tokens

    def too_few(self, tokens: int, least: int) -> str:
        """The reason to report if a picture has fewer tokens than ``least``."""
        automatic = (
            ""
            if self.config.min_tokens
            else ", which is where merging is worth it here (min_tokens=0)"
        )
        return f"{tokens} tokens are fewer than {least}{automatic}"

    @contextmanager
    def installed(self, evaluation: Evaluation) -> Iterator[None]:
        """Put the overrides on for one evaluation."""
        outer, is_nested = vars(self).get("evaluation"), self._is_on
        self.evaluation = evaluation
        self.kept_in_graph = False
        try:
            if not is_nested:
                self._put_on()
            yield
        finally:
            if not is_nested:
                self._take_off()
            for stack in self.stacks:
                stack.end()
            vars(self).update(evaluation=outer)

    def gives_up(self, error: torch.OutOfMemoryError) -> bool:
        """Whether merging itself had no memory left; then nothing merges from here on."""
        if not ran_out_while_merging(error):
            return False
        self.has_no_memory = True
        self._thread = None
        return True

    def _put_on(self) -> None:
        """Put the overrides on; new ones if other code has changed what a module runs."""
        if not (self._placed and all(placed.still_fits for placed in self._placed)):
            self._placed = [
                _Placed.of(module, self._in_this_thread(module.forward, forward))
                for module, forward in (*self._guards(), *self._overrides())
            ]
        self._is_on = True
        self._thread = get_ident()
        for placed in self._placed:
            # nn.Module.__setattr__ is slow, and SDXL has hundreds of these.
            vars(placed.module)["forward"] = placed.forward

    def _overrides(self) -> Iterator[Override]:
        for stack in self.stacks:
            if stack.level <= self.max_downsample or self.follows_blocks:
                yield from stack.overrides()

    def _guards(self) -> Iterator[Override]:
        """What ends the evaluation when a keyboard interrupt leaves the model."""
        if self.interrupted is not None:
            for module in called_by(self.model):
                yield module, _guarded(module.forward, self.interrupted)

    def _in_this_thread(self, plain: Forward, forward: Forward) -> Forward:
        """An override that runs in this evaluation only.

        Meanwhile, other threads may run an unpatched clone.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or get_ident() == self._thread:
                return forward(*args, **kwargs)
            return plain(*args, **kwargs)

        return run

    def _take_off(self) -> None:
        """Take the overrides off, and put back those that other code had set before."""
        self._is_on = False
        for placed in self._placed:
            attributes = vars(placed.module)
            if attributes.get("forward") is not placed.forward:
                continue
            if placed.before is None:
                del attributes["forward"]
            else:
                attributes["forward"] = placed.before

    def outcomes(self) -> list[Outcome]:
        """What the blocks did; only known while the overrides are on."""
        outcomes = [block.notes.outcome(block.name) for block in self.blocks]
        return [outcome for outcome in outcomes if outcome is not None]


@dataclass(frozen=True, eq=False)
class _Placed:
    """An override and where it goes.

    Attributes:
        module: where it goes.
        forward: what the module is to run.
        before: the ``forward`` that other code had set on the module, None for that of its class.
        of_class: the ``forward`` of its class.
        children: the modules in it.
    """

    module: nn.Module
    forward: Forward
    before: Forward | None
    of_class: Forward
    children: tuple[nn.Module | None, ...]

    @classmethod
    def of(cls, module: nn.Module, forward: Forward) -> "_Placed":
        before, of_class = vars(module).get("forward"), _forward_of_class(module)
        return cls(module, forward, before, of_class, tuple(module._modules.values()))

    @property
    def still_fits(self) -> bool:
        """Whether the module runs what it ran when the override was made."""
        return (
            vars(self.module).get("forward") is self.before
            and _forward_of_class(self.module) is self.of_class
            and tuple(self.module._modules.values()) == self.children
        )


def called_by(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that a model calls itself: its children, and those in lists of them.

    PyTorch runs no hook of the model after an exception that is no ``Exception``, such as a
    keyboard interrupt, but nearly all of the model's time is spent in these.
    """
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from called_by(child)
        else:
            yield child


def _guarded(forward: Forward, interrupted: Callable[[], None]) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        # A graph cannot break within a try statement.
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            interrupted()
            raise

    return run


def _forward_of_class(module: nn.Module) -> Forward:
    kind: Any = type(module)
    return kind.forward
