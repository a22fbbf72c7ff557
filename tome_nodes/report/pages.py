"""The report of a sampling run: its text, and the picture of a view."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..run import log_line
from ..run.counts import Counts
from ..run.record import RunRecord
from ..run.recording import Recording
from ..settings.options import CHART, MERGE_MAP
from ..strategies import strategy_class
from ..tuning import summary as tuning_words
from ..tuning.search import LIKENESS, SPEED, Measured
from ..tuning.summary import Found
from . import drawing

_MANY, _ENOUGH = 16, 12
"""From ``_MANY`` steps on, merging whole stacks is no better than taking fewer steps; a hint then
recommends ``_ENOUGH`` steps (benchmarks/FIDELITY.md)."""


@dataclass(frozen=True)
class Page:
    """A picture, ``[height, width, 3]`` uint8, and a text."""

    picture: np.ndarray
    text: str


NOT_MERGING = (
    "ToMe is not on this model",
    "ToMe is not on this model.",
    "Hint: connect the model that comes out of ToMe Patch Model, with a ratio above 0.",
)
UNMEASURED = (
    "to see what it saved, ask ToMe Tune, or run again with ratio 0 and compare the times in the "
    "log."
)
NO_RUN = (
    "No run to report",
    "No run of this model is known that made these samples.",
    "Hint: connect the sampler's model, and the samples it returns. If "
    "they are already connected this way, sample again with another seed.",
)


def notice(title: str, *sentences: str) -> Page:
    """A page that says why there is nothing to report."""
    return Page(drawing.page(title, sentences), "\n".join(sentences))


def report_of(
    run: RunRecord,
    view: str = MERGE_MAP,
    level: int = -1,
    step: int = -1,
    frame: int = -1,
    pictures: np.ndarray | None = None,
) -> Page:
    """The report of a run.

    Args:
        run: the record of the run.
        view: one of the choices of :data:`tome_nodes.settings.options.VIEW`. If the run has
            nothing to show in this view, the picture says why.
        level: the level of the feature maps to draw; -1 for the largest maps.
        step: which step to draw, counted from 1; -1 for the last that merged.
        frame: which frame of a video's latent to draw, counted from 1; -1 for the middle one.
        pictures: ``[count, height, width, channels]`` float from 0 to 1, the decoded picture or
            video to draw under a map.
    """
    lines = in_words(run)
    recording, counts = run.recording, run.counts
    if recording is None or not recording.levels:
        drawn = drawing.page("ToMe Report", lines, _steps(counts))
    elif view == CHART:
        drawn = _chart(recording, counts)
    else:
        drawn = _map(recording, counts.total_steps, level, step, frame, pictures)
    return Page(drawn, "\n".join(lines))


def _steps(counts: Counts) -> np.ndarray | None:
    """The steps of a run, drawn; None if none was skipped."""
    skipped = counts.skipped_steps
    if not skipped:
        return None
    words = ("the model ran", "forecast") if counts.forecast_steps else ("whole", "shallow")
    return drawing.steps([step in skipped for step in range(counts.total_steps)], *words)


def tuning_page(findings: Found) -> Page:
    """The page of ToMe Tune: what it found, and everything that it tried, the fastest last."""
    lines = tuning_words.in_words(findings)
    tried = {
        name: measured for name, measured in findings.tried.items() if measured.obstacle is None
    }
    if not tried:
        return notice("ToMe Tune", *lines)
    taken = "unpatched" if findings.candidate is None else str(findings.candidate)
    tried = {"unpatched": Measured(1.0, 1.0, 0.0), **tried}
    names = sorted(tried, key=lambda name: tried[name].speed)
    speeds, changes = zip(*((tried[name].speed, tried[name].change) for name in names), strict=True)
    wished = {findings.wish.goal: findings.wish.amount}
    columns = [
        drawing.Column("times as fast", speeds, [f"{x:.2f}" for x in speeds], wished.get(SPEED)),
        drawing.Column("change", changes, [f"{x:.3f}" for x in changes], wished.get(LIKENESS)),
    ]
    bars = drawing.bars(names, columns, [name == taken for name in names])
    drawn = drawing.page("ToMe Tune", [*tuning_words.result(findings)], bars)
    return Page(drawn, "\n".join(lines))


def in_words(run: RunRecord) -> list[str]:
    """The report of a run, line by line: what happened, whether it helped, what to do, the rest."""
    counts = run.counts
    hint = hint_for(run)
    if run.nothing is not None:
        lines = [run.nothing[0].upper() + run.nothing[1:]]
    else:
        lines = [
            f"Done: {log_line.done(counts)}",
            f"Helped: {'not known' if run.gain is None else run.gain.words}",
        ]
        if run.gain is not None and not run.gain.is_measured:
            hint = hint or UNMEASURED
    if hint is not None:
        lines += [f"Hint: {hint}"]
    if counts.merged:
        steps = f"Steps: merged in {len(counts.merged_steps)} of {counts.total_steps}"
        lines += [f"Tokens: {log_line.sizes(counts, '')}", _times_in_words(run.recording), steps]
    if counts.shallow_steps:
        lines += [f"Shallow: {', '.join(str(step + 1) for step in sorted(counts.shallow_steps))}"]
    lines += [f"Model: {run.model}"]
    config = run.config
    merges = counts.merged or run.unmerged is not None
    settings = [log_line.ratio(config)]
    if merges:
        settings = log_line.settings(config, counts, defaults=True)
    if (config.start_percent, config.end_percent) != (0, 1):
        settings += [f"start_percent {config.start_percent:g}, end_percent {config.end_percent:g}"]
    lines += [f"Settings: {', '.join(settings)}"]
    if run.backend is not None:
        lines += [f"Backend: {run.backend}"]
    return [*lines, *(f"Note: {deviation}" for deviation in log_line.deviations(counts))]


def hint_for(run: RunRecord) -> str | None:
    """What to change, if the settings gain nothing or less than they could; else None."""
    config, counts, strategy = run.config, run.counts, strategy_class(run.config)
    if not counts.merged:
        return None
    least = config.policy.least_tokens
    if max(counts.merged) < least:
        return (
            f"merging is worth it from about {least} tokens on; make the picture larger, or, under "
            "preset custom, set min_tokens to 0 to leave small maps alone."
        )
    cap = strategy.ratio_cap(config, counts.frames)
    if config.largest_ratio > cap:
        return (
            f"the cells merge no more than {cap:.2f}; under preset custom, a larger sx or sy "
            "merges more."
        )
    if config.scope == "stack" and not config.policy.keys_down_to and counts.total_steps >= _MANY:
        return (
            f"in {counts.total_steps} steps, whole stacks change the picture as much as fewer "
            f"steps would; {_ENOUGH} steps with the same settings save more."
        )
    return None


def _times_in_words(recording: Recording | None) -> str:
    if recording is None:
        return (
            "Details: maps and times were not recorded, because no report was connected when the "
            "model sampled. Change the seed and run again to get them."
        )
    return f"Time: {log_line.seconds(recording.seconds)}"


def _map(
    recording: Recording,
    total: int,
    level: int,
    step: int,
    frame: int,
    pictures: np.ndarray | None,
) -> np.ndarray:
    """See :func:`report_of`; ``total`` is the number of steps of the run."""
    levels = recording.levels
    level = next(iter(levels)) if level == -1 else level
    if level not in levels:
        return _absent("level", level, levels)
    grid = levels[level]
    frame = grid.frames // 2 + 1 if frame == -1 else frame
    frames = range(1, grid.frames + 1)
    if frame not in frames:
        return _absent("frame", frame, frames)
    by_step = {at + 1: slots for (at, of), slots in recording.slots.items() if of == grid}
    step = max(by_step) if step == -1 else step
    if step not in by_step:
        return _absent("step", step, by_step)
    slots = by_step[step]
    picture = None
    if pictures is not None:
        picture = pictures[round((frame - 1) / max(1, grid.frames - 1) * (len(pictures) - 1))]
    place = f"level {level}, {grid.width} x {grid.height} tokens"
    if grid.frames > 1:
        place += f", frame {frame} of {grid.frames}"
    groups = f"{grid.tokens} tokens in {int(slots.max()) + 1} groups"
    lines = [place, f"step {step} of {total}, {groups}"]
    return drawing.page("Merge map", lines, drawing.merge_map(slots, picture, frame - 1))


def _absent(name: str, value: int, there: Iterable[int]) -> np.ndarray:
    """A page that says that there is no such map, and lists those that there are."""
    numbers = sorted(there)
    listed = " or ".join(map(str, numbers))
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        listed = f"{numbers[0]} to {numbers[-1]}"
    hint = f"Hint: set {name} to {listed}, or to -1."
    return drawing.page(f"There is no merge map of {name} {value}", [hint])


def _chart(recording: Recording, counts: Counts) -> np.ndarray:
    names = [name.replace(".transformer_blocks", "") for name in recording.blocks]
    blocks = [*recording.blocks.values()]
    is_merged = [block.after < block.before for block in blocks]
    sizes = [
        f"{block.before} to {block.after}" if merged else f"{block.before}"
        for block, merged in zip(blocks, is_merged, strict=True)
    ]
    columns = [drawing.Column("tokens", [block.after for block in blocks], sizes)]
    times = [1000 * block.seconds for block in blocks if block.seconds is not None]
    if len(times) == len(blocks):
        columns += [drawing.Column("mean, ms", times, [f"{time:.3g}" for time in times])]
    line = "The fewest tokens that each block ran on, and how long it took. Orange blocks merged."
    steps, bars = _steps(counts), drawing.bars(names, columns, is_merged)
    drawn = bars if steps is None else drawing.stacked(steps, bars)
    return drawing.page("Chart", [line], drawn)
