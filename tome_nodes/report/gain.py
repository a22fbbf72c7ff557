"""Whether a run was faster than the unpatched model: from the times of its steps, or its counts."""

from dataclasses import dataclass

from .. import reasons
from ..patching.evaluation import LEAST_SAVED
from ..settings.config import ToMeConfig
from ..tuning.search import FASTER
from .counts import Counts, StepTimes, of_two_kinds
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


def gain_of(
    counts: Counts,
    config: ToMeConfig,
    times: StepTimes,
    saved: float | None = None,
    shallowest: int = 1,
) -> Gain:
    """What a run gained in which tokens merged or steps were forecast.

    ``saved`` is the share of the multiplications that a merged step saves, None if that is not
    known. For ``shallowest``, see :class:`tome_nodes.report.last_run.LastRun`.
    """
    steps = counts.forecast_steps or counts.shorter_steps
    kinds = of_two_kinds(times, steps)
    what = ("with the model", "forecast") if counts.forecast_steps else ("on all tokens", "merged")
    if kinds is None:
        words = _expected(counts, config, saved)
    else:
        short, long = kinds
        each = f"a step took {seconds(long)} {what[0]}, {seconds(short)} {what[1]}"
        saved = len(steps) * (long - short)
        share = saved / (long * counts.total_steps) if long else 0
        is_faster = short * FASTER < long
        words = f"saved {seconds(saved)} ({share:.0%}): {each}" if is_faster else f"no gain: {each}"
    if shallowest > 1 and config.scope == "module" and not config.merge_mlp:
        words += f"; {reasons.LITTLE_ATTENTION}"
    return Gain(words, kinds is not None)


def _expected(counts: Counts, config: ToMeConfig, saved: float | None) -> str:
    """What a run is expected to have gained, as far as its counts tell."""
    if saved is not None:
        expected = "expected, not measured" if saved >= LEAST_SAVED else "no gain expected"
        return f"{expected}: {saved:.0%} fewer multiplications in a merged step"
    before = after = 0
    for tokens, by_block in counts.merged.items():
        for lengths in by_block.values():
            merged = min(lengths)
            before += tokens * tokens
            after += merged * (tokens if config.attn_tokens == "k,v" else merged)
    where = "these blocks' self-attention"
    return f"expected, not measured: {1 - after / before:.0%} fewer multiplications in {where}"
