"""What a preset decides about UNets beyond the options: how much merges where, and when."""

import math
from dataclasses import dataclass

LEAST_SAVED = 0.05
"""The least share of an evaluation's work worth saving. Merging itself takes about as long."""


@dataclass(frozen=True)
class Growth:
    """How the share that merges grows with a feature map.

    Attributes:
        rate: how fast it grows.
        tokens: the number of tokens of a map up to which it stays the same.
    """

    rate: float
    tokens: float

    def share(self, ratio: float, tokens: int) -> float:
        """The share of a feature map's tokens that merges: more, the larger the map is.

        In a larger map of the same picture, each token says less. The share that stays is that of
        small maps, raised to a power that grows with the logarithm of the map's side
        (benchmarks/FIDELITY.md).

        Args:
            ratio: the share in maps of up to :attr:`tokens` tokens.
            tokens: the number of tokens of the map.
        """
        if tokens <= self.tokens:
            return ratio
        return 1 - (1 - ratio) ** (1 + self.rate * math.log2(tokens / self.tokens) / 2)


EVEN = Growth(0.0, math.inf)
"""The same share of all maps."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How merging depends on the size of feature maps; by default, it depends on options alone.

    A level is how many times smaller than the latent its maps are.

    Attributes:
        keys: how the merged share grows where only keys and values merge.
        stacks: how the merged share grows where whole stacks run on merged tokens.
        larger_cells: further sizes of cells, height and width, the smallest first, for shares that
            are too large for the configured cells.
        keys_down_to: the deepest level at which only keys and values merge, by one plan for each
            stack, whatever the scope is.
        deeper_from: maps of at least this many tokens merge at any level.
        least_tokens: the smallest map that merges, unless ``min_tokens`` says so. SDXL's smallest
            maps with attention have about 1,000 tokens at the sizes that it was trained on.
        least_saved: if a smaller share of an evaluation's work would be saved, nothing merges.
        shallow: the ratio times this decides how many steps are shallow.
        more: the preset to recommend where this one saves too little; empty if there is none.
    """

    keys: Growth = EVEN
    stacks: Growth = EVEN
    larger_cells: tuple[tuple[int, int], ...] = ()
    keys_down_to: float = 0
    deeper_from: float = math.inf
    least_tokens: int = 768
    least_saved: float = 0.0
    shallow: float = 1.0
    more: str = ""


PLAIN = Policy()
"""Merging depends on the options alone."""
