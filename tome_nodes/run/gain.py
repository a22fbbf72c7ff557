"""Whether a run was faster than the unpatched model: from the times of its steps, or its counts."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from .. import reasons
from ..settings.config import ToMeConfig
from ..settings.policy import LEAST_SAVED
from ..tuning.search import FASTER
from .counts import Counts
from .log_line import seconds


@dataclass(frozen=True)
class Gain:
    """What a run gained.

    Attributes:
        words: what it gained, or that it gained nothing.
        is_measured: whether that was measured in the run itself.
    """

    words: str
    is_measured: bool


def _medians(begun: Mapping[int, float], steps: Set[int]) -> tuple[float, float] | None:
    """The median seconds of some steps, and of the others; None if one of them is not known.

    The first step does not count, since a device warms up in it, nor does the last, whose end is
    not known.
    """
    kinds: tuple[list[float], list[float]] = [], []
    for (step, start), (_, end) in [*pairwise(begun.items())][1:]:
        kinds[step not in steps].append(end - start)
    return (median(kinds[0]), median(kinds[1])) if all(kinds) else None


def gain_of(
    counts: Counts,
    config: ToMeConfig,
    begun: Mapping[int, float],
    saved: float | None = None,
    shallowest: int = 1,
    gpu_waited: bool = False,
) -> Gain:
    """What a run gained by merging, forecasts or shallow steps.

    Args:
        counts: what merged and was skipped.
        config: the settings.
        begun: when each step began on the device, in seconds.
        saved: the share of the multiplications that a merged step saves; None if it is not known.
        shallowest: the level of the largest feature map with attention.
        gpu_waited: whether the GPU waited for its CPU.
    """
    steps = counts.skipped_steps or counts.merged_steps
    kinds = _medians(begun, steps)
    gain = Gain(_expected(counts, config, saved), False)
    if kinds is not None:
        short, long = kinds
        is_forecast, is_skipped = bool(counts.forecast_steps), bool(counts.skipped_steps)
        one, other = "on all tokens", "merged"
        if is_skipped:
            one, other = ("with the model", "forecast") if is_forecast else ("whole", "shallow")
        words = f"a step took {seconds(long)} {one}, {seconds(short)} {other}"
        if is_skipped and counts.merged:
            # How long the model would take on all tokens is not known.
            words += f"; {_expected(counts, config, saved)}"
        if short * FASTER < long:
            less, total = len(steps) * (long - short), long * counts.total_steps
            return Gain(f"saved {seconds(less)} ({less / total:.0%}): {words}", True)
        gain = Gain(f"no gain: {words}", True)
    words = gain.words
    if gpu_waited:
        words += f"; {reasons.GPU_WAITS}"
    is_of_attention = config.scope == "module" and not config.merge_mlp
    if counts.merged and shallowest > 1 and is_of_attention:
        words += f"; {reasons.LITTLE_ATTENTION}"
    return Gain(words, gain.is_measured)


def _expected(counts: Counts, config: ToMeConfig, saved: float | None) -> str:
    """What a run is expected to have gained, as far as its counts tell."""
    if not counts.merged:
        return "not known"
    left_out = set[str]().union(*counts.left_out.values())
    if saved is not None and not left_out:
        expected = "expected, not measured" if saved >= LEAST_SAVED else "no gain expected"
        return f"{expected}: {saved:.0%} fewer multiplications in a merged step"
    before = after = 0
    for tokens, by_block in counts.merged.items():
        for block, lengths in by_block.items():
            if block not in left_out:
                merged = min(lengths)
                before += tokens * tokens
                after += merged * (tokens if config.attn_tokens == "k,v" else merged)
    if not before:
        return "what that saves is not known"
    where = "these blocks' self-attention"
    return f"expected, not measured: {1 - after / before:.0%} fewer multiplications in {where}"
