"""The settings of token merging: every option, its default, its range and what it means."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "ratio": (0.0, 0.95),
        "sx": (1, 8),
        "sy": (1, 8),
        "st": (0, 8),
        "seed": (0, 2**64 - 1),
        "start_percent": (0.0, 1.0),
        "end_percent": (0.0, 1.0),
        "ratio_end": (-1.0, 0.95),
        "reuse_steps": (0, 100),
        "min_tokens": (0, 2**20),
        "kv_ratio": (-1.0, 0.95),
    }
)
"""Inclusive limits of the numeric options."""

MAX_DOWNSAMPLE_CHOICES = ("auto", 1, 2, 4, 8)

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "strategy": ("bipartite", "window", "pool", "cluster"),
        "scope": ("module", "block", "stack"),
        "attn_tokens": ("q,k,v", "q", "k,v"),
        "backend": ("auto", "torch", "triton"),
    }
)
"""What the options that are words may be."""


@dataclass(frozen=True, kw_only=True)
class ToMeConfig:
    """Validated settings of one patched model; the only place that holds defaults.

    The options and their meaning follow section 4 of arXiv 2303.17604 and its code, except that
    ``max_downsample`` may be ``"auto"`` and the percent limits are additional.

    Attributes:
        ratio: share of the tokens of a feature map to merge away. One destination token in each
            cell always stays, so the share in effect is at most ``1 - 1 / (sx * sy)``.
        max_downsample: merge where the feature map is at most this many times smaller than the
            latent; ``"auto"`` takes the shallowest level at which the model has attention, and in
            scope ``block`` and ``stack`` all down to the one that has most blocks.
        sx: width of a cell in tokens.
        sy: height of a cell in tokens.
        st: length of a cell in frames, for video, where a cell is ``sx`` tokens of a row in ``st``
            frames; 1 has cells of ``sx`` by ``sy`` within each frame; 0 is 2 to 5, the length that
            divides the frames best.
        use_rand: pick the destination of each cell at random; otherwise its top left token.
        seed: seed of the random picks.
        merge_attn: merge the tokens that enter self-attention.
        merge_crossattn: merge the tokens that enter cross-attention.
        merge_mlp: merge the tokens that enter the feed-forward network.
        start_percent: point of the sampling at which merging starts, 0 being the noisiest.
        end_percent: point of the sampling at which merging ends.
        strategy: how tokens are grouped: ``bipartite`` is the paper's matching over the whole map;
            ``window`` matches within windows of 16x16 tokens; ``pool`` merges whole cells without
            looking at them; ``cluster`` groups tokens by their similarity to the mean token.
        scope: what runs on merged tokens: the modules switched on above, each on its own; or the
            whole transformer ``block``; or the whole ``stack`` of blocks of one level.
        attn_tokens: which tokens of self-attention are merged, in module scope.
        reuse_steps: 0 makes a plan for each block, as the paper does; k shares one among the
            blocks of a level and keeps it for k steps.
        ratio_end: ratio at the last step, to which ``ratio`` moves in equal parts; -1 keeps it.
        min_tokens: merge feature maps of at least this many tokens; 0 is where it is worth it, as
            each strategy has it.
        backend: what merging runs on: ``torch``, or ``triton`` kernels; ``auto`` takes Triton
            where it can be had.
        kv_ratio: share of the keys and values of self-attention to merge, in module scope; -1 is
            ``ratio``. Both shares come from one matching, the smaller one being its better part.
        proportional_attn: let a merged key weigh in self-attention as much as the tokens it stands
            for: the logarithm of their number is added to its logits (Bolya et al., ICLR 2023),
            and it keeps their length. Off is the attention of the paper.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range, or two of them contradict each other. The message
            names the option, its value and what is allowed.
    """

    ratio: float = 0.5
    max_downsample: int | Literal["auto"] = "auto"
    sx: int = 2
    sy: int = 2
    use_rand: bool = True
    seed: int = 0
    merge_attn: bool = True
    merge_crossattn: bool = False
    merge_mlp: bool = False
    start_percent: float = 0.0
    end_percent: float = 1.0
    strategy: str = "bipartite"
    scope: str = "module"
    attn_tokens: str = "q,k,v"
    reuse_steps: int = 0
    ratio_end: float = -1.0
    min_tokens: int = 0
    backend: str = "auto"
    kv_ratio: float = -1.0
    proportional_attn: bool = True
    st: int = 0

    def __post_init__(self) -> None:
        switches = ("use_rand", "merge_attn", "merge_crossattn", "merge_mlp", "proportional_attn")
        for name in switches:
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}={value!r} is not allowed: it must be true or false")
        for name in ("sx", "sy", "st", "seed", "reuse_steps", "min_tokens"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} is not allowed: it must be a whole number")
        for name in ("ratio", "start_percent", "end_percent", "ratio_end", "kv_ratio"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}={value!r} is not allowed: it must be a number")
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if math.isnan(value) or not least <= value <= most:
                raise ValueError(
                    f"{name}={value} is not allowed: it must be from {least} to {most}"
                )
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(
                    f"{name}={value!r} is not allowed: it must be one of {' | '.join(choices)}"
                )
        if self.max_downsample not in MAX_DOWNSAMPLE_CHOICES:
            raise ValueError(
                f"max_downsample={self.max_downsample!r} is not allowed: it must be one of "
                + ", ".join(map(str, MAX_DOWNSAMPLE_CHOICES))
            )
        if self.sx * self.sy == 1:
            raise ValueError(
                "sx=1 with sy=1 is not allowed: a cell of one token has nothing to merge; "
                "sx or sy must be at least 2"
            )
        for name in ("ratio_end", "kv_ratio"):
            if -1 < (value := getattr(self, name)) < 0:
                raise ValueError(
                    f"{name}={value} is not allowed: it must be -1, to keep ratio, "
                    "or from 0 to 0.95"
                )
        if self.start_percent > self.end_percent:
            raise ValueError(
                f"start_percent={self.start_percent} is not allowed: it must not be greater than "
                f"end_percent={self.end_percent}"
            )

    @property
    def merges_nothing(self) -> bool:
        """Whether every ratio is 0."""
        return max(self.ratio, self.ratio_end, self.kv_ratio) <= 0
