"""Which evaluations are whole, and what goes on in the others."""

from itertools import accumulate, pairwise

import pytest
import torch
from common import relative_error
from hypothesis import given
from hypothesis import strategies as st

from tome_nodes.skipping.features import FIRST_SHARE, Features
from tome_nodes.skipping.plan import (
    FINISHED,
    FIRST,
    FORMING,
    LEAST,
    adds_noise,
    leaves_grain,
    shortest,
    swings,
    whole_evaluations,
)

RATIOS = st.floats(0, 0.95)


def levels(count, begins=-5.3, ends=7.0):
    return torch.linspace(begins, ends, count).tolist()


@pytest.mark.parametrize(
    ("count", "whole"),
    [
        (4, [0, 1, 2, 3]),
        (5, [0, 1, 2, 3]),
        (8, [0, 1, 2, 3, 5]),
        (12, [0, 1, 2, 3, 5, 8]),
        (20, [0, 1, 2, 3, 5, 6, 9, 12, 15]),
        (21, [0, 1, 2, 3, 5, 6, 9, 12, 16]),
    ],
)
def test_whole_evaluations_are_dense_at_first(count, whole):
    assert sorted(whole_evaluations(0.6, levels(count))) == whole


@pytest.mark.parametrize(
    ("count", "whole"),
    [
        (4, [0, 1, 2, 3]),
        (5, [0, 1, 2, 4]),
        (8, [0, 1, 2, 4, 6]),
        (12, [0, 1, 2, 4, 7, 10]),
        (20, [0, 1, 2, 5, 7, 10, 12, 15, 17]),
    ],
)
def test_gaps_of_a_coarse_run_that_begins_with_a_picture_are_equal(count, whole):
    coarse = [*levels(count - 1, begins=0.0, ends=3.0), 7.0]
    assert sorted(whole_evaluations(0.6, coarse)) == whole
    even = levels(count, begins=0.0)
    assert whole_evaluations(0.6, even) == whole_evaluations(0.6, levels(count))


@pytest.mark.parametrize(
    ("count", "whole"),
    [(5, [0, 1, 2, 4]), (8, [0, 1, 3, 5, 7]), (9, [0, 1, 3, 6, 8]), (12, [0, 1, 4, 6, 8, 11])],
)
def test_they_are_from_the_second_on_where_there_is_more_picture_than_noise(count, whole):
    coarse = [*levels(count - 1, begins=0.4, ends=2.6), 3.4]
    assert sorted(whole_evaluations(0.6, coarse)) == whole
    assert 2 in whole_evaluations(0.6, [level - 0.5 for level in coarse])
    assert 2 in whole_evaluations(0.6, levels(count, begins=0.4, ends=3.4))


@pytest.mark.parametrize(
    ("count", "begins", "whole"),
    [
        (5, -5.3, [0, 1, 2, 4]),
        (8, -5.3, [0, 1, 2, 4, 7]),
        (20, -5.3, [0, 1, 2, 3, 5, 7, 10, 14, 19]),
        (10, 0.0, [0, 1, 2, 3, 6, 9]),
    ],
)
def test_a_last_step_that_paints_much_is_whole(count, begins, whole):
    assert sorted(whole_evaluations(0.6, levels(count, begins, ends=3.0))) == whole


@pytest.mark.parametrize(
    ("steps", "each", "whole"),
    [
        (10, 1, [0, 1, 2, 3, 5, 7]),
        (10, 2, [0, 1, 2, 3, 5, 7, 9, 13, 15]),
        (8, 3, [0, 1, 2, 4, 5, 7, 8, 11, 17, 20]),
    ],
)
def test_of_the_evaluations_of_a_step_the_last_are_whole(steps, each, whole):
    repeated = [level for level in levels(steps) for _ in range(each)]
    assert sorted(whole_evaluations(0.6, repeated)) == whole
    assert len(whole) == len(whole_evaluations(0.6, levels(steps * each)))


def coarse_end(count):
    """As of the scheduler normal."""
    return [*levels(count - 1, ends=2.5), 7.0]


@pytest.mark.parametrize(
    ("asked", "more"),
    [
        (coarse_end(8), {6}),
        (coarse_end(20), {18}),
        (coarse_end(5), set()),
        ([*levels(18, ends=2.5), 3.4, 4.6, 7.0], {18}),
        ([level for level in coarse_end(8) for _ in range(2)][:-1], {13}),
        (levels(20), set()),
        (levels(8, ends=3.0), {6}),
        (levels(20, ends=3.0), {18}),
        (levels(5, ends=3.0), set()),
        ([level for level in levels(10, ends=3.0) for _ in range(2)], {17}),
        (levels(8, ends=4.0), set()),
        ([5.0] * 8, set()),
        ([3.0] * 8, set()),
    ],
)
def test_the_step_that_paints_what_is_fine_is_whole_if_noise_is_added(asked, more):
    whole = whole_evaluations(0.6, asked)
    assert whole_evaluations(0.6, asked, is_grainy=True) - whole == more
    assert whole_evaluations(0.6, asked, is_grainy=True) >= whole


