"""The pictures of a report, for plans with known groups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tome_nodes.report import drawing

# Two groups, one of them in two parts; all other tokens are unmerged.
SLOTS = np.array([[0, 0, 1, 2], [0, 3, 4, 2], [5, 6, 7, 2], [0, 8, 9, 10]])
SCALE = 64


def inner(image, y, x):
    """The pixels of a token without its outline."""
    return image[y * SCALE + 2 : (y + 1) * SCALE - 2, x * SCALE + 2 : (x + 1) * SCALE - 2]


def colour_of(image, y, x):
    """The one colour of a token."""
    (colour,) = np.unique(inner(image, y, x).reshape(-1, 3), axis=0)
    return tuple(map(int, colour))


def area(image, colour):
    """How many pixels have a colour."""
    return int((image == colour).all(2).sum())


def test_each_group_has_one_colour_of_its_own_and_lone_tokens_are_dark():
    image = drawing.merge_map(SLOTS)
    assert image.shape == (4 * SCALE, 4 * SCALE, 3) and image.dtype == np.uint8
    colours = {}
    for (y, x), slot in np.ndenumerate(SLOTS):
        colours.setdefault(int(slot), set()).add(colour_of(image, y, x))
    assert {len(of_slot) for of_slot in colours.values()} == {1}
    (first,), (second,) = colours[0], colours[2]
    assert first != second
    alone = set.union(*(of_slot for slot, of_slot in colours.items() if slot not in (0, 2)))
    assert alone == {drawing.FAINT}


def test_outlines_are_where_groups_end_and_nowhere_else():
    image = drawing.merge_map(SLOTS)
    across = image[SCALE // 2, :, :].astype(int)
    changes = np.nonzero((np.diff(across, axis=0) != 0).any(1))[0] + 1
    # Group 0 runs over two tokens; a line one pixel wide begins where it ends. So does group 2.
    assert changes.tolist() == [2 * SCALE, 2 * SCALE + 1, 3 * SCALE, 3 * SCALE + 1]
    assert across[2 * SCALE].sum() < across[2 * SCALE + 1].sum()
    # All tokens of the last row except the first are unmerged, so no line separates them.
    last = image[-SCALE // 2, SCALE + 1 :]
    assert (last == drawing.FAINT).all()


def test_over_a_picture_a_group_has_its_mean_colour_and_lone_tokens_show_it():
    picture = np.random.default_rng(0).random((4, 4, 3)).repeat(SCALE, 0).repeat(SCALE, 1)
    image = drawing.merge_map(SLOTS, picture)
    expected = (255 * picture).round()
    for slot in 0, 2:
        places = np.argwhere(slot == SLOTS)
        mean = np.mean([inner(expected, y, x)[0, 0] for y, x in places], axis=0)
        for y, x in places:
            assert np.abs(np.array(colour_of(image, y, x)) - mean).max() <= 0.5
    # Token 7 is unmerged.
    assert np.array_equal(inner(image, 2, 2), inner(expected, 2, 2))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pictures_of_any_size_channels_and_values_are_drawn(channels):
    picture = np.full((7, 5, channels), np.nan)
    picture[:3] = 4.0
    for draw in drawing.merge_map, drawing.heat_map:
        assert draw(SLOTS, picture).shape == (4 * SCALE, 4 * SCALE, 3)


def test_heat_ranges_from_night_blue_to_pale_yellow():
    image = drawing.heat_map(np.array([[0.0, 0.5], [1.0, 0.25]]))
    assert [tuple(map(int, image[y, x])) for y, x in ((0, 0), (-1, 0))] == [
        (18, 22, 54),
        (252, 240, 170),
    ]
    light = drawing.colours_of(np.linspace(0, 1, 50)).sum(1)
    assert (np.diff(light) > 0).all()


@given(height=st.integers(1, 300), width=st.integers(1, 300), data=st.data())
def test_maps_of_any_shape_have_a_readable_size(height, width, data):
    slots = np.arange(height * width).reshape(height, width) // data.draw(st.integers(1, 4))
    image = drawing.captioned(drawing.merge_map(slots), "Merge map", ["level 1"])
    assert image.shape[2] == 3
    assert 60 < max(image.shape[:2]) < 1400


def test_the_chart_shows_tokens_kept_and_time():
    before = np.array([[4096.0, 4096.0], [1024.0, 1024.0]])
    after = np.array([[2048.0, 4096.0], [1024.0, 1024.0]])
    seconds = np.array([[0.1, 0.4], [0.05, np.nan]])
    args = ["a", "b"], [1, 2], before, after
    with_times, without = drawing.chart(*args, seconds), drawing.chart(*args, None)
    assert without.shape[1] < with_times.shape[1]
    half = tuple(drawing._kept_colours(np.array([0.5])).round()[0].astype(int))
    slowest = tuple(drawing.colours_of(np.array([1.0]))[0].astype(int))

    # A cell of 32 by 28 pixels without its gap, and a part of the key of 15 by 15.
    assert area(without, half) == area(with_times, half) == 31 * 27 + 15 * 15
    assert area(without, slowest) == 0
    assert area(with_times, slowest) >= 31 * 27


@given(
    st.tuples(st.integers(80, 760), st.integers(100, 440)),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(3, 24)), max_size=7),
)
def test_names_of_dots_cover_nothing_however_close_the_dots_are(place, dots):
    places = [(min(place[0] + x, 760), min(place[1] + y, 440)) for x, y, _ in dots]
    names = ["n" * length for *_, length in dots]
    area = 80, 88, 760, 452
    canvas = np.zeros((600, 900), int)
    canvas[:88] = canvas[452:] = canvas[:, :80] = canvas[:, 760:] = 1
    for x, y in places:
        canvas[y - 5 : y + 6, x - 5 : x + 6] = 1
    for left, top, right, bottom in drawing._name_boxes(names, places, [], area):
        covered = canvas[round(top) + 1 : round(bottom), round(left) + 1 : round(right)]
        assert covered.size and not covered.any()
        covered[:] = 1


def test_what_a_user_could_take_instead_is_a_diamond_with_a_key():
    point = drawing.Point("fast 0.50", 1.5, 0.1)
    rival = drawing.Point("EasyCache", 1.2, 0.05, drawing.OTHER, is_rival=True)
    alone, beside = (drawing.front("ToMe Tune", [], points) for points in ([point], [point, rival]))
    assert area(alone, drawing.OTHER) == 0
    # A diamond and its key, of 8 pixels to each side.
    assert area(beside, drawing.OTHER) == 2 * sum(17 - 2 * abs(row) for row in range(-8, 9))


def test_text_is_wrapped_and_visible():
    words = "merging " * 60
    card = drawing.card("Nothing merged", [words, "Hint: do this."])
    assert card.shape[1] == 800
    text = (card == drawing.MUTED).all(2)
    assert not text[:, 780:].any() and text.any()
    assert (card[-60:] == drawing.INK).all(2).any()
