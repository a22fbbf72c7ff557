"""Blocks that merge the tokens that enter them or their modules, as in the paper (section 4)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..merging.grid import Grid
from ..merging.layout import Layout
from ..merging.plan import Plan
from .blocks import BlockSite, ModelSites, Override, StackSite
from .run_merged import attention_on_merged, block_on_merged, module_on_merged


@dataclass(frozen=True)
class Part:
    """A module of a block that may run on merged tokens.

    Attributes:
        module: takes the tokens of the block as its first argument.
        option: the name of the option that makes it merge.
        attends_to_itself: whether it is a self-attention, so its keys are the block's tokens too.
    """

    module: nn.Module
    option: str
    attends_to_itself: bool = False


class InputSite(BlockSite):
    """A block whose modules take the tokens as first argument, in an :class:`InputStack`."""

    stack: "InputStack"

    def forget(self) -> None:
        """Drop the notes and plans of an evaluation."""
        super().forget()
        self._plan: Plan | None = None
        self._keys_plan: Plan | None = None
        self._outer_plan: Plan | None = None

    def overrides(self) -> list[Override]:
        """The block and its modules, with what each of them runs instead."""
        config, parts = self.stack.sites.config, self.parts()
        self._attends_to_itself = any(part.attends_to_itself for part in parts)
        block_forward = self._run_block(self.module.forward)
        overrides: list[Override] = [(self.module, self.timed(block_forward))]
        for part in parts:
            forward = part.module.forward
            if part.attends_to_itself:
                if config.merge_attn or config.scope != "module":
                    forward = self.self_attention(forward)
                    overrides.append((part.module, self._run_self_attention(forward)))
            elif getattr(config, part.option):
                overrides.append((part.module, self._run_module(forward)))
        return overrides

    def parts(self) -> Sequence[Part]:
        """The modules of the block that may each merge on their own."""
        raise NotImplementedError

    def self_attention(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The forward of a self-attention, to be called with ``x``, ``context`` and ``value``.

        A family whose attention has a single source for keys and values uses that of the values.
        """
        return forward

    def layout(self, x: Tensor, *args: Any, **kwargs: Any) -> Layout | None:
        """The layout of the block's tokens, given the arguments of the block.

        None if ``x``, ``[batch, tokens, channels]``, is not of the shape that the host reports.
        """
        raise NotImplementedError

    def latent(self, *args: Any, **kwargs: Any) -> Grid:
        """The grid of the latent that the model works on, given the arguments of the block."""
        return self.stack.sites.evaluation.latent

    def needs_all_tokens(self, *args: Any, **kwargs: Any) -> bool:
        """Whether something in the block needs all tokens, given the arguments of the block."""
        raise NotImplementedError

    def is_masked(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether a module of the block is called with a mask over its tokens."""
        raise NotImplementedError

    def weigh_keys(self, kwargs: dict[str, Any], log_sizes: Tensor) -> dict[str, Any]:
        """The keyword arguments of a self-attention that add ``log_sizes`` to its logits.

        If the host's attention cannot do that, ``kwargs`` is returned as it is and the reason goes
        to :meth:`note_unweighted`.

        Args:
            kwargs: the keyword arguments before.
            log_sizes: ``[batch, keys]`` in the dtype of the tokens.
        """
        self.note_unweighted("this host has no way to weigh them")
        return kwargs

    def _weigh(self, plan: Plan, x: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        log_sizes = self.log_sizes(plan, x)
        return kwargs if log_sizes is None else self.weigh_keys(kwargs, log_sizes)

    def _takes(self, plan: Plan, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether a module called with ``x`` can run under the plan; the answer is noted."""
        if self.is_masked(kwargs) or not plan.fits(x):
            self.note_masked()
            return False
        self.notes.ran(x.shape[1], plan)
        return True

    def _run_block(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        stack, sites, config = self.stack, self.stack.sites, self.stack.sites.config

        def block_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self._plan = self._keys_plan = self._outer_plan = None
            self.notes.tokens = x.shape[1]
            if sites.is_full_step:
                return self._run_full(forward, x, *args, **kwargs)
            if stack.plan is not None:
                self.notes.plans_reused += 1
                return self._in_stack(forward, x, *args, **kwargs)
            least = sites.evaluation.engine.least_tokens
            layout = self._worthy_layout(least, x, *args, **kwargs)
            if layout is None:
                return forward(x, *args, **kwargs)
            fell_back = config.scope != "module" and self.needs_all_tokens(*args, **kwargs)
            self.notes.fell_back = "that are patched" if fell_back else None
            if config.scope == "module" or fell_back:
                self._plan_for_modules(x, layout)
                return forward(x, *args, **kwargs)
            ratio = sites.evaluation.ratio
            (plan,) = self.plans("tokens", x, layout, [ratio])
            if plan is None:
                self.notes.reason = self.why_no_plan(layout, ratio)
                return forward(x, *args, **kwargs)
            if config.scope == "stack" and stack.runs_as_one_from(self, *args, **kwargs):
                return self._in_stack(forward, stack.enter(plan, x), *args, **kwargs)
            self.notes.ran(x.shape[1], plan)
            self._outer_plan = plan
            return block_on_merged(forward, plan, x, *args, **kwargs)

        return block_forward

    def _run_full(
        self, forward: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the block on all tokens; its stack keeps what its blocks change together.

        Its attention may merge keys and values.
        """
        stack, sites = self.stack, self.stack.sites
        engine = sites.evaluation.engine
        if (
            stack.runs_as_one_from(self, *args, **kwargs)
            and self._worthy_layout(engine.least_tokens, x, *args, **kwargs) is not None
        ):
            # Some blocks change their tokens in place.
            stack.tokens = x.clone()
        if sites.merges_keys_in_full_steps:
            layout = self._worthy_layout(engine.least_in_attention, x, *args, **kwargs)
            if layout is not None:
                self._plan_keys(x, layout)
        y = forward(x, *args, **kwargs)
        if stack.tokens is not None and self is stack.blocks[-1]:
            stack.keep(y)
        return y

    def _in_stack(
        self, forward: Callable[..., Tensor], merged: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the block on tokens that its stack has merged."""
        stack = self.stack
        assert stack.plan is not None and stack.tokens is not None
        self.notes.ran(stack.tokens.shape[1], stack.plan)
        self._outer_plan = stack.plan
        y = forward(merged, *args, **kwargs)
        return stack.leave(y) if self is stack.blocks[-1] else y

    def _run_module(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def module_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            plan = self._plan
            if plan is None or not self._takes(plan, x, kwargs):
                return forward(x, *args, **kwargs)
            return module_on_merged(forward, plan, x, *args, **kwargs)

        return module_forward

    def _run_self_attention(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        config = self.stack.sites.config
        weigh = self._weigh if config.proportional_attn else None

        def attention_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._outer_plan is not None:
                if weigh is not None:
                    kwargs = weigh(self._outer_plan, x, kwargs)
                return forward(x, *args, **kwargs)
            queries = self._plan if config.merge_attn and "q" in config.attn_tokens else None
            keys = self._keys_plan
            plan = keys if queries is None else queries
            if plan is None or not self._takes(plan, x, kwargs):
                return forward(x, *args, **kwargs)
            return attention_on_merged(forward, queries, keys, weigh, x, *args, **kwargs)

        return attention_forward

    def _worthy_layout(self, least: int, x: Tensor, *args: Any, **kwargs: Any) -> Layout | None:
        """The layout with only the pictures of ``least`` tokens that merge, None if none does.

        The reason is noted, except at a level that the settings leave out.
        """
        sites = self.stack.sites
        layout, latent = self.layout(x, *args, **kwargs), self.latent(*args, **kwargs)
        if layout is None:
            self.notes.reason = self.tokens_changed
            return None
        spans = tuple(
            span for span in layout.spans if span.grid.is_within(latent, sites.max_downsample)
        )
        if not spans:
            return None
        return self.worthy(layout if spans == layout.spans else Layout(layout.length, spans), least)

    def _plan_for_modules(self, x: Tensor, layout: Layout) -> None:
        """Make the plans for the modules of the block, which merge each on their own."""
        config = self.stack.sites.config
        if not (config.merge_attn or config.merge_crossattn or config.merge_mlp):
            self.notes.reason = "merge_attn, merge_crossattn and merge_mlp are all off"
            return
        self.notes.reason = self.attention_replaced
        attends_to_itself = self._attends_to_itself
        merges_keys = config.merge_attn and "k,v" in config.attn_tokens and attends_to_itself
        merges_tokens = (
            config.merge_crossattn
            or config.merge_mlp
            or (config.merge_attn and not (attends_to_itself and config.attn_tokens == "k,v"))
        )
        if not (merges_tokens or merges_keys):
            return
        ratio, keys_ratio = self.ratios()
        ratios = [ratio] if merges_tokens else []
        if merges_keys and keys_ratio not in ratios:
            ratios.append(keys_ratio)
        plans = self.plans("tokens" if ratios == [ratio] else "keys too", x, layout, ratios)
        if merges_tokens:
            self._plan = plans[0]
        if merges_keys:
            self._keys_plan = plans[-1]
        if self._plan is None and self._keys_plan is None:
            self.notes.reason = self.why_no_plan(layout, ratios[0])

    def _plan_keys(self, x: Tensor, layout: Layout) -> None:
        """Make the plan for the keys and values of a self-attention, if the block has one."""
        if not self._attends_to_itself:
            return
        self.notes.reason = self.attention_replaced
        ratio = self.stack.sites.evaluation.ratio
        (self._keys_plan,) = self.plans("tokens", x, layout, [ratio])
        if self._keys_plan is None:
            self.notes.reason = self.why_no_plan(layout, ratio)


class InputStack(StackSite):
    """Consecutive blocks, which may run as one on merged tokens.

    Attributes:
        plan: the plan of the stack while it runs as one, else None.
        tokens: the ``[batch, tokens, channels]`` that entered its first block, while it runs as one
            or its change is to be kept; else None.
    """

    block_class: ClassVar[type[InputSite]]
    blocks: list[InputSite]

    def __init__(
        self,
        name: str,
        module: nn.Module,
        blocks: Iterable[nn.Module],
        level: int,
        sites: ModelSites,
    ):
        super().__init__(name, module, blocks, level, sites)
        self.plan: Plan | None = None
        self.tokens: Tensor | None = None
        self._merged: Tensor | None = None

    @property
    def runs_as_one(self) -> bool:
        """Whether nothing else runs between the blocks."""
        return True

    @property
    def keeps_detail(self) -> bool:
        return self.runs_as_one

    def runs_as_one_from(self, block: InputSite, *args: Any, **kwargs: Any) -> bool:
        """Whether ``block`` is the first and all blocks can run on merged tokens."""
        return (
            block.index == 0
            and self.runs_as_one
            and not any(each.needs_all_tokens(*args, **kwargs) for each in self.blocks)
        )

    def enter(self, plan: Plan, x: Tensor) -> Tensor:
        """Merge the tokens that enter the first block."""
        merged = plan.merge(x)
        self.plan, self.tokens, self._merged = plan, x, merged
        return merged

    def leave(self, y: Tensor) -> Tensor:
        """Add the change that the blocks made together to all tokens."""
        plan, x, merged = self.plan, self.tokens, self._merged
        assert plan is not None and x is not None and merged is not None
        self.plan = self.tokens = self._merged = None
        detail = self.sites.evaluation.detail
        if detail is None:
            return plan.add_change(x, merged, y)
        return detail.add_change(self.name, plan, x, merged, y)

    def keep(self, y: Tensor) -> None:
        """Keep what the blocks changed together on all tokens."""
        detail, x = self.sites.evaluation.detail, self.tokens
        assert detail is not None and x is not None
        self.tokens = None
        if detail.keeps_changes:
            detail.changes[self.name] = y - x
            if torch.compiler.is_compiling():
                self.sites.kept_in_graph = True

    def end(self) -> None:
        self.plan = self.tokens = self._merged = None
        super().end()
