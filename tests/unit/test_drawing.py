"""The pictures of a report, for plans with known groups."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tome_nodes.report import drawing

# Two groups, one of them in two parts; all other tokens are unmerged.
SLOTS = np.array([[0, 0, 1, 2], [0, 3, 4, 2], [5, 6, 7, 2], [0, 8, 9, 10]])[None]
SCALE = 64


def inner(image, y, x):
    return image[y * SCALE + 2 : (y + 1) * SCALE - 2, x * SCALE + 2 : (x + 1) * SCALE - 2]


def colour_of(image, y, x):
    (colour,) = np.unique(inner(image, y, x).reshape(-1, 3), axis=0)
    return tuple(map(int, colour))


def area(image, colour):
    return int((image == colour).all(2).sum())


def test_each_group_has_one_colour_of_its_own_and_lone_tokens_are_dark():
    image = drawing.merge_map(SLOTS)
    assert image.shape == (4 * SCALE, 4 * SCALE, 3) and image.dtype == np.uint8
    colours = {}
    for (y, x), slot in np.ndenumerate(SLOTS[0]):
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
        places = np.argwhere(slot == SLOTS[0])
        mean = np.mean([inner(expected, y, x)[0, 0] for y, x in places], axis=0)
        for y, x in places:
            assert np.abs(np.array(colour_of(image, y, x)) - mean).max() <= 0.5
    # Token 7 is unmerged.
    assert np.array_equal(inner(image, 2, 2), inner(expected, 2, 2))
    for channels in 1, 3, 4:
        picture = np.full((7, 5, channels), np.nan)
        picture[:3] = 4.0
        assert drawing.merge_map(SLOTS, picture).shape == (4 * SCALE, 4 * SCALE, 3)


@given(height=st.integers(1, 300), width=st.integers(1, 300), data=st.data())
def test_maps_of_any_shape_have_a_readable_size(height, width, data):
    slots = np.arange(height * width).reshape(1, height, width) // data.draw(st.integers(1, 4))
    image = drawing.page("Merge map", ["level 1"], drawing.merge_map(slots))
    assert image.shape[2] == 3
    assert 60 < max(image.shape[:2]) < 1400


def test_bars_are_as_long_as_their_values_and_the_line_is_where_its_value_is():
    column = drawing.Column("speed", [1.0, 2.0], ["1", "2"], line=1.5)
    image = drawing.bars(["a", "b"], [column], [False, True])
    plain, lit = ((image == colour).all(2) for colour in (drawing.COOL, drawing.WARM))
    empty = drawing.Column("change", [0.0], ["0"])
    assert 0 < (drawing.bars(["a"], [empty], [False]) == drawing.COOL).all(2).sum() < 100
    # The end of a bar belongs to it, and the line hides two pixels of the longer one.
    assert plain.sum(1).max() == drawing._BAR / 2 + 1
    assert lit.sum(1).max() == drawing._BAR + 1 - 2
    left = np.nonzero(plain.any(0))[0][0]
    down = (image == drawing.INK).all(2).sum(0)
    assert left + round(0.75 * drawing._BAR) in np.nonzero(down >= 2 * 28)[0]


def test_text_is_wrapped_and_visible():
    words = "merging " * 60
    page = drawing.page("Nothing merged", [words, "Hint: do this."])
    assert page.shape[1] == 800
    text = (page == drawing.MUTED).all(2)
    assert not text[:, 780:].any() and text.any()
    assert (page[-60:] == drawing.INK).all(2).any()
