"""What one sampling run merged, and the line that tells it."""

from collections import Counter

from .config import ToMeConfig


class RunStatistics:
    """Counts of one sampling run.

    Attributes:
        blocks_present: transformer blocks of the model.
        total_steps: of the run.
        largest_map: tokens of the largest feature map that entered a transformer block.
        fell_back: blocks that ran in module scope though a wider one was asked for.
        unweighted: why merged keys weighed as one token each.
        plans_made: how many plans were made.
        plans_reused: how often a block ran under the plan of another block or step.
    """

    def __init__(self) -> None:
        self.blocks_present = 0
        self.total_steps = 0
        self.largest_map = 0
        self.fell_back: set[str] = set()
        self.unweighted: set[str] = set()
        self.plans_made = 0
        self.plans_reused = 0
        self._merged: dict[tuple[int, int], set[str]] = {}
        self._steps: set[int] = set()
        self._reasons: Counter[str] = Counter()

    def merged(self, step: int, block: str, before: int, after: int) -> None:
        """Note that a block ran on ``after`` instead of ``before`` tokens in a step."""
        self._merged.setdefault((before, after), set()).add(block)
        self._steps.add(step)

    def planned(self, made: bool) -> None:
        """Note that a block had a plan, which it made or got from another block or step."""
        if made:
            self.plans_made += 1
        else:
            self.plans_reused += 1

    def skipped(self, reason: str) -> None:
        """Note why a block, or a whole step, ran on all its tokens."""
        self._reasons[reason] += 1

    @property
    def merged_steps(self) -> int:
        """In how many steps anything merged."""
        return len(self._steps)

    @property
    def merged_block_count(self) -> int:
        return len(set().union(*self._merged.values()))

    @property
    def merged_anything(self) -> bool:
        return bool(self._merged)

    def obstacle(self, max_downsample: int, shallowest: int) -> str:
        """Why nothing was merged: the reason noted most often, or that no level was to merge.

        Args:
            max_downsample: how many times smaller than the latent a merged level may be.
            shallowest: how many times smaller the largest level of the model is.
        """
        if self._reasons:
            return self._reasons.most_common(1)[0][0]
        return (
            f"max_downsample={max_downsample} leaves out every transformer block: this model's "
            f"begin at {shallowest}; set it to auto, or take preset fast"
        )

    def summary(self) -> str:
        """Such as ``merged 5/16 blocks (4096 -> 2048 tokens), 20/20 steps``."""
        return f"{self.merged_blocks()}, {len(self._steps)}/{self.total_steps} steps"

    def deviations(self) -> list[str]:
        """What went otherwise than the settings say, in a few words each."""
        fell_back = [f"module scope in {len(self.fell_back)} that are patched"]
        return [
            *(fell_back if self.fell_back else ()),
            *(f"merged keys weigh as one token ({reason})" for reason in sorted(self.unweighted)),
        ]

    def merged_blocks(self) -> str:
        """Such as ``merged 5/16 blocks (4096 -> 2048 tokens)``."""
        blocks = f"{self.merged_block_count}/{self.blocks_present} blocks"
        return f"merged {blocks} ({self.sizes_in_words()})"

    def sizes_in_words(self) -> str:
        """Such as ``4096 -> 2048 tokens x5, 1024 -> 512 tokens x6``."""
        return ", ".join(
            f"{before} -> {self._after(before)} tokens"
            + (f" x{len(self._blocks(before))}" if len(self.lengths) > 1 else "")
            for before in self.lengths
        )

    @property
    def lengths(self) -> list[int]:
        """The numbers of tokens that were merged, from the most to the least."""
        return sorted({before for before, _ in self._merged}, reverse=True)

    def _blocks(self, before: int) -> set[str]:
        return set().union(*(names for size, names in self._merged.items() if size[0] == before))

    def _after(self, before: int) -> str:
        """The one length that ``before`` became, or the first and last of several."""
        lengths = sorted(after for size, after in self._merged if size == before)
        return str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]}-{lengths[-1]}"


def settings_in_words(config: ToMeConfig, defaults: bool = False) -> list[str]:
    """What a report tells of the settings, such as ``["ratio 0.90 capped at 0.75", "window"]``.

    Args:
        config: the settings.
        defaults: whether to tell of strategy and scope even where they are the default.
    """
    scope = [] if config.scope == "module" and not defaults else [f"{config.scope} scope"]
    if config.strategy == "pool":
        return [f"pool of {config.sy}x{config.sx} cells", *scope]
    kv_ratio = [] if config.kv_ratio < 0 else [f"kv_ratio {config.kv_ratio:.2f}"]
    ratio = f"ratio {config.ratio:.2f}"
    if config.ratio_end >= 0:
        ratio += f" to {config.ratio_end:.2f}"
    if config.strategy != "cluster" and max(config.ratio, config.ratio_end) > config.ratio_cap:
        ratio += f" capped at {config.ratio_cap:.2f}"
    strategy = [] if config.strategy == "bipartite" and not defaults else [config.strategy]
    if config.scope == "module" and config.attn_tokens != "q,k,v":
        ratio += f" of {config.attn_tokens} in self-attention"
    return [ratio, *kv_ratio, *strategy, *scope]
