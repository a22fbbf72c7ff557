"""The report of a sampling run: its text, and the picture of a view."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ..settings.options import CHART, MERGE_MAP
from ..strategies import strategy_class
from ..tuning import summary as tuning_words
from ..tuning.search import SPEED, Measured
from ..tuning.summary import Found
from . import drawing, log_line
from .last_run import LastRun
from .recording import Recording

_MUCH = 0.1
"""If matching takes more than this share of a run's time, a hint says so."""

_MANY, _ENOUGH = 16, 12
"""From ``_MANY`` steps on, merging whole stacks is no better than taking fewer steps; a hint then
recommends ``_ENOUGH`` steps (benchmarks/FIDELITY.md)."""


PictureAt = Callable[[float], np.ndarray]
"""Returns a frame of a decoded video, given its position from 0 (first frame) to 1 (last frame).

``[height, width, channels]`` float from 0 to 1.
"""


@dataclass(frozen=True)
class Page:
    """A picture, ``[height, width, 3]`` uint8, and a text."""

    picture: np.ndarray
    text: str


NOT_MERGING = (
    "No token merging",
    "This model has no token merging.",
    "Hint: connect the model that comes out of ToMe Patch Model, with a ratio above 0.",
)
UNMEASURED = (
    "to see what it saved, let ToMe Tune measure it, or run again with ratio 0 and compare the "
    "times in the log."
)
NO_RUN = (
    "No run to report",
    "No run of this model is known that made these samples.",
    "Hint: connect the model that goes into the sampler, and the samples that come out of it. If "
    "they are already connected this way, sample again with another seed.",
)


def notice(title: str, *sentences: str) -> Page:
    """A page that says why there is nothing to report."""
    return Page(drawing.card(title, sentences), "\n".join(sentences))


def report_of(
    run: LastRun,
    view: str = MERGE_MAP,
    level: int = -1,
    step: int = -1,
    picture_at: PictureAt | None = None,
    frame: int = -1,
) -> Page:
    """The report of a run.

    Args:
        run: the record of the run.
        view: one of the choices of :data:`tome_nodes.settings.options.VIEW`. If the run has
            nothing to show in this view, the picture says why.
        level: which feature maps to draw, by how many times smaller than the latent they are; -1
            for the largest.
        step: which step to draw, counted from 1; -1 for the last that merged.
        picture_at: returns the decoded picture to draw under a map.
        frame: which frame of a video's latent to draw, counted from 1; -1 for the middle one.
    """
    lines = in_words(run)
    recording, counts = run.recording, run.counts
    if recording is None or not counts.merged_anything:
        forecast = [step in counts.forecast_steps for step in range(counts.total_steps)]
        drawn = drawing.card("ToMe Report", lines, forecast if any(forecast) else ())
    elif view == CHART:
        drawn = _chart(recording)
    else:
        drawn = _map(run, recording, level, step, picture_at, frame)
    return Page(drawn, "\n".join(lines))


def tuning_page(found: Found) -> Page:
    """The page of ToMe Tune: what it found, and everything that it tried, the fastest last."""
    lines = tuning_words.in_words(found)
    tried = {name: each for name, each in found.tried.items() if each.obstacle is None}
    if not tried:
        return Page(drawing.card("ToMe Tune", lines), "\n".join(lines))
    taken = "unpatched" if found.candidate is None else str(found.candidate)
    tried = {"unpatched": Measured(1.0, 1.0, 0.0), **tried}
    names = sorted(tried, key=lambda name: tried[name].speed)
    speeds, changes = zip(*((tried[name].speed, tried[name].change) for name in names), strict=True)
    amount, is_speed = found.wish.amount, found.wish.goal == SPEED
    columns = [
        drawing.Column(
            "times as fast",
            speeds,
            [f"{speed:.2f}" for speed in speeds],
            amount if is_speed else None,
        ),
        drawing.Column(
            "change",
            changes,
            [f"{change:.3f}" for change in changes],
            None if is_speed else amount,
        ),
    ]
    is_taken = [name == taken for name in names]
    drawn = drawing.bars("ToMe Tune", [*tuning_words.result(found)], names, columns, is_taken)
    return Page(drawn, "\n".join(lines))


