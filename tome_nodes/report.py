"""What to tell of a sampling run, in words and in a picture."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from . import pictures
from .recording import LastRun, Recording
from .statistics import settings_in_words

VIEWS = ("merge map", "heat map", "chart")
"""What to draw."""

# A share of the run from which matching is worth a hint.
_MUCH = 0.1


@dataclass(frozen=True)
class Report:
    """A picture, ``[height, width, 3]`` uint8, and a text."""

    picture: np.ndarray
    text: str


NOT_MERGING = (
    "No token merging",
    "This model has no token merging.",
    "Hint: connect the model that comes out of ToMe Patch Model, with a ratio above 0.",
)
NO_RUN = (
    "No run to report",
    "No run of this model is known that made these samples.",
    "Hint: connect the model that goes into the sampler, and the samples that come out of it. If "
    "they are connected so, sample once more, with another seed say.",
)


def notice(title: str, *sentences: str) -> Report:
    """The report of why there is nothing to report."""
    return Report(pictures.card(title, sentences), "\n".join(sentences))


def report_of(
    run: LastRun,
    view: str = VIEWS[0],
    level: int = -1,
    step: int = -1,
    picture: np.ndarray | None = None,
) -> Report:
    """The report of a run.

    Args:
        run: what was kept of it.
        view: one of :data:`VIEWS`. Where the run has nothing to show in it, the picture says why.
        level: which feature maps to draw, by how many times smaller than the latent; -1 is the
            largest.
        step: which step to draw, counted from 1; -1 is the last that merged.
        picture: ``[height, width, channels]`` float from 0 to 1, to draw under a map.
    """
    lines = in_words(run)
    recording = run.recording
    if run.obstacle is not None:
        drawn = pictures.card("Nothing merged", lines)
    elif recording is None:
        drawn = pictures.card("Token merging", lines)
    elif view == "chart":
        drawn = _chart(recording)
    else:
        drawn = _map(run, recording, view, level, step, picture)
    return Report(drawn, "\n".join(lines))


def in_words(run: LastRun) -> list[str]:
    """The report of a run, line by line."""
    statistics, recording = run.statistics, run.recording
    settings = settings_in_words(run.config, defaults=True)
    lines = [f"Model: {run.model}"]
    if run.obstacle is None:
        lines += [
            f"Merged: {statistics.merged_block_count} of {statistics.blocks_present} blocks, "
            + statistics.sizes_in_words(),
            f"Steps: merged in {statistics.merged_steps} of {statistics.total_steps}",
            f"Plans: {statistics.plans_made} made, {statistics.plans_reused} reused",
        ]
    else:
        lines += [f"Nothing merged: {run.obstacle}"]
    lines += [f"Settings: {', '.join(settings)}"]
    if run.backend is not None:
        lines += [f"Backend: {run.backend}"]
    lines += [f"Note: {deviation}" for deviation in statistics.deviations()]
    if run.obstacle is None:
        lines += [_times_in_words(recording)]
    hint = hint_for(run)
    return lines if hint is None else [*lines, f"Hint: {hint}"]


def hint_for(run: LastRun) -> str | None:
    """What to change where the settings gain nothing, or less than they could."""
    config, statistics = run.config, run.statistics
    largest = max(statistics.lengths, default=statistics.largest_map)
    if run.pays_from and 0 < largest < run.pays_from:
        longer = (run.pays_from / largest) ** 0.5
        return (
            f"{largest} tokens are too few to gain anything; merging pays from about "
            f"{run.pays_from} here. Make the picture {longer:.1f} times as wide and high"
            + (", or set min_tokens to 0 to leave small maps alone." if config.min_tokens else ".")
        )
    if run.obstacle is not None:
        return None
    if config.strategy in ("bipartite", "window") and config.ratio > config.ratio_cap:
        return (
            f"cells of {config.sx}x{config.sy} tokens merge no more than {config.ratio_cap:.2f}; "
            "under preset custom, a larger sx or sy merges more."
        )
    times = run.recording and run.recording.overhead
    if times and times["matching"] > _MUCH * run.recording.seconds and config.strategy != "window":
        return "matching takes much of the time; all presets but paper match within windows."
    if run.shallowest > 1 and config.scope == "module" and not config.merge_mlp:
        return "little of this model's time is in self-attention; preset fast saves most."
    return None


def _times_in_words(recording: Recording | None) -> str:
    if recording is None:
        return (
            "Details: maps and times were not recorded, as no report was connected when the model "
            "sampled. Change the seed and run again to get them."
        )
    run = _seconds(recording.seconds)
    if recording.overhead is None:
        return f"Time: {run}; what merging took of it cannot be measured in a model like this"
    parts = ", ".join(f"{name} {_seconds(spent)}" for name, spent in recording.overhead.items())
    share = 100 * sum(recording.overhead.values()) / recording.seconds
    return f"Time: {parts}, together {share:.1f} % of the run's {run}"


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _map(
    run: LastRun,
    recording: Recording,
    view: str,
    level: int,
    step: int,
    picture: np.ndarray | None,
) -> np.ndarray:
    levels = recording.levels
    if level == -1:
        level = next(iter(levels))
    if level not in levels:
        merged = _listed(levels)
        return pictures.card(
            f"Nothing merged at level {level}", [f"Hint: set level to {merged}, or to -1."]
        )
    grid = levels[level]
    place = f"level {level}, {grid.width} x {grid.height} tokens"
    slots = {at: slots for (at, of), slots in recording.slots.items() if of == grid}
    total = run.statistics.total_steps
    if view == "heat map":
        share = sum(pictures.merged_tokens(groups) for groups in slots.values()) / total
        image = pictures.heat_map(share, picture)
        merged = f"merged in {len(slots)} of {total} steps"
        return pictures.captioned(image, "Heat map", [place, merged], key=True)
    step = max(slots) if step == -1 else step - 1
    if step not in slots:
        merged = _listed([at + 1 for at in slots])
        return pictures.card(
            f"Nothing merged in step {step + 1}", [f"Hint: set step to {merged}, or to -1."]
        )
    groups = int(slots[step].max()) + 1
    return pictures.captioned(
        pictures.merge_map(slots[step], picture),
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
    return pictures.chart(
        [name.replace(".transformer_blocks", "") for name in names],
        [step + 1 for step in steps],
        before,
        after,
        None if np.isnan(seconds).all() else seconds,
    )


def _listed(numbers: Iterable[int]) -> str:
    """Such as ``1 or 2``, or ``1 to 20`` where all between are there."""
    numbers = sorted(numbers)
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return " or ".join(map(str, numbers))
