"""In which steps a model runs, and what is forecast in the others."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tome_nodes.patching import forecast
from tome_nodes.patching.forecast import Forecasts, steps_that_run
from tome_nodes.patching.schedule import Moment, latent_share, log_snr


@pytest.mark.parametrize(
    ("ratio", "is_settled", "expected"),
    [
        (0.6, False, "RRFR"),
        (0.3, False, "RRFR"),
        (0.6, False, "RRRFR"),
        (0.6, False, "RRFRFR"),
        (0.3, False, "RRRRRFRR"),
        (0.6, False, "RRRFRRFR"),
        (0.75, False, "RRRFRFFR"),
        (0.6, False, "RRRFRFRFFRFR"),
        (0.6, False, "RRRRFRFFRFRFFRFFRFFR"),
        (0.75, False, "RRRFRFFRFFFRFFFRFFFR"),
        (1.0, False, "RRRFFFFR"),
        (0.9, False, "RRR"),
        (0.9, False, "R"),
        # Settled runs are forecast from the third step on, and evenly.
        (0.6, True, "RRFR"),
        (0.6, True, "RRFRFRFR"),
        (0.75, True, "RRFFRFFR"),
        (0.6, True, "RRFRFRFFRFRFRFRFFRFR"),
    ],
)
def test_steps_between_the_first_and_the_last_are_forecast(ratio, is_settled, expected):
    running = steps_that_run(ratio, len(expected), is_settled)
    letters = ["R" if step in running else "F" for step in range(len(expected))]
    assert "".join(letters) == expected


@given(st.floats(0, 1), st.integers(1, 100), st.booleans())
def test_as_many_are_forecast_as_the_ratio_says_and_more_in_a_row_later(ratio, steps, is_settled):
    running = sorted(steps_that_run(ratio, steps, is_settled))
    first = min(3 if steps >= 8 and not is_settled else 2, steps)
    assert running[:first] == [*range(first)] and running[-1] == steps - 1
    between = max(0, steps - 1 - first)
    forecast = steps - len(running)
    assert abs(forecast - between * ratio) <= 0.5 + 1e-9 or forecast == 1 <= between
    gaps = [
        after - before for before, after in zip(running[first - 1 :], running[first:], strict=False)
    ]
    # Steps are whole, so a gap may be one shorter than an earlier one.
    assert all(later >= earlier - 1 for earlier, later in combinations(gaps, 2))


def moment(step, level, steps=6, **others):
    given = {"progress": 0.0, "picks": 0, "part": "part", "is_active": True}
    given |= {"steps_left": steps - 1 - step, "log_snr": level}
    return Moment(step=step, **given | others)


@pytest.fixture(autouse=True)
def as_hosts_sample():
    """Hosts sample without gradients."""
    with torch.no_grad():
        yield


def after(*answers, ratio=0.6, **others):
    """What is kept after these steps, levels and answers."""
    kept = Forecasts(ratio)
    for step, level, answer in answers:
        kept.answered(moment(step, level, **others), answer)
    return kept


def latent(seed=0, batch=2):
    return torch.randn(batch, 4, 8, 8, generator=torch.Generator().manual_seed(seed))


ONE, CHANGE = latent(), 0.1 * latent(1)
KNOWN = ((0, -4.0, ONE), (1, -2.0, ONE + CHANGE))


def test_a_forecast_goes_on_in_the_direction_of_the_last_change():
    found = after(*KNOWN).answer(moment(2, 1.0), ONE)
    # The last change was over 2, the forecast is over 3, of which 0.7 is taken.
    assert torch.allclose(found, ONE + CHANGE * (1 + 0.7 * 1.5), atol=1e-6)
    assert after(*KNOWN).answer(moment(3, 1.0), ONE) is None
    none = after(*KNOWN, ratio=0.0)
    assert none.answer(moment(2, 1.0), ONE) is None
    assert "is 0; raise it" in none.why_none(moment(2, 1.0))


@pytest.mark.parametrize(("change", "forecast"), [(0.1, "FRFRF"), (0.2, "RFRRF")])
def test_a_run_is_settled_if_its_first_answers_hardly_differ(change, forecast):
    one = latent()
    other = one / (1 - change)
    answers = ((0, -4.0, one), (1, -3.0, other))
    found = [after(*answers).answer(moment(step, 9.0, steps=8), one) for step in range(2, 7)]
    assert "".join("R" if each is None else "F" for each in found) == forecast
    # What comes later does not count.
    later = after(*answers, (2, -2.0, other), (3, -1.0, other))
    assert (later.answer(moment(4, 9.0, steps=8), one) is None) == (change > 0.15)


@pytest.mark.parametrize(
    ("steps", "from_noise", "is_forecast"), [(5, True, False), (6, True, True), (5, False, True)]
)
def test_short_edits_are_not_forecast(steps, from_noise, is_forecast):
    kept = after(*KNOWN, ratio=1.0, steps=steps)
    now = moment(2, 1.0, steps, from_noise=from_noise)
    assert (kept.answer(now, ONE) is not None) == is_forecast
    assert is_forecast or "hardly changes" in kept.why_none(now)


@pytest.mark.parametrize(
    ("answers", "steps"),
    [
        (((0, -9.0, ONE), (1, -8.0, ONE + CHANGE)), 8),
        (KNOWN, 16),
        (((0, -4.0, ONE), (1, -2.0, torch.cat([ONE[:1], 1.3 * ONE[1:]]))), 8),
    ],
    ids=["much noise", "a long run", "one sample"],
)
def test_such_a_run_is_not_settled(answers, steps):
    for fewer in (8, 15):
        assert after(*KNOWN).answer(moment(2, 1.0, steps=fewer), ONE) is not None
    assert after(*answers, steps=steps).answer(moment(2, 1.0, steps=steps), ONE) is None


def test_a_run_of_which_one_part_is_not_settled_is_not():
    kept = after(*KNOWN)
    assert kept.answer(moment(2, 1.0, steps=8), ONE) is not None
    for step, level, answer in ((0, -4.0, ONE), (1, -2.0, 1.3 * ONE)):
        kept.answered(moment(step, level, part="another"), answer)
    assert kept.answer(moment(2, 1.0, steps=8), ONE) is None


@pytest.mark.parametrize(
    ("shares", "weight"),
    [
        ([0.8, 0.5], 1.0),
        ([0.9, 0.8, 0.5], 1.0),
        # A short step does not make up for more than the error.
        ([0.8, 0.999], 0.999 / 0.2),
        # The last answer is changed by what the latent lacks.
        ([0.8, 0.0], 0.0),
    ],
    ids=["one", "several", "a short step", "the last"],
)
def test_an_answer_makes_up_for_the_errors_of_the_forecasts_before_it(shares, weight):
    """``shares`` are of the latent in the next, of the forecasts and of the answer."""
    kept, lacking = after(*KNOWN, ratio=1.0, steps=7), 0.0
    *levels, last = (-1.0, 0.0, 2.0)[-len(shares) :]
    for step, (level, share) in enumerate(zip(levels, shares, strict=False), start=2):
        now = moment(step, level, steps=7, latent_share=share)
        forecast = kept.answer(now, ONE)
        assert torch.equal(kept.answer(now, ONE), forecast)
        # The second answer is at a level of -2, this one at 2.
        between = ONE + CHANGE * (1 + (level + 2) / 4)
        lacking = share * lacking + (1 - share) * (between - forecast)
    now = moment(2 + len(levels), last, steps=7, latent_share=shares[-1])
    answer = ONE + 2 * CHANGE
    expected = answer + (weight + 0.7) * lacking
    assert torch.allclose(kept.answered(now, answer), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("answer", "share", "last_share", "step"),
    [
        (ONE + 2 * CHANGE, 0.8, None, 3),
        (ONE + 2 * CHANGE, None, 0.8, 3),
        (ONE + 2 * CHANGE, 0.8, 0.5, 4),
        (latent(7), 0.8, 0.5, 3),
    ],
    ids=["its share", "that of the forecast", "a step left out", "another place"],
)
def test_an_answer_stays_as_it_is_where_nothing_is_known_of(answer, share, last_share, step):
    kept = after(*KNOWN, ratio=1.0, steps=7)
    assert kept.answer(moment(2, 0.0, steps=7, latent_share=share), ONE) is not None
    now = moment(step, 1.0, steps=7, latent_share=last_share)
    assert kept.answered(now, answer) is answer


def test_an_answer_makes_up_for_a_forecast_once():
    kept = after(*KNOWN)
    kept.answer(moment(2, 1.0, latent_share=0.8), ONE)
    answers = [ONE + share * CHANGE for share in (2, 3)]
    found = [
        kept.answered(moment(step, level, latent_share=0.7), each)
        for step, level, each in zip((3, 4), (2.0, 3.0), answers, strict=True)
    ]
    assert not torch.equal(found[0], answers[0]) and torch.equal(found[1], answers[1])
    again = kept.answered(moment(4, 3.0, latent_share=0.7), answers[0])
    assert torch.equal(again, answers[0])


def test_what_was_answered_is_kept_even_if_the_host_changes_it():
    answer = ONE + CHANGE
    kept = after(KNOWN[0], (1, -2.0, answer))
    answer.zero_()
    expected = after(*KNOWN).answer(moment(2, 1.0), ONE)
    assert torch.equal(kept.answer(moment(2, 1.0), ONE), expected)


def test_only_the_first_evaluation_of_a_step_counts():
    again = after(*KNOWN, (1, -1.0, latent(9)))
    assert torch.equal(again.answer(moment(2, 1.0), ONE), after(*KNOWN).answer(moment(2, 1.0), ONE))


@pytest.mark.parametrize(
    "known",
    [
        KNOWN[:1],
        (KNOWN[0], (1, -5.0, ONE)),
        (KNOWN[0], (1, -2.0, latent(7))),
        (KNOWN[0], (1, -2.0, ONE[:1])),
        (KNOWN[0], (1, -2.0, ONE.double())),
    ],
    ids=["one answer", "more noise", "another place", "another batch", "another type"],
)
def test_the_model_runs_where_two_answers_do_not_go_together(known):
    assert after(*known).answer(moment(2, 1.0), ONE) is None


@pytest.mark.parametrize(
    "other",
    [
        {"part": "another"},
        {"is_active": False},
        {"steps_left": None},
        {"log_snr": None},
        {"log_snr": -3.0},
    ],
    ids=str,
)
def test_the_model_runs_where_a_step_cannot_be_forecast(other):
    known = after(*KNOWN)
    assert known.answer(replace(moment(2, 1.0), **other), ONE) is None
    assert known.answer(moment(2, 1.0), ONE) is not None


def test_the_model_runs_while_gradients_are_computed_and_its_answers_are_not_kept():
    known = after(*KNOWN)
    with torch.enable_grad():
        assert known.answer(moment(2, 1.0), ONE) is None
        unknown = after(*KNOWN)
    assert unknown.answer(moment(2, 1.0), ONE) is None


def test_answers_of_a_video_and_of_packed_values_are_forecast_too():
    for shape in ((1, 4, 3, 8, 8), (1, 1, 500)):
        one = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        kept = after((0, -4.0, one), (1, -2.0, one * 1.1))
        assert torch.allclose(kept.answer(moment(2, 0.0), one), one * (1.1 + 0.7 * 0.1))


def test_only_so_many_parts_are_kept():
    kept = Forecasts(0.6)
    for part in range(forecast._PARTS_KEPT + 5):
        for step, level, answer in KNOWN:
            kept.answered(moment(step, level, part=part), answer)
    assert kept.answer(moment(2, 1.0, part=0), ONE) is None
    assert kept.answer(moment(2, 1.0, part=forecast._PARTS_KEPT), ONE) is not None
    kept.clear()
    assert kept.answer(moment(2, 1.0, part=forecast._PARTS_KEPT), ONE) is None


@pytest.mark.parametrize(
    ("noise", "is_flow", "expected"),
    [(0.5, True, 0.0), (0.1, True, 2 * math.log(9)), (2.0, False, -2 * math.log(2))],
)
def test_the_logarithm_of_signal_to_noise(noise, is_flow, expected):
    assert log_snr(noise, is_flow) == pytest.approx(expected)


def test_pure_noise_of_a_flow_has_a_finite_logarithm():
    assert log_snr(1.0, True) == log_snr(0.99, True) < log_snr(0.98, True)


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ([1.0, 0.8, 0.2, 0.0], 1, 0.25),
        ([1.0, 0.8, 0.2, 0.0], 2, 0.0),
        ([1.0, 0.8, 0.8, 0.0], 1, None),
        ([0.2, 0.8], 0, None),
        ([1.0], 0, None),
    ],
    ids=["falls", "last", "stays", "rises", "not known"],
)
def test_the_share_of_a_latent_in_the_next(schedule, step, expected):
    assert latent_share(schedule, step) == expected
