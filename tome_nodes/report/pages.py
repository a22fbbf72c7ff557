"""The report of a sampling run: its text, and the picture of a view."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ..settings.options import VIEW
from ..strategies import strategy_class
from ..tuning import summary as tuning_words
from ..tuning.search import FAST, SPEED
from ..tuning.summary import Found
from . import drawing, log_line
from .last_run import LastRun
from .recording import MATCHING, Recording

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
    view: str = VIEW.default,
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
    recording = run.recording
    counts = run.counts
    if run.obstacle is not None:
        drawn = drawing.card(_nothing(run), lines)
    elif recording is None or not counts.merged_anything:
        forecast = [step in counts.forecast_steps for step in range(counts.total_steps)]
        drawn = drawing.card("Token merging", lines, forecast if any(forecast) else ())
    elif view == "chart":
        drawn = _chart(recording)
    else:
        drawn = _map(run, recording, view, level, step, picture_at, frame)
    return Page(drawn, "\n".join(lines))


def tuning_page(found: Found) -> Page:
    """The page of ToMe Tune: what it found, and everything that it tried."""
    lines = tuning_words.in_words(found)
    if not found.figures:
        return Page(drawing.card("ToMe Tune", lines), "\n".join(lines))
    points = [
        drawing.Point(
            f"{candidate.preset} {candidate.ratio:.2f}",
            measured.speed,
            measured.change,
            drawing.WARM if candidate.preset == FAST[0].preset else drawing.COOL,
            candidate == found.candidate,
        )
        for candidate, measured in found.figures.items()
        if measured.obstacle is None
    ]
    points += [
        drawing.Point(name, measured.speed, measured.change, drawing.OTHER, is_rival=True)
        for name, measured in found.instead.items()
        if measured.obstacle is None
    ]
    amount, is_speed = found.wish.amount, found.wish.goal == SPEED
    drawn = drawing.front(
        "ToMe Tune",
        [*tuning_words.result(found)],
        points,
        amount if is_speed else None,
        None if is_speed else amount,
    )
    return Page(drawn, "\n".join(lines))


def in_words(run: LastRun) -> list[str]:
    """The report of a run, line by line: what happened, whether it helped, what to do, the rest."""
    counts, recording, hint = run.counts, run.recording, hint_for(run)
    saves = run.obstacle is None
    is_merged = saves and counts.merged_anything
    lines = [] if saves else [f"{_nothing(run)}: {run.obstacle}"]
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
        lines += [
            f"Steps: merged in {counts.merged_steps} of {counts.total_steps}",
            f"Matching: done {counts.plans_made} times",
        ]
    ratio_alone = [f"ratio {run.config.ratio:.2f}"]
    settings = log_line.settings(run.config, counts.frames, defaults=True)
    lines += [f"Settings: {', '.join(ratio_alone if run.is_forecast else settings)}"]
    if run.backend is not None:
        lines += [f"Backend: {run.backend}"]
    return [*lines, *(f"Note: {deviation}" for deviation in log_line.deviations(counts))]


def _nothing(run: LastRun) -> str:
    return "Nothing was forecast" if run.is_forecast else "Nothing merged"


def hint_for(run: LastRun) -> str | None:
    """What to change, if the settings gain nothing or less than they could; else None."""
    config, counts, strategy = run.config, run.counts, strategy_class(run.config)
    largest = max(counts.lengths, default=counts.largest_grid)
    if run.worth_from and 0 < largest < run.worth_from:
        longer = (run.worth_from / largest) ** 0.5
        return (
            f"{largest} tokens are too few to gain anything; merging is worth it from about "
            f"{run.worth_from} here. Make the picture {longer:.1f} times as wide and high"
            + (
                ", or, under preset custom, set min_tokens to 0 to leave small maps alone."
                if config.min_tokens
                else "."
            )
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
        and recording.overhead is not None
        and recording.overhead[MATCHING] > _MUCH * recording.seconds
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
    if recording.overhead is None:
        return f"Time: {run}; the part that merging took cannot be measured in this model"
    parts = ", ".join(
        f"{name} {log_line.seconds(spent)}" for name, spent in recording.overhead.items()
    )
    share = 100 * sum(recording.overhead.values()) / recording.seconds
    return f"Time: {parts}, together {share:.1f} % of the run's {run}"


def _map(
    run: LastRun,
    recording: Recording,
    view: str,
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
    if view == "heat map":
        in_steps = [drawing.merged_tokens(groups)[frame] for groups in slots.values()]
        share = np.sum(in_steps, axis=0) / total
        image = drawing.heat_map(share, picture)
        steps = f"merged in {len(slots)} of {total} steps"
        return drawing.captioned(image, "Heat map", [place, steps], key=True)
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
    names = list(dict.fromkeys(name for name, _ in recording.blocks))
    steps = sorted({step for _, step in recording.blocks})
    before, after, seconds = np.full((3, len(names), len(steps)), np.nan)
    for (name, step), block in recording.blocks.items():
        place = names.index(name), steps.index(step)
        before[place], after[place] = block.before, block.after
        if block.seconds is not None:
            seconds[place] = block.seconds
    return drawing.chart(
        [name.replace(".transformer_blocks", "") for name in names],
        [step + 1 for step in steps],
        before,
        after,
        None if np.isnan(seconds).all() else seconds,
    )


def _listed(numbers: Iterable[int]) -> str:
    """For example ``1 or 2``, or ``1 to 20`` if no number between them is missing."""
    numbers = sorted(numbers)
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return " or ".join(map(str, numbers))
