"""What a preset decides about UNets beyond the options: how much merges where, and when."""

import math
from dataclasses import dataclass

LEAST_SAVED = 0.05
"""To save a smaller share of an evaluation's work costs about as much time as it saves."""


@dataclass(frozen=True)
class Growth:
    """How the share that merges grows with a feature map.

    Attributes:
        rate: how fast it grows.
        tokens: the number of tokens from which on it grows.
    """

    rate: float
    tokens: float

    def share(self, ratio: float, tokens: int) -> float:
        """The share of a feature map's tokens that merges: more, the larger the map is.

        A larger map of the same picture says less in each token. The share that stays is a power
        of what stays in small maps, which grows with the logarithm of the map's side
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
    """How merging goes by the size of feature maps; the default goes by the options alone.

    A level is how many times smaller than the latent its maps are.

    Attributes:
        keys: how the share of keys and values that merges grows.
        stacks: how the share of all tokens of a stack that merges grows.
        larger_cells: further sizes of cells, height and width, for shares that the configured ones
            do not allow; the smallest first.
        keys_down_to: the deepest level at which only keys and values merge, by one plan for each
            stack, whatever the scope is.
        deeper_from: from this many tokens on, maps merge at any level.
        least_tokens: the smallest map that merges, unless ``min_tokens`` says so. SDXL's smallest
            maps with attention have about 1,000 tokens at the sizes that it was trained on.
        least_saved: if a smaller share of an evaluation's work would be saved, nothing merges.
        shallow: the part of the ratio that goes to shallow steps.
        more: the preset to take where this one would save too little; empty if there is none.
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
"""Merging goes by the options alone."""
