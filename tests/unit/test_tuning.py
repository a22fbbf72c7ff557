"""The search of ToMe Tune on figures alone, and what it says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of
from tome_nodes.tuning.search import (
    BALANCED,
    FAST,
    FASTER,
    UNPATCHED,
    Candidate,
    Measured,
    Wish,
    choose,
    find,
)
from tome_nodes.tuning.summary import HINT, Found, in_words

LADDERS = [BALANCED, FAST]


def measured(speed, change, obstacle=None):
    return Measured(1 / speed, 1.0, change, obstacle)


def front(balanced, fast):
    """Figures from (speed, change) of each rung of both ladders."""
    return {
        candidate: measured(*point)
        for ladder, points in ((BALANCED, balanced), (FAST, fast))
        for candidate, point in zip(ladder, points, strict=True)
    }


PICTURE = front(
    [(1.02, 0.01), (1.05, 0.02), (1.10, 0.03), (1.14, 0.06), (1.16, 0.10)],
    [(1.20, 0.05), (1.32, 0.07), (1.45, 0.10), (1.60, 0.16), (1.75, 0.30)],
)
"""As a transformer at a megapixel: little of its time is attention."""

SLOW = front([(1.02, 0.01)] * 5, [(0.9, 0.1)] * 5)

VIDEO = front(
    [(1.2, 0.01), (1.35, 0.02), (1.55, 0.03), (1.8, 0.06), (1.9, 0.10)],
    [(1.3, 0.05), (1.5, 0.08), (1.7, 0.12), (2.0, 0.2), (2.2, 0.3)],
)


def tuned(wish, figures, known=()):
    """The choice, and what was tried for it beside what is known."""
    tried = []

    def trial(candidate):
        tried.append(candidate)
        return figures[candidate]

    found = find(wish, known, LADDERS, trial)
    assert found == {candidate: figures[candidate] for candidate in (*known, *tried)}
    return choose(wish, found), tried


@pytest.mark.parametrize(
    ("figures", "wish", "preset", "ratio"),
    [
        (PICTURE, Wish("speed", 1.1), "balanced", 0.6),
        (PICTURE, Wish("speed", 1.2), "fast", 0.3),
        (PICTURE, Wish("speed", 1.5), "fast", 0.6),
        (PICTURE, Wish("likeness", 0.1), "fast", 0.5),
        (PICTURE, Wish("likeness", 0.04), "balanced", 0.6),
        (VIDEO, Wish("speed", 1.3), "balanced", 0.45),
        (VIDEO, Wish("speed", 2.0), "fast", 0.6),
        (VIDEO, Wish("likeness", 0.15), "balanced", 0.85),
        (VIDEO, Wish("likeness", 0.01), "balanced", 0.3),
    ],
)
def test_known_fronts_give_the_best_settings(figures, wish, preset, ratio):
    choice, tried = tuned(wish, figures)
    assert choice == Candidate(preset, ratio) and wish.holds(figures[choice])
    assert len(tried) == len({*tried}) <= 7
    # The order of figures does not matter.
    assert choose(wish, dict(reversed(figures.items()))) == choose(wish, figures)
    # A search goes on from what is known.
    assert tuned(wish, figures, {tried[0]: figures[tried[0]]})[1] == tried[1:]


@pytest.mark.parametrize(
    ("figures", "wish", "choice"),
    [
        (PICTURE, Wish("speed", 3.0), FAST[-1]),
        (PICTURE, Wish("likeness", 0.005), None),
        (SLOW, Wish("speed", 1.01), None),
        (SLOW, Wish("likeness", 0.5), None),
    ],
)
def test_what_is_not_reached_gives_the_fastest_if_any_is_faster(figures, wish, choice):
    assert tuned(wish, figures)[0] == choice


def rising(least, most):
    return st.lists(st.floats(least, most), min_size=5, max_size=5, unique=True).map(sorted)


@given(
    st.tuples(rising(0.9, 4), rising(0.9, 4)),
    st.tuples(rising(0.001, 1), rising(0.001, 1)),
    st.one_of(
        st.builds(Wish, st.just("speed"), st.floats(1.01, 4)),
        st.builds(Wish, st.just("likeness"), st.floats(0.01, 1)),
    ),
)
def test_no_settings_that_were_not_tried_are_better(speeds, changes, wish):
    figures = front(*(list(zip(*pair, strict=True)) for pair in zip(speeds, changes, strict=True)))
    choice, tried = tuned(wish, figures)
    assert len(tried) <= 7
    fulfil = [each for each in figures.values() if wish.holds(each)]
    if not fulfil:
        assert choice is None or not wish.holds(figures[choice])
        return
    found = figures[choice]
    assert wish.holds(found)
    if wish.goal == "speed":
        assert found.change <= 1.05 * min(each.change for each in fulfil)
    else:
        assert found.speed >= max(each.speed for each in fulfil) / FASTER


@pytest.mark.parametrize("noise", [0.985, 1.0, 1.015])
def test_of_equal_settings_the_gentler_is_taken_whatever_the_noise(noise):
    """Where blocks cannot merge as a whole, fast does what balanced does, in cells of 2x2."""
    same = [(1.3, 0.02), (1.5, 0.03), (1.6, 0.04), (1.7, 0.05), (1.8, 0.06)]
    noisy = [(speed * noise, change) for speed, change in same]
    for wish in Wish("speed", 1.2), Wish("likeness", 0.03):
        assert choose(wish, front(same, noisy)).preset == "balanced"


@pytest.mark.parametrize("wish", [Wish("speed", 1.0), Wish("likeness", 0.0)])
def test_what_the_unpatched_model_does_takes_no_trial(wish):
    assert tuned(wish, VIDEO) == (None, [])


def test_a_ladder_on_which_nothing_merges_is_tried_once():
    nothing = dict.fromkeys([*BALANCED, *FAST], measured(1.0, 0.0, "too few tokens"))
    choice, tried = tuned(Wish("speed", 1.2), nothing)
    assert choice is None
    assert [each.preset for each in tried] == ["balanced", "fast"]


def test_the_settings_of_the_unpatched_model_merge_nothing_whatever_else_is_given():
    settings = settings_of(UNPATCHED.preset, {"ratio": UNPATCHED.ratio})
    assert ToMeConfig(**settings).merges_nothing


def test_a_high_speed_is_looked_for_where_it_can_be_had():
    assert tuned(Wish("speed", 1.5), PICTURE)[1][0].preset == "fast"
    assert tuned(Wish("speed", 1.1), PICTURE)[1][0].preset == "balanced"


def text_lines(wish, figures, **others):
    return in_words(Found(wish, figures, **others))


NOTHING = {each: measured(1.0, 0.0, "too few tokens") for each in (BALANCED[2], FAST[2])}
SLOWER, WORSE, BETTER = measured(1.1, 0.01), measured(1.5, 0.06), measured(1.25, 0.04)


def test_the_result_comes_first():
    assert text_lines(Wish("speed", 1.2), PICTURE, runs=1.5)[0] == (
        "Found: fast, ratio 0.30: 1.20 times as fast, change 0.050."
    )
    assert text_lines(Wish("speed", 3.0), PICTURE)[:2] == [
        "Not reached: nothing tried is 3.00 times as fast.",
        "Taken: fast, ratio 0.70: 1.75 times as fast, change 0.300.",
    ]
    assert text_lines(Wish("likeness", 0.001), PICTURE)[:3] == [
        "Unpatched: nothing that is faster has a change of 0.001 or less.",
        "Nearest: balanced, ratio 0.45: 1.05 times as fast, change 0.020.",
        "Hint: set change to 0.02 to take it.",
    ]
    assert text_lines(Wish("speed", 1.0), {}) == [
        "Unpatched: 1.00 times as fast is what the model has without merging."
    ]


def test_a_model_that_gains_nothing_is_told_why():
    assert text_lines(Wish("speed", 1.2), NOTHING) == [
        "Unpatched: nothing is faster here. Nothing merged: too few tokens.",
        *(f"Tried {each}: nothing merged" for each in NOTHING),
    ]
    slow = {BALANCED[2]: replace(PICTURE[BALANCED[2]], seconds=1.25)}
    assert text_lines(Wish("speed", 1.2), slow)[:2] == [
        "Unpatched: nothing is faster here. Best: balanced, ratio 0.60: 0.80 times as fast, change "
        "0.030.",
        HINT,
    ]
    failed = {BALANCED[2]: replace(measured(1.0, 0.0, "OSError: gone"), has_failed=True)}
    assert text_lines(Wish("speed", 1.2), failed) == [
        "Unpatched: nothing is faster here. Trial failed: OSError: gone.",
        "Tried balanced, ratio 0.60: trial failed",
    ]


def test_what_is_faster_and_changes_little_enough_is_said():
    """The settings found are 1.20 times as fast, with a change of 0.050."""
    wish = Wish("likeness", 0.055)
    instead = {"6 of 8 steps": WORSE, "EasyCache": measured(1.4, 0.052), "both": SLOWER}
    assert text_lines(wish, PICTURE, instead=instead)[1] == (
        "Hint: take EasyCache instead, which is faster and has a change of 0.055 or less."
    )


def test_what_is_fast_enough_where_nothing_merges_is_said():
    instead = {"2 of 3 steps": measured(1.5, 0.1), "EasyCache": measured(1.1, 0.02)}
    assert text_lines(Wish("speed", 1.2), NOTHING, instead=instead)[:4] == [
        "Unpatched: nothing is faster here. Nothing merged: too few tokens.",
        "Hint: take 2 of 3 steps instead, which is at least 1.20 times as fast.",
        "Instead 2 of 3 steps: 1.50 times as fast, change 0.100",
        "Instead EasyCache: 1.10 times as fast, change 0.020",
    ]
    lines = text_lines(Wish("speed", 1.2), NOTHING, instead={"EasyCache": SLOWER})
    assert not any(line.startswith("Hint: ") for line in lines)


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ({"6 of 8 steps": WORSE, "EasyCache": SLOWER}, None),
        ({"6 of 8 steps": BETTER, "EasyCache": WORSE}, "6 of 8 steps"),
        ({"6 of 8 steps": BETTER, "EasyCache": measured(1.9, 0.03)}, "EasyCache"),
        ({"EasyCache": measured(1.0, 0.0)}, None),
        ({"EasyCache": measured(2.0, 0.0, "OSError: gone")}, None),
    ],
    ids=str,
)
def test_what_is_better_than_merging_is_said(instead, said):
    """The settings found are 1.20 times as fast, with a change of 0.050."""
    lines = text_lines(Wish("speed", 1.2), PICTURE, instead=instead)
    assert lines[1] == (
        "Nothing else that was tried is as fast and changes less."
        if said is None
        else f"Hint: take {said} instead, which is as fast and changes less."
    )
    assert sum(line.startswith("Instead ") for line in lines) == len(instead)
    assert "Instead 6 of 8 steps: 1.25 times as fast, change 0.040" in text_lines(
        Wish("speed", 1.2), PICTURE, instead={"6 of 8 steps": BETTER}
    )


def test_what_trials_cost_is_told():
    wish = Wish("speed", 1.2)
    assert text_lines(wish, PICTURE, runs=5.25)[-1] == "Trials: as long as 5.2 sampling runs"
    assert text_lines(wish, PICTURE, date="2026-11-23")[-1] == (
        "No trials: measured on 2026-11-23; set measure_again to measure anew"
    )