def in_words(run: LastRun) -> list[str]:
    """The report of a run, line by line: what happened, whether it helped, what to do, the rest."""
    counts, recording, hint = run.counts, run.recording, hint_for(run)
    saves, is_merged = run.nothing is None, counts.merged_anything
    lines = [] if run.nothing is None else [f"{run.nothing[0].upper()}{run.nothing[1:]}"]
    if counts.forecast_steps:
        lines += [f"Forecast: {len(counts.forecast_steps)} of {counts.total_steps} steps"]
    if is_merged:
        blocks = f"{counts.merged_blocks} of {counts.blocks_present} blocks"
        lines += [f"Merged: {blocks}, {log_line.sizes(counts)}"]
    if saves:
        helped = "not measured" if run.tuned is None else f"{log_line.times(run.tuned)} (ToMe Tune)"
        lines += [f"Helped: {helped}"]
    if saves and run.tuned is None and hint is None:
        hint = UNMEASURED
    if hint is not None:
        lines += [f"Hint: {hint}"]
    if is_merged:
        lines += [_times_in_words(recording)]
    lines += [f"Model: {run.model}"]
    if is_merged:
        lines += [f"Steps: merged in {counts.merged_steps} of {counts.total_steps}"]
    ratio_alone = [f"ratio {run.config.ratio:.2f}"]
    settings = log_line.settings(run.config, counts.frames, defaults=True)
    lines += [f"Settings: {', '.join(ratio_alone if run.is_forecast else settings)}"]
    if run.backend is not None:
        lines += [f"Backend: {run.backend}"]
    return [*lines, *(f"Note: {deviation}" for deviation in log_line.deviations(counts))]


def hint_for(run: LastRun) -> str | None:
    """What to change, if the settings gain nothing or less than they could; else None."""
    config, counts, strategy = run.config, run.counts, strategy_class(run.config)
    largest = max(counts.lengths, default=counts.largest_grid)
    if run.worth_from and 0 < largest < run.worth_from:
        longer = (run.worth_from / largest) ** 0.5
        custom = "; or, under preset custom, set min_tokens to 0 to leave small maps alone"
        return (
            f"make the picture {longer:.1f} times as wide and high, as merging is worth it from "
            f"about {run.worth_from} tokens on here{custom if config.min_tokens else ''}."
        )
    if not counts.merged_anything:
        return None
    cap = strategy.ratio_cap(config, counts.frames)
    if config.largest_ratio > cap:
        return (
            f"the cells merge no more than {cap:.2f}; under preset custom, a larger sx or sy "
            "merges more."
        )
    recording = run.recording
    if (
        strategy.compares_afar
        and recording is not None
        and recording.matching is not None
        and recording.matching > _MUCH * recording.seconds
    ):
        return "matching takes much of the time; all presets except paper match within windows."
    if config.scope == "stack" and counts.total_steps >= _MANY:
        return (
            f"in {counts.total_steps} steps, whole stacks change the picture as much as fewer "
            f"steps would; {_ENOUGH} steps with the same settings save more."
        )
    if run.shallowest > 1 and config.scope == "module" and not config.merge_mlp:
        return "little of this model's time is in self-attention; preset fast saves most."
    return None


def _times_in_words(recording: Recording | None) -> str:
    if recording is None:
        return (
            "Details: maps and times were not recorded, because no report was connected when the "
            "model sampled. Change the seed and run again to get them."
        )
    run = log_line.seconds(recording.seconds)
    if recording.matching is None:
        return f"Time: {run}; the part that matching took cannot be measured in this model"
    share = 100 * recording.matching / recording.seconds
    matching = log_line.seconds(recording.matching)
    return f"Time: {run}, of which matching took {matching} ({share:.1f} %)"


def _map(
    run: LastRun,
    recording: Recording,
    level: int,
    step: int,
    picture_at: PictureAt | None,
    frame: int,
) -> np.ndarray:
    levels = recording.levels
    if level == -1:
        level = next(iter(levels))
    if level not in levels:
        merged = _listed(levels)
        return drawing.card(
            f"Nothing merged at level {level}", [f"Hint: set level to {merged}, or to -1."]
        )
    grid = levels[level]
    place = f"level {level}, {grid.width} x {grid.height} tokens"
    frame = grid.frames // 2 if frame == -1 else frame - 1
    if frame not in range(grid.frames):
        frames = _listed(range(1, grid.frames + 1))
        return drawing.card(
            f"There is no frame {frame + 1}", [f"Hint: set frame to {frames}, or to -1."]
        )
    picture = None if picture_at is None else picture_at(frame / max(1, grid.frames - 1))
    if grid.frames > 1:
        place += f", frame {frame + 1} of {grid.frames}"
    slots = {at: slots for (at, of), slots in recording.slots.items() if of == grid}
    total = run.counts.total_steps
    step = max(slots) if step == -1 else step - 1
    if step not in slots:
        merged = _listed([at + 1 for at in slots])
        return drawing.card(
            f"Nothing merged in step {step + 1}", [f"Hint: set step to {merged}, or to -1."]
        )
    groups = int(slots[step].max()) + 1
    return drawing.captioned(
        drawing.merge_map(slots[step][frame], picture, drawing.merged_tokens(slots[step])[frame]),
        "Merge map",
        [place, f"step {step + 1} of {total}, {grid.tokens} tokens in {groups} groups"],
    )


def _chart(recording: Recording) -> np.ndarray:
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
    return drawing.bars("Chart", [line], names, columns, is_merged)


def _listed(numbers: Iterable[int]) -> str:
    """For example ``1 or 2``, or ``1 to 20`` if no number between them is missing."""
    numbers = sorted(numbers)
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return " or ".join(map(str, numbers))
