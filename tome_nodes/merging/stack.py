"""Consecutive blocks of a model, and what they share while tokens pass through them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..strategies.plan import Plan
from .key_weights import KeyWeights


@dataclass(eq=False)
class StackPass:
    """One pass of a feature map through a stack.

    Attributes:
        shape: the shape of the feature map, ``[batch, channels, height, width]``.
        plan: the plan that serves all blocks; None if each makes its own.
        tokens: the tokens that entered the first block, ``[batch, tokens, channels]``, if the
            blocks run on merged tokens as one; else None.
        merged: ``tokens`` merged, if the blocks run as one; else None.
        keys: what merged keys weigh in all self-attentions, once that is known.
    """

    shape: Sequence[int]
    plan: Plan | None = None
    tokens: Tensor | None = None
    merged: Tensor | None = None
    keys: KeyWeights | None = None


@dataclass(eq=False)
class Stack:
    """Consecutive blocks.

    Attributes:
        name: its path within the model.
        module: the module that holds the blocks.
        blocks: the modules of the blocks, in running order.
        level: how many times smaller than the latent its feature map is; 1 in a transformer.
        current: the pass that goes on, if its blocks share anything; else None.
    """

    name: str
    module: nn.Module
    blocks: Sequence[nn.Module]
    level: int = 1
    current: StackPass | None = None

    def path(self, index: int) -> str:
        """The path of a block within the model."""
        return f"{self.name}.{index}"

    @property
    def is_of_video(self) -> bool:
        """Whether a temporal block, which needs all tokens, runs after each of its blocks."""
        return hasattr(self.module, "time_stack")
