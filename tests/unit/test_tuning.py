"""What ToMe Tune takes, from figures alone, and what it says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tome_nodes.tuning.search import BALANCED, FAST, FASTER, Measured, Wish, choose
from tome_nodes.tuning.summary import HINT, Found, in_words


def measured(speed, change, obstacle=None):
    return Measured(1 / speed, 1.0, change, obstacle)


def front(*points):
    """Figures from the speed and change of all settings."""
    both = zip((*BALANCED, *FAST), points, strict=True)
    return {candidate: measured(*point) for candidate, point in both}


PICTURE = front(
    *((1.02, 0.01), (1.10, 0.03), (1.16, 0.10)), *((1.20, 0.05), (1.45, 0.10), (1.75, 0.30))
)


@given(
    st.lists(st.tuples(st.floats(0.9, 4), st.floats(0.001, 1)), min_size=6, max_size=6),
    st.one_of(
        st.builds(Wish, st.just("speed"), st.floats(1.01, 4)),
        st.builds(Wish, st.just("likeness"), st.floats(0.01, 1)),
    ),
)
def test_nothing_that_was_tried_is_better(points, wish):
    figures = front(*points)
    choice = choose(wish, figures)
    # Its speeds may differ in the last digit from the drawn ones.
    all_measured = [(measured.speed, measured.change) for measured in figures.values()]
    faster = [(speed, change) for speed, change in all_measured if speed >= FASTER]
    if wish.goal == "speed":
        enough = [point for point in faster if point[0] >= wish.amount]
        if enough:
            assert figures[choice].change == min(change for _, change in enough)
            return
    else:
        faster = [point for point in faster if point[1] <= wish.amount]
    assert (choice is None) == (not faster)
    if faster:
        fastest = max(speed for speed, _ in faster)
        equal = [change for speed, change in faster if speed * FASTER >= fastest]
        assert figures[choice].change == pytest.approx(min(equal))


def test_of_equal_settings_the_gentler_is_taken():
    same = front(*[(1.3, 0.02)] * 6)
    assert choose(Wish("speed", 1.2), same) == choose(Wish("likeness", 0.3), same) == BALANCED[0]


def told(wish, figures, **others):
    return in_words(Found(wish, figures, **others))


FEW = "nothing merged: too few tokens"
NOTHING = {candidate: measured(1.0, 0.0, FEW) for candidate in (BALANCED[2], FAST[2])}
SLOWER, WORSE, BETTER = measured(1.1, 0.01), measured(1.5, 0.06), measured(1.25, 0.04)


def test_the_result_comes_first():
    assert told(Wish("speed", 1.15), PICTURE, runs=1.5)[0] == (
        "Found: fast, ratio 0.30: 1.20 times as fast, change 0.050."
    )
    assert told(Wish("speed", 3.0), PICTURE)[:2] == [
        "Not reached: nothing tried is 3.00 times as fast.",
        "Taken: fast, ratio 0.70: 1.75 times as fast, change 0.300.",
    ]
    assert told(Wish("likeness", 0.001), PICTURE)[:2] == [
        "Unpatched: nothing that is faster has a change of 0.001 or less.",
        "Hint: set change to 0.03 to take balanced, ratio 0.60: 1.10 times as fast, change 0.030.",
    ]
    assert told(Wish("speed", 1.0), {}) == [
        "Unpatched: 1.00 times as fast is what the model has without ToMe."
    ]


def test_what_was_merged_and_forecast_stands_behind_its_figures():
    done = replace(measured(1.5, 0.1), done="merged 5 of 16 blocks, forecast 8 of 20 steps")
    assert told(Wish("speed", 1.2), {FAST[1]: done})[0] == (
        "Found: fast, ratio 0.50: 1.50 times as fast, change 0.100 "
        "(merged 5 of 16 blocks, forecast 8 of 20 steps)."
    )


def test_a_model_that_gains_nothing_is_told_why():
    assert told(Wish("speed", 1.2), NOTHING) == [
        "Unpatched: nothing merged: too few tokens.",
        *(f"Tried {candidate}: nothing merged: too few tokens" for candidate in NOTHING),
    ]
    assert told(Wish("speed", 1.2), {BALANCED[1]: measured(0.8, 0.03)}) == [
        "Unpatched: nothing is faster here.",
        HINT,
        "Tried balanced, ratio 0.60: 0.80 times as fast, change 0.030",
    ]


@pytest.mark.parametrize(
    ("wish", "figures", "instead", "second"),
    [
        # The settings found are 1.20 times as fast, with a change of 0.050.
        (
            *(Wish("speed", 1.15), PICTURE, {"6 of 8 steps": WORSE, "EasyCache": SLOWER}),
            "Nothing else that was tried does better.",
        ),
        (
            *(Wish("speed", 1.15), PICTURE, {"6 of 8 steps": BETTER, "EasyCache": WORSE}),
            "Hint: instead, take 6 of 8 steps: 1.25 times as fast, change 0.040.",
        ),
        (
            *(Wish("speed", 1.15), PICTURE, {"EasyCache": measured(2.0, 0.0, "it failed")}),
            "Nothing else that was tried does better.",
        ),
        # No settings are found.
        (
            *(Wish("speed", 1.2), NOTHING, {"2 of 3 steps": measured(1.5, 0.1)}),
            "Hint: instead, take 2 of 3 steps: 1.50 times as fast, change 0.100.",
        ),
        (
            *(Wish("likeness", 0.001), PICTURE, {"EasyCache": measured(1.4, 0.0005)}),
            "Hint: instead, take EasyCache: 1.40 times as fast, change 0.001.",
        ),
        (
            *(Wish("speed", 1.2), NOTHING, {"EasyCache": measured(1.0, 0.0)}),
            f"Tried balanced, ratio 0.85: {FEW}",
        ),
    ],
    ids=str,
)
def test_what_is_better_than_the_settings_is_said(wish, figures, instead, second):
    lines = told(wish, figures, instead=instead)
    assert lines[1] == second
    assert sum(line.startswith("Tried ") for line in lines) == len(figures) + len(instead)


def test_what_trials_cost_is_told():
    wish = Wish("speed", 1.2)
    assert told(wish, PICTURE, runs=5.25)[-1] == "Trials: as long as 5.2 sampling runs"
    assert told(wish, PICTURE, date="2026-11-23")[-1] == (
        "No trials: measured on 2026-11-23; set measure_again to measure anew"
    )
