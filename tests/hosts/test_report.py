"""The text and the pictures of a report."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
from common import BACKEND
from host import merging, policy_of, sample

from tome_nodes.comfyui.attachment import attach, last_run
from tome_nodes.report import drawing
from tome_nodes.report.pages import hint_for, in_words, report_of
from tome_nodes.run.recording import BlockRecord
from tome_nodes.settings.options import VIEW


def run_of(model, steps=2, size=(16, 16), **settings):
    patched = attach(model, merging(**settings), wants_details=lambda: True)
    sample(patched, steps=steps, size=size)
    return last_run(patched)


@pytest.fixture(scope="module")
def run(sd15_of):
    """Three steps at two levels, the last of them without merging."""
    return run_of(sd15_of(2), steps=3, max_downsample=2, end_percent=0.6)


def test_the_words_count_blocks_tokens_and_steps(run):
    assert [line for line in in_words(run) if not line.startswith(("Hint", "Time"))] == [
        "Done: merged 11 of 11 blocks",
        "Helped: expected, not measured: 20% fewer multiplications in a merged step",
        "Tokens: 256 -> 128 x5, 64 -> 32 x6",
        "Steps: merged in 2 of 3",
        "Model: SD15",
        "Settings: ratio 0.50, bipartite, module scope, start_percent 0, end_percent 0.6",
        f"Backend: {BACKEND}",
    ]


def test_what_came_out_whether_it_helped_and_what_to_change_come_first(run, sd15):
    def told(run=run, **others):
        recording = run.recording and replace(run.recording, seconds=7.204)
        lines = in_words(replace(run, recording=recording, **others))
        return {line.split(":")[0]: line for line in lines}

    assert [*told()][:4] == ["Done", "Helped", "Hint", "Tokens"]
    assert told()["Time"] == "Time: 7.2 s"
    assert "ToMe Tune" in told()["Hint"]
    idle = run_of(sd15, size=(8, 8), min_tokens=100)
    assert [*told(run=idle)][:2] == ["Nothing merged", "Model"]


def shows(page, expected):
    """Whether a page has a picture below its words."""
    height, width = expected.shape[:2]
    return np.array_equal(page.picture[-20 - height : -20, 20 : 20 + width], expected)


def test_maps_are_of_the_level_and_step_asked_for(run):
    grids = run.recording.levels
    assert [(level, grid.height) for level, grid in grids.items()] == [(1, 16), (2, 8)]
    for level, step, at, of in ((-1, -1, 1, 1), (1, 1, 0, 1), (2, 2, 1, 2)):
        expected = drawing.merge_map(run.recording.slots[at, grids[of]])
        assert shows(report_of(run, level=level, step=step), expected)


@pytest.mark.parametrize("has_times", [True, False])
def test_the_chart_has_the_tokens_and_the_time_of_each_block(run, has_times):
    tokens = drawing.Column("tokens", [128, 64], ["256 to 128", "64"])
    times = drawing.Column("mean, ms", [20.4, 500], ["20.4", "500"])
    columns = [tokens, times] if has_times else [tokens]
    blocks = {
        "a.transformer_blocks.0": BlockRecord(256, 128, 0.0204 if has_times else None),
        "b": BlockRecord(64, 64, 0.5),
    }
    recorded = replace(run, recording=replace(run.recording, blocks=blocks))
    expected = drawing.bars(["a.0", "b"], columns, [True, False])
    assert shows(report_of(recorded, "chart"), expected)
    counts = copy(recorded.counts)
    counts.forecast_steps = {1}
    steps = drawing.steps([False, True, False], "the model ran", "forecast")
    skipping = report_of(replace(recorded, counts=counts), "chart")
    assert shows(skipping, drawing.stacked(steps, expected))


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ({"level": 4}, "set level to 1 or 2, or to -1."),
        ({"step": 3}, "set step to 1 or 2, or to -1."),
        ({"step": 0}, "set step to 1 or 2, or to -1."),
    ],
    ids=str,
)
def test_a_page_says_which_maps_there_are(run, asked, hint):
    ((name, value),) = asked.items()
    expected = drawing.page(f"There is no merge map of {name} {value}", [f"Hint: {hint}"])
    assert np.array_equal(report_of(run, **asked).picture, expected)


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        ({}, 3, None),
        ({"ratio": 0.9}, 3, "the cells merge no more than 0.75; under preset custom"),
        ({"scope": "stack"}, 12, None),
        ({"scope": "stack"}, 16, "12 steps with the same settings save more"),
        ({"scope": "stack", "policy": policy_of("fast")}, 16, None),
    ],
    ids=["nothing", "capped", "stacks", "stacks in many steps", "fast in many steps"],
)
def test_a_run_that_gains_less_than_it_could_gets_a_hint(
    run, monkeypatch, settings, steps, expected
):
    monkeypatch.setattr(run.counts, "total_steps", steps)
    config = replace(run.config, **settings)
    hint = hint_for(replace(run, config=config))
    assert (hint is None) if expected is None else expected in hint


@pytest.mark.parametrize("min_tokens", [0, 1, 100])
def test_merging_too_few_tokens_gets_a_hint_that_says_how_many_are_worth_it(sd15, min_tokens):
    run = run_of(sd15, size=(8, 8), min_tokens=min_tokens)
    assert (run.unmerged is None) == (min_tokens == 1)
    hint = hint_for(run) or ""
    assert hint.startswith("merging is worth it from about 256 tokens") == (min_tokens == 1)


def test_a_run_without_a_step_in_range_says_so(sd15):
    run = run_of(sd15, start_percent=1.0)
    for view in VIEW.choices:
        lines = report_of(run, view).text.splitlines()
        assert lines[0].startswith("Nothing merged: start_percent=1.0 to end_percent=1.0 covers no")
        assert not any(line.startswith(("Hint", "Details", "Time")) for line in lines)
