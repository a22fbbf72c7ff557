"""Blocks that merge queries, keys and values where attention is called.

By then they are projected, normalised and rotated by position, so all that is needed of a block is
where the pictures are in its sequence. Everything else, such as text, stays as it is.
"""

from typing import Any, ClassVar

from torch import Tensor, nn

from .layout import Layout
from .plan import Plan
from .site import BlockSite, Forward, Override


class CallSite(BlockSite):
    """A block that calls attention through its host; see :meth:`merging`."""

    whole_blocks_stay: ClassVar[str] = "as this kind of model does not merge whole blocks"
    """The reason to report if the scope is wider than single modules."""

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
        config, tokens = self.stack.sites.config, k.shape[1]
        self.notes.tokens = tokens
        layout = self.layout(tokens, kwargs)
        if layout is None:
            self.notes.reason = self.tokens_changed
            return None, None
        worthy = self.worthy(layout)
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

    def log_sizes(self, plan: Plan, like: Tensor) -> Tensor | None:
        """What to add to the logits of merged keys, ``[batch, keys]``; None for nothing."""
        if not self.stack.sites.config.proportional_attn or plan.is_even():
            return None
        return plan.log_sizes().to(like.dtype)

    def _note_block(self, forward: Forward) -> Forward:
        config = self.stack.sites.config

        def block_forward(*args: Any, **kwargs: Any) -> Any:
            # The number of tokens is not known until attention is called.
            self.notes.tokens = 0
            self.notes.fell_back = None if config.scope == "module" else self.whole_blocks_stay
            self.notes.reason = (
                self.attention_replaced
                if config.merge_attn
                else "merge_attn is off, and nothing else merges in models of this kind"
            )
            return forward(*args, **kwargs)

        return block_forward

    def _merge_calls(self, forward: Forward) -> Forward:
        def attention_forward(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **self.merging(kwargs))

        return attention_forward
