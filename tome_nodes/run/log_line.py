"""A run in words: the line in the log, the line on the node, and parts of a report."""

from collections.abc import Sequence

from ..merging.evaluation import Evaluation
from ..settings.config import ToMeConfig
from ..strategies import strategy_class
from .counts import Counts


def log_line(counts: Counts, config: ToMeConfig, backend: Sequence[str] = ()) -> str:
    """The log line of a run, or of the first call of its kind: what was merged and skipped.

    For example ``merged 5/16 blocks (4096 -> 2048 tokens), 20/20 steps, ratio 0.50``, or
    ``forecast 2/8 steps (4, 7)``, counted from 1, or ``shallow 11/20 steps``. ``backend`` is the
    backend in words; empty if it is plain torch, as expected.
    """
    done = []
    if counts.merged:
        blocks = f"{counts.merged_blocks}/{counts.blocks_present} blocks"
        done += [f"merged {blocks} ({sizes(counts)})"]
        if counts.total_steps:
            done.append(f"{len(counts.merged_steps)}/{counts.total_steps} steps")
    if counts.shallow_steps:
        done += [f"shallow {len(counts.shallow_steps)}/{counts.total_steps} steps"]
    if counts.forecast_steps:
        steps = ", ".join(str(step + 1) for step in sorted(counts.forecast_steps))
        done += [f"forecast {len(counts.forecast_steps)}/{counts.total_steps} steps ({steps})"]
    if counts.merged:
        done += settings(config, counts)
    return ", ".join([*done, *backend, *deviations(counts)])


def done(counts: Counts) -> str:
    """For example ``merged 10 of 16 blocks, shallow in 3 of 8 steps``."""
    parts = []
    if counts.merged:
        parts += [f"merged {counts.merged_blocks} of {counts.blocks_present} blocks"]
    if counts.shallow_steps:
        parts += [f"shallow in {len(counts.shallow_steps)} of {counts.total_steps} steps"]
    if counts.forecast_steps:
        parts += [f"forecast {len(counts.forecast_steps)} of {counts.total_steps} steps"]
    return ", ".join(parts)


def seconds(time: float) -> str:
    """A time in words, for example ``12.3 ms``."""
    if time >= 100:
        return f"{time:.0f} s"
    return f"{time:.3g} s" if time >= 0.1 else f"{1000 * time:.3g} ms"


def live_line(evaluation: Evaluation, step: str) -> str:
    """What one evaluation merged: number of blocks, tokens before and after, and the step.

    If nothing merged although merging was on, the line says why.
    """
    if evaluation.is_shallow:
        return f"shallow, {step}"
    merged = {(outcome.before, outcome.after) for outcome in evaluation.merged}
    if not merged:
        all_reasons = [evaluation.reason, *(outcome.reason for outcome in evaluation.outcomes)]
        known = [why for why in all_reasons if why is not None and evaluation.is_active]
        return f"all tokens, {step}" + (f": {known[0]}" if known else "")
    lengths = ", ".join(
        f"{before}\N{RIGHTWARDS ARROW}{after}" for before, after in sorted(merged, reverse=True)
    )
    count = sum(len(outcome.blocks) for outcome in evaluation.merged)
    return f"{count}/{evaluation.blocks} blocks, {lengths} tokens, {step}"


def sizes(counts: Counts, unit: str = " tokens") -> str:
    """For example ``4096 -> 2048 tokens x5, 1024 -> 512 tokens x6``."""
    parts = []
    for before, by_block in sorted(counts.merged.items(), reverse=True):
        lengths = set().union(*by_block.values())
        after = "-".join(map(str, sorted({min(lengths), max(lengths)})))
        count = f" x{len(by_block)}" if len(counts.merged) > 1 else ""
        parts.append(f"{before} -> {after}{unit}{count}")
    return ", ".join(parts)


def deviations(counts: Counts) -> list[str]:
    """What the run did differently from what the settings say, in a few words each."""
    patched = len(counts.patched_blocks)
    return [
        *([f"module scope in {patched} that are patched"] if patched else []),
        *(
            f"all tokens in the attention of {len(blocks)} ({reason})"
            for reason, blocks in sorted(counts.left_out.items())
        ),
        *(
            f"merged keys weigh as one token ({reason})"
            for reason in sorted(counts.unweighted_reasons)
        ),
    ]


def ratio(config: ToMeConfig) -> str:
    """The ratio in words; forecasts depend on no other setting."""
    return f"ratio {config.ratio:.2f}"


def settings(config: ToMeConfig, counts: Counts, defaults: bool = False) -> list[str]:
    """The settings in words, for example ``["ratio 0.90 capped at 0.75", "window"]``.

    Args:
        config: the settings.
        counts: what the run merged.
        defaults: whether to include strategy and scope even if they have their default values.
    """
    cap = strategy_class(config).ratio_cap(config, counts.frames)
    share = ratio(config)
    if config.ratio_end >= 0:
        share += f" to {config.ratio_end:.2f}"
    if config.largest_ratio > cap:
        share += f" capped at {cap:.2f}"
    if config.scope == "module" and config.attn_tokens == "k,v":
        share += " of keys and values in self-attention"
    words = [share]
    if defaults or config.strategy != ToMeConfig.strategy:
        words.append(config.strategy)
    if defaults or config.scope != ToMeConfig.scope:
        words.append(f"{config.scope} scope")
    if counts.merged_only_keys and config.scope == "stack":
        words.append("keys and values alone at the levels with most tokens")
    return words