@given(RATIOS, st.integers(0, 60))
def test_that_leaves_a_shallow_one_where_one_was(ratio, count):
    asked = coarse_end(count) if count > 1 else levels(count)
    some = len(whole_evaluations(ratio, asked)) < count
    assert (len(whole_evaluations(ratio, asked, is_grainy=True)) < count) == some


def test_levels_that_are_all_alike_have_a_plan():
    assert sorted(whole_evaluations(0.6, [5.0] * 8)) == [0, 1, 5, 6, 7]


ENDS = st.sampled_from([3.0, 7.0])


@given(RATIOS, st.integers(0, 200), st.sampled_from([-5.3, 0.0]), ENDS)
def test_a_plan_of_any_length_begins_whole_and_its_gaps_grow(ratio, count, begins, ends):
    asked = levels(count, begins, ends)
    if count > LEAST and ends > FINISHED:
        asked[-1] += 3.0 * (begins + ends)
    whole = sorted(whole_evaluations(ratio, asked))
    assert whole[:FIRST] == [*range(min(FIRST, count))]
    assert all(index < count for index in whole)
    if count <= LEAST or ratio == 0:
        assert whole == [*range(count)]
    if ends < FINISHED and count:
        count = whole.pop()
    gaps = [after - before for before, after in pairwise([*whole, count])]
    # To whole numbers, a gap may be one less than the one before.
    assert all(after >= before - 1 for before, after in pairwise(gaps))


def with_blank(count, blank):
    return [*levels(blank, -16, -10), *levels(count - blank, -8)]


@pytest.mark.parametrize(
    ("count", "blank", "whole"),
    [
        (20, 1, [0, 1, 2, 3, 4, 6, 8, 11, 15]),
        (20, 10, [0, 1, 2, *range(10, 14), 15, 17]),
        (20, 18, [0, 1, 2, *range(14, 20)]),
        (8, 5, [0, 1, 2, 5, 6, 7]),
    ],
)
def test_those_before_there_is_a_picture_are_shallow_first(count, blank, whole):
    assert sorted(whole_evaluations(0.6, with_blank(count, blank))) == whole


@given(RATIOS, RATIOS, st.integers(0, 60), st.integers(0, 60))
def test_that_leaves_hardly_more_whole_and_the_first_as_they_are(one, other, count, blank):
    asked = with_blank(count, min(blank, count))
    few, many = (whole_evaluations(ratio, asked) for ratio in sorted((one, other))[::-1])
    assert len(few) <= len(many) <= count
    assert {*range(min(FORMING, count))} <= few and max(few, default=0) < max(count, 1)
    # The rest has a few whole ones of its own.
    assert 0 <= len(few) - len(whole_evaluations(max(one, other), levels(count))) <= FORMING


@given(RATIOS, RATIOS, st.integers(0, 60), ENDS)
def test_more_ratio_never_means_more_whole_evaluations(one, other, count, ends):
    asked = levels(count, ends=ends)
    few, many = (len(whole_evaluations(ratio, asked)) for ratio in sorted((one, other))[::-1])
    assert few <= many


@pytest.mark.parametrize(("ratio", "least"), [(0.6, 5), (0.3, 6), (0.1, 9), (0.01, 47)])
@pytest.mark.parametrize("ends", [3.0, 7.0])
def test_the_shortest_run_with_a_shallow_evaluation(ratio, least, ends):
    assert shortest(ratio) == least
    assert len(whole_evaluations(ratio, levels(least, ends=ends))) == least - 1
    assert len(whole_evaluations(ratio, levels(least - 1, ends=ends))) == least - 1


def test_which_samplers_add_noise():
    noisy = "euler_ancestral", "dpmpp_2m_sde_gpu", "ddpm", "lcm", "er_sde", "seeds_2", "sa_solver"
    smooth = "euler", "heun", "dpm_2", "dpmpp_2m", "uni_pc", "res_multistep", "euler_cfg_pp"
    assert all(adds_noise(name) for name in (*noisy, "euler with s_churn"))
    assert not any(adds_noise(name) for name in smooth)


def test_which_samplers_leave_grain():
    assert all(leaves_grain(name) for name in ("euler_ancestral", "dpmpp_2m_sde_gpu", "lcm"))
    assert not any(leaves_grain(name) for name in ("euler", "dpmpp_3m_sde", "dpmpp_3m_sde_gpu"))


