"""What a run costs: the work of its evaluations, counted and not timed.

For a transformer, an evaluation on fewer tokens costs what it would in blocks of a published width.
The blocks of a small judge spend their time elsewhere, and would flatter merging. For a UNet, where
only a part merges, the multiplications are counted where they are made.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


class Meter:
    """Adds up what the evaluations of a model cost.

    Args:
        tokens: the number of tokens of a picture, with those of its prompt if both are in the same
            attention; None for a UNet.
        attention: the share of attention in the multiplications of a block on all tokens.

    Attributes:
        cost: the cost so far. For a transformer, 1 for each sample evaluated on all tokens; for a
            UNet, its multiplications and additions.
        evaluations: how many there were; several samples at once count as one.
    """

    def __init__(self, tokens: int | None, attention: float = 0.0):
        self.cost, self.evaluations = 0.0, 0
        self._tokens, self._attention = tokens, attention

    @contextmanager
    def watching(self, model: ModelPatcher, keys: float = 1.0) -> Iterator[None]:
        """Count what a model does meanwhile; ``keys`` is the share of its keys that is left."""

        def count(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            samples, tokens = arguments[0].shape[:2]
            if self._tokens is not None:
                share = tokens / self._tokens
                self.cost += samples * work(share, self._attention, keys)
            self.evaluations += 1

        operations = FlopCounterMode(display=False, custom_mapping=ON_CPU)
        handle = _layer(model.model.diffusion_model).register_forward_pre_hook(count)
        try:
            if self._tokens is None:
                with operations:
                    yield
                self.cost += operations.get_total_flops()
            else:
                yield
        finally:
            handle.remove()


def _layer(network: Any) -> nn.Module:
    """A layer that every evaluation runs; in a transformer, it is in a block in the middle."""
    if hasattr(network, "single_blocks"):
        blocks = network.single_blocks
        return blocks[len(blocks) // 2].linear1
    if hasattr(network, "blocks"):
        return network.blocks[len(network.blocks) // 2].ffn[0]
    return network.out


def _attention_operations(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """The operations of an attention, from the shapes ``[batch, heads, tokens, channels]``."""
    return 2 * prod(query[:3]) * key[2] * (query[3] + value[3])


ON_CPU: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_operations
}
"""Attention functions whose cost PyTorch does not count by itself."""


def attention_share(tokens: int, width: int, linear: float) -> float:
    """The share of attention in the multiplications of a block.

    Args:
        tokens: the length of the sequence.
        width: channels of a token.
        linear: multiplications per token in the linear layers, over ``width**2``.
    """
    attention = 2 * tokens * width
    return attention / (attention + linear * width**2)


def work(tokens: float, attention: float, keys: float = 1.0) -> float:
    """The multiplications of a block, with 1 for all tokens.

    Args:
        tokens: the share of tokens that it runs on.
        attention: the share of attention in the multiplications on all tokens.
        keys: the share of these tokens that serve as keys.
    """
    return tokens * (1 - attention) + tokens**2 * keys * attention
