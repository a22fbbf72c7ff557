"""How much of a UNet's evaluation merging saves, counted in multiplications.

Only shapes count, so the answer is the same on every machine. What depends on the number of text
tokens is left out: it is small, and merging does not change it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..ops import TORCH
from ..settings.config import ToMeConfig
from ..strategies import make_strategy
from ..strategies.plan import Grid
from ..strategies.strategy import Strategy

Layer = tuple[str, nn.Module, int]
"""A module of a UNet: its path, the module itself, and the level of its output."""


@dataclass(frozen=True)
class BlockWork:
    """The multiplications of one transformer block.

    Attributes:
        level: how many times smaller than the latent its feature map is.
        only_keys: whether a preset merges only its keys and values.
        channels: the channels of all heads of self-attention; 0 if it attends to text instead.
        queries: multiplications for each token in the linear layers for the queries and the output
            of self-attention.
        keys: the same in those for its keys and values.
        cross: the same in those of cross-attention, without the layers that see only text.
        mlp: the same in the feed-forward network.
    """

    level: int
    only_keys: bool
    channels: int
    queries: int
    keys: int
    cross: int
    mlp: int

    def on(self, queries: float, keys: float, cross: float, mlp: float) -> float:
        """The multiplications if each part runs on this many tokens."""
        attention = 2 * queries * keys * self.channels
        linear = self.queries * queries + self.keys * keys + self.cross * cross + self.mlp * mlp
        return attention + linear

    def saved(self, config: ToMeConfig, strategy: Strategy, grid: Grid, in_stacks: bool) -> float:
        """The multiplications that merging saves, in whole stacks or where the settings say.

        ``strategy`` says how many tokens of the block's grid stay.
        """
        tokens, policy = grid.tokens, config.policy
        growth = policy.stacks if in_stacks else policy.keys
        share = growth.share(config.largest_ratio, tokens)
        few = strategy.slots(grid, share)
        plain = self.on(tokens, tokens, tokens, tokens)
        if in_stacks:
            return plain - self.on(few, few, few, few)
        return plain - self.on(
            few if config.merge_attn and config.merges_queries else tokens,
            few if config.merge_attn else tokens,
            few if config.merge_crossattn else tokens,
            few if config.merge_mlp else tokens,
        )


class Work:
    """The multiplications of an evaluation of a UNet.

    Attributes:
        blocks: the multiplications of its transformer blocks.
    """

    def __init__(self, layers: Iterable[Layer], blocks: Sequence[BlockWork]):
        """Count what the ``layers`` of the UNet do beside its transformer ``blocks``."""
        self.blocks = blocks
        self._elsewhere: Counter[int] = Counter()
        for name, module, level in layers:
            if isinstance(module, nn.Conv2d):
                taps = module.kernel_size[0] * module.kernel_size[1]
                pairs = module.in_channels * module.out_channels // module.groups
                self._elsewhere[level] += taps * pairs
            elif name.endswith(("proj_in", "proj_out")):
                self._elsewhere[level] += _linear(module)

    def of(self, latent: Grid) -> float:
        """The multiplications of one evaluation that merges nothing."""
        elsewhere = (
            count * latent.downsampled(level).tokens for level, count in self._elsewhere.items()
        )
        blocks = (block.on(*[latent.downsampled(block.level).tokens] * 4) for block in self.blocks)
        return sum(elsewhere) + sum(blocks)

    def saved(self, config: ToMeConfig, latent: Grid, least: int, deepest: int) -> float:
        """The share of an evaluation's multiplications that merging saves.

        What merging costs does not count. A map of fewer tokens than ``least`` does not merge, nor
        one that is more than ``deepest`` times smaller than the latent.
        """
        saved = 0.0
        strategy = make_strategy(config, TORCH)
        for block in self.blocks:
            grid = latent.downsampled(block.level)
            if grid.tokens >= least and block.level <= deepest:
                in_stacks = config.scope == "stack" and not block.only_keys
                saved += block.saved(config, strategy, grid, in_stacks)
        return saved / self.of(latent)


def block_work(block: Any, level: int, only_keys: bool, attends_to_itself: bool) -> BlockWork:
    """The work of a block with the modules ``attn1``, ``attn2`` (or None) and ``ff``."""
    own = block.attn1
    keys = _linear(own.to_k) + _linear(own.to_v)
    others = _linear(own) - keys
    cross = 0 if block.attn2 is None else _linear(block.attn2.to_q) + _linear(block.attn2.to_out)
    if not attends_to_itself:
        return BlockWork(level, only_keys, 0, 0, 0, cross + others, _linear(block.ff))
    return BlockWork(
        level, only_keys, own.to_q.out_features, others, keys, cross, _linear(block.ff)
    )


def has_projections(block: Any) -> bool:
    """Whether a block has the layers that :func:`block_work` counts by name."""
    names = ("to_q", "to_k", "to_v")
    cross = block.attn2
    return all(hasattr(block.attn1, name) for name in names) and (
        cross is None or all(hasattr(cross, name) for name in ("to_q", "to_out"))
    )


def _linear(module: nn.Module) -> int:
    """The multiplications of the linear layers of a module for one token."""
    layers = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
    return sum(layer.in_features * layer.out_features for layer in layers)
