"""Blocks that merge queries, keys and values where attention is called.

By then they are projected, normalised and rotated by position, so all that is needed of a block is
where the pictures are in its sequence. Everything else, such as text, stays as it is.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..merging.layout import Layout
from ..merging.plan import Plan
from .blocks import BlockSite, Forward, Override
from .whole_model import WholeModel

_FALLS_BACK = {
    "module": None,
    "block": "as this kind of model does not merge whole blocks",
    "stack": "as this kind of model does not merge stacks of blocks",
}
"""The reason to report if a block merges only in its attention, by scope."""


@dataclass(frozen=True)
class WholeBlock:
    """How a block is called, so that all of it can run on merged tokens.

    Attributes:
        tokens: the argument with the tokens that merge, ``[batch, tokens, channels]``.
        positions: the argument that tells the position of each token of the attention.
        along: the dimension of ``positions`` that runs over these tokens.
        absent: arguments that treat tokens differently, so that the block needs all of them unless
            they are None.
        by_frame: arguments that treat frames differently if they are ``[batch, frames, number,
            channels]`` with several frames.
        returned: the index of the tokens in what the block returns, None if that is the tokens.
    """

    tokens: str
    positions: str
    along: int
    absent: tuple[str, ...] = ()
    by_frame: tuple[str, ...] = ()
    returned: int | None = None


class CallSite(BlockSite):
    """A block that calls attention through its host; see :meth:`merging`."""

    def attention(self) -> nn.Module:
        """The module that calls the self-attention; it may be the block itself."""
        raise NotImplementedError

    def layout(self, tokens: int, kwargs: dict[str, Any]) -> Layout | None:
        """The layout of a sequence of ``tokens``, None if the pictures do not fit into it.

        Args:
            tokens: the number of keys of the attention.
            kwargs: the keyword arguments of the attention module.
        """
        raise NotImplementedError

    def merging(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments that make the host call :meth:`call_plans` and the rest."""
        raise NotImplementedError

    def whole_block(self) -> WholeBlock | None:
        """How the block is called; None if only its attention can merge."""
        return None

    def needs_all_tokens(self, arguments: Mapping[str, Any]) -> str | None:
        """Why something in the block needs all tokens, given its arguments by name; else None."""
        return None

    def forget(self) -> None:
        """Drop the notes and plans of an evaluation."""
        super().forget()
        self._outer_plan: Plan | None = None
        self._beside = 0

    def overrides(self) -> list[Override]:
        module = self.attention()
        if not self.stack.sites.config.merge_attn:
            return [(self.module, self._note_block(self.module.forward))]
        if module is self.module:
            return [(module, self.timed(self._note_block(self._merge_calls(module.forward))))]
        return [
            (self.module, self.timed(self._note_block(self.module.forward))),
            (module, self._merge_calls(module.forward)),
        ]

    def call_plans(
        self, k: Tensor, queries: int, kwargs: dict[str, Any]
    ) -> tuple[Plan | None, Plan | None]:
        """The plans of the queries and of the keys of one call of attention.

        What merges is noted, or why nothing does.

        Args:
            k: ``[batch, keys, channels]``, by which tokens are matched.
            queries: the number of queries; those of a part of the sequence do not merge.
            kwargs: the keyword arguments of the attention module.

        Returns:
            Both come from one matching. None for what stays as it is.
        """
        sites, tokens = self.stack.sites, k.shape[1]
        config, least = sites.config, sites.evaluation.engine.least_in_attention
        worthy = self._worthy_layout(tokens, kwargs, least)
        if worthy is None:
            return None, None
        ratio, keys_ratio = self.ratios()
        merges_queries = "q" in config.attn_tokens and queries == tokens
        merges_keys = "k,v" in config.attn_tokens
        ratios = [ratio] if merges_queries else []
        if merges_keys and keys_ratio not in ratios:
            ratios.append(keys_ratio)
        if not ratios:
            self.notes.reason = "the queries of a part of the tokens do not merge"
            return None, None
        kind = "call" if merges_queries else "call with some of the queries"
        plans = self.plans(kind, k, worthy, ratios)
        of_queries = plans[0] if merges_queries else None
        of_keys = plans[-1] if merges_keys else None
        noted = of_queries if of_keys is None else of_keys
        if noted is None:
            self.notes.reason = self.why_no_plan(worthy, ratios[0])
        else:
            self.notes.ran(tokens, noted)
        return of_queries, of_keys

    @property
    def is_merged(self) -> bool:
        """Whether the block is running on merged tokens."""
        return self._outer_plan is not None

    def outer_log_sizes(self, keys: int, like: Tensor) -> Tensor | None:
        """What to add to the logits of an attention with ``keys`` in a block on merged tokens.

        ``[batch, keys]`` of the dtype of ``like``; None for nothing.
        """
        plan, beside = self._outer_plan, self._beside
        if plan is None or keys != plan.slot_count + beside:
            return None
        if not beside:
            return self.log_sizes(plan, like)
        if not self.stack.sites.config.proportional_attn:
            return None
        evaluation = self.stack.sites.evaluation
        # Otherwise each block has a plan of its own.
        kept = {} if evaluation.whole is None else evaluation.log_sizes
        place = self.notes.layout, beside, self.at_end, like.dtype
        if place not in kept:
            sizes = plan.log_sizes_in(like.dtype)
            kept[place] = self._with_beside(sizes, sizes.new_zeros(sizes.shape[0], beside))
        return kept[place]

    @property
    def at_end(self) -> bool:
        """Whether the pictures are at the end of the sequence, not at its start."""
        raise NotImplementedError

    def _with_beside(self, merged: Tensor, beside: Tensor) -> Tensor:
        """What belongs to merged tokens and to those beside them, in the order of the sequence."""
        return torch.cat([beside, merged] if self.at_end else [merged, beside], 1)

    def _note_block(self, forward: Forward) -> Forward:
        sites = self.stack.sites
        config = sites.config
        whole = self.whole_block() if config.merge_attn and config.scope != "module" else None
        on_merged = None if whole is None else self._run_whole(whole, forward)

        def block_forward(*args: Any, **kwargs: Any) -> Any:
            if self._is_idle:
                return forward(*args, **kwargs)
            model = sites.evaluation.whole
            failed = None if model is None else model.failed
            is_wide = config.scope == "block" or (model is not None and failed is None)
            if is_wide and on_merged is not None and not sites.is_full_step:
                return on_merged(*args, **kwargs)
            # The number of tokens is not known until attention is called.
            self.notes.tokens = 0
            self.notes.fell_back = (
                None if sites.is_full_step else failed or _FALLS_BACK[config.scope]
            )
            self.notes.reason = (
                self.attention_replaced
                if config.merge_attn
                else "merge_attn is off, and nothing else merges in models of this kind"
            )
            return forward(*args, **kwargs)

        return block_forward

    @property
    def _is_idle(self) -> bool:
        """Whether the block runs as ever in this step."""
        sites = self.stack.sites
        return sites.is_full_step and not sites.merges_keys_in_full_steps

    def _run_whole(self, whole: WholeBlock, forward: Forward) -> Forward:
        names = tuple(inspect.signature(self.module.forward).parameters)

        def block_forward(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            self.notes.tokens = 0
            self.notes.reason = self.attention_replaced
            self.notes.fell_back = self.needs_all_tokens(arguments) or _why_not(whole, arguments)
            if self.notes.fell_back is not None:
                if self.stack.sites.evaluation.whole is not None:
                    self.stack.sites.evaluation.whole.refuse(self.notes.fell_back)
                return forward(*args, **kwargs)
            x, positions = arguments[whole.tokens], arguments[whole.positions]
            plan = self._plan_of_block(x)
            if plan is None:
                return forward(*args, **kwargs)
            merged = plan.merge(x)
            self._outer_plan, self._beside = plan, positions.shape[whole.along] - x.shape[1]
            # Some blocks change their tokens in place.
            arguments[whole.tokens] = merged.clone()
            arguments[whole.positions] = self._positions(plan, positions, whole.along)
            result = forward(**arguments)
            self._outer_plan, self._beside = None, 0
            if whole.returned is None:
                return plan.add_change(x, merged, result)
            result = list(result)
            result[whole.returned] = plan.add_change(x, merged, result[whole.returned])
            return tuple(result)

        return block_forward

    def _worthy_layout(self, tokens: int, kwargs: dict[str, Any], least: int) -> Layout | None:
        """The layout with only the pictures worth merging, None if none is; the reason is noted.

        ``least`` is the number of tokens from which one is.
        """
        self.notes.tokens = tokens
        layout = self.layout(tokens, kwargs)
        if layout is None:
            self.notes.reason = self.tokens_changed
            return None
        return self.worthy(layout, least)

    def _plan_of_block(self, x: Tensor) -> Plan | None:
        """The plan for a whole block with these tokens, None if nothing merges; it is noted."""
        evaluation = self.stack.sites.evaluation
        worthy = self._worthy_layout(x.shape[1], {}, evaluation.engine.least_tokens)
        if worthy is None:
            return None
        ratio, whole = evaluation.ratio, evaluation.whole
        if whole is None:
            (plan,) = self.plans("tokens", x, worthy, [ratio])
        else:
            plan = self._plan_in_model(whole, x, worthy)
        if plan is None:
            self.notes.reason = self.why_no_plan(worthy, ratio)
        else:
            self.notes.ran(x.shape[1], plan)
        return plan

    def _plan_in_model(self, whole: WholeModel, x: Tensor, worthy: Layout) -> Plan | None:
        """The plan for a block in a model that runs as a whole on merged tokens."""
        layout = self.layout(x.shape[1], {})
        self.notes.layout = worthy.key
        if whole.plan is None or layout is None:
            return None
        if len(x) != whole.batch:
            whole.refuse("that run on a part of the batch")
            return None
        plan, is_new = whole.plan_of(worthy, whole.start_in(layout), x)
        self.notes.plans_made += is_new
        self.notes.plans_reused += not is_new
        return plan

    def _positions(self, plan: Plan, positions: Tensor, along: int) -> Tensor:
        """The positions of merged tokens, each that of one of its tokens, and of what is beside."""
        tokens, beside = plan.tokens(), self._beside
        kept = torch.arange(beside, device=tokens.device).expand(len(tokens), -1)
        if self.at_end:
            tokens = tokens + beside
        else:
            kept = kept + (positions.shape[along] - beside)
        chosen = self._with_beside(tokens, kept)
        by_token = positions.movedim(along, 1).expand(len(tokens), *[-1] * (positions.ndim - 1))
        samples = torch.arange(len(tokens), device=tokens.device)[:, None]
        return by_token[samples, chosen].movedim(1, along)

    def _merge_calls(self, forward: Forward) -> Forward:
        def attention_forward(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **(kwargs if self._is_idle else self.merging(kwargs)))

        return attention_forward


def _why_not(whole: WholeBlock, arguments: Mapping[str, Any]) -> str | None:
    """Why a block called like this cannot run on merged tokens, None if it can."""
    x, positions = arguments.get(whole.tokens), arguments.get(whole.positions)
    if (
        not (isinstance(x, Tensor) and isinstance(positions, Tensor))
        or x.ndim != 3
        or positions.shape[whole.along] < x.shape[1]
        or not all(isinstance(arguments.get(name), Tensor) for name in whole.by_frame)
    ):
        return "that are called differently than expected"
    tokens = x.shape[1]
    if (
        any(arguments.get(name) is not None for name in whole.absent)
        or any(arguments[each].ndim == 4 and len(arguments[each][0]) > 1 for each in whole.by_frame)
        or any(
            isinstance(value, Tensor) and tokens in value.shape[1:-1]
            for name, value in arguments.items()
            if name not in (whole.tokens, whole.positions)
        )
    ):
        return "whose tokens are treated differently"
    return None