@pytest.mark.parametrize(
    ("sampler", "asked", "expected"),
    [
        ("dpmpp_3m_sde_gpu", levels(12, ends=3.0), True),
        ("dpmpp_3m_sde", coarse_end(12), True),
        ("dpmpp_3m_sde", levels(12), False),
        ("dpmpp_2m_sde", coarse_end(12), False),
        ("dpmpp_3m_sde", [5.0], False),
    ],
)
def test_which_runs_swing(sampler, asked, expected):
    assert swings(sampler, asked) == expected


def of(*values):
    """Features of one condition after another."""
    return torch.tensor(values).view(-1, 1, 1, 1)


def test_features_go_on_as_far_as_the_last_ones_kept_to_the_line():
    features = Features()
    features.keep(["a", "b"], 1.0, of(2.0, 5.0))
    assert torch.equal(features.at(["b", "a"], 3.0), of(5.0, 2.0))
    # How far they keep to lines is not known yet.
    features.keep(["a", "b"], 2.0, of(3.0, 3.0))
    assert torch.equal(features.at(["a", "b"], 3.0), of(3 + FIRST_SHARE, 3 - 2 * FIRST_SHARE))
    # The first goes on half as far as foretold, the second turns back.
    features.keep(["a", "b"], 4.0, of(4.0, 4.0))
    assert torch.equal(features.at(["a", "b"], 5.0), of(4.125, 4.0))
    # But never further than the last two are apart.
    assert torch.equal(features.at(["a", "b"], 99.0), of(5.0, 4.0))
    # The first goes on further than foretold.
    features.keep(["a", "b"], 5.0, of(6.0, 4.0))
    assert torch.equal(features.at(["a", "b"], 5.5), of(7.0, 4.0))


@given(
    st.lists(st.floats(0.1, 3.0), min_size=3, max_size=3),
    st.sampled_from([torch.float32, torch.float16]),
    st.integers(0, 1000),
)
def test_each_sample_goes_on_as_far_as_it_kept_to_its_own_line(distances, dtype, seed):
    draw = torch.Generator().manual_seed(seed)
    first, last, now = torch.randn(3, 2, 64, 8, 8, generator=draw).mul(1500).to(dtype)
    # The second sample comes almost straight, and norms of half precision overflow.
    now[1] = (2 * last - first)[1] + 5
    places = [0.0, *accumulate(distances)]
    features = Features()
    for place, each in zip(places, (first, last, now), strict=False):
        features.keep(["a"], place, each)
    found = features.at(["a"], places[3])
    for index in range(2):
        one, two, three = (each[index].double() for each in (first, last, now))
        line, change = (two - one) * (distances[1] / distances[0]), three - two
        part = float((change * line).sum() / line.norm() / max(line.norm(), change.norm()))
        along = min(1.0, max(0.0, part) ** 2 * distances[2] / distances[1])
        error = relative_error(found[index].double(), three + along * change)
        assert error < (1e-5 if dtype == torch.float32 else 3e-3)


def test_features_that_stay_go_nowhere():
    features = Features()
    for place in range(3):
        features.keep(["a"], float(place), of(2.0))
    assert torch.equal(features.at(["a"], 5.0), of(2.0))


def test_features_of_a_condition_that_was_left_out_are_too_old():
    features = Features()
    features.keep(["a", "b"], 1.0, of(2.0, 5.0))
    features.keep(["a"], 2.0, of(3.0))
    assert features.at(["a"], 3.0) is not None
    assert features.at(["b"], 3.0) is None
    assert features.at(["a", "b"], 3.0) is None


def test_features_of_what_does_not_come_again_are_dropped():
    features = Features()
    kept = []
    for step in range(6):
        features.keep([step, "always"], float(step), of(2.0, 5.0))
        kept.append(len(features._kept))
    assert kept == [2, 3, 3, 3, 3, 3]


def test_features_of_another_shape_or_an_earlier_place_begin_anew():
    features = Features()
    features.keep(["a"], 1.0, torch.zeros(1, 1, 2, 2))
    features.keep(["a"], 2.0, of(3.0))
    assert features.at(["a"], 4.0).item() == 3
    features.keep(["b"], 2.0, torch.zeros(1, 1, 2, 2))
    assert features.at(["a", "b"], 4.0) is None
    features.keep(["a"], 1.5, of(7.0))
    assert features.at(["a"], 2.0).item() == 7
    assert features.at(["a"], 1.0) is None


def test_a_condition_without_features_has_none():
    features = Features()
    features.keep(["a"], 1.0, of(2.0))
    assert features.at(["a", "b"], 2.0) is None
    features.clear()
    assert features.at(["a"], 2.0) is None


def test_what_is_kept_does_not_change_with_what_was_given():
    features, came = Features(), of(2.0)
    features.keep(["a"], 1.0, came)
    came += 1
    assert features.at(["a"], 2.0).item() == 2
