"""In which steps a model runs, and what is forecast in the others."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tome_nodes import reasons
from tome_nodes.skipping.course import STRAIGHT
from tome_nodes.skipping.forecasts import Forecasts, Guidance
from tome_nodes.skipping.samplers import SAMPLERS
from tome_nodes.skipping.steps import (
    FASTER,
    ForecastStep,
    is_even,
    latent_share,
    log_snr,
    log_snrs,
    steps_that_run,
)


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
        (0.6, False, "RRRFRFFRFRFFRFRFFRFR"),
        (0.75, False, "RRRFFRFFFRFFRFFFRFFR"),
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
    assert "".join("FR"[step in running] for step in range(len(expected))) == expected


@pytest.mark.parametrize(("count", "changes"), [(4, []), (8, [0.4, 0.65, 0.9]), (20, [0.1, 0.2])])
def test_from_which_ratios_on_a_run_changes(count, changes):
    """The first of them; those of a run that is not settled."""
    runs = {number / 20: steps_that_run(number / 20, count, False) for number in range(1, 20)}
    seen = [after for before, after in pairwise(runs) if runs[before] != runs[after]]
    assert seen[: len(changes)] == changes and (changes or not seen)
    assert count - len(runs[0.05]) == 1


@given(st.floats(0, 1), st.integers(1, 100), st.booleans())
def test_as_many_are_forecast_as_the_ratio_says_spread_evenly(ratio, count, is_settled):
    running = sorted(steps_that_run(ratio, count, is_settled))
    first = min(3 if count >= 8 and not is_settled else 2, count)
    assert running[:first] == [*range(first)] and running[-1] == count - 1
    between = max(0, count - 1 - first)
    forecast = count - len(running)
    assert abs(forecast - between * ratio) <= 0.5 + 1e-9 or forecast == 1 <= between
    gaps = [after - before for before, after in pairwise(running[first - 1 :])]
    # Steps are whole, so a gap may be one shorter than an earlier one.
    assert all(abs(later - earlier) <= 1 for earlier, later in combinations(gaps, 2))


@pytest.fixture(autouse=True)
def as_hosts_sample():
    """Hosts sample without gradients."""
    with torch.no_grad():
        yield


def at(index, level, count=6, **others):
    return ForecastStep(index=index, count=count, log_snr=level, **others)


def latent(seed=0, batch=2):
    """Of tokens, whose answers go on along a straight line."""
    return torch.randn(batch, 4, 64, generator=torch.Generator().manual_seed(seed))


ONE, CHANGE = latent(), 0.1 * latent(1)
KNOWN = ((0, -4.0, ONE), (1, -2.0, ONE + CHANGE))


def predicted(kept, step, latent, call=0):
    """The forecast of a call, the first of which begins the step."""
    if call == 0:
        kept.begin(step, latent)
    return kept.predict(call)


def run(kept, step, answer, call=0):
    """A call in a step that has to run, and what the sampler gets."""
    assert predicted(kept, step, answer, call) is None
    return kept.observe(answer, call)


def guided_run(kept, step, answer):
    """The same of a call whose answer a host guides to what it is."""
    run(kept, step, answer)
    kept.note_guided(answer)


def letters(kept, steps):
    """Which of these steps ran and which were forecast, given what a run of them would answer."""
    line = ""
    for step, answer in steps:
        is_run = predicted(kept, step, ONE) is None
        line += "R" if is_run else "F"
        if is_run:
            kept.observe(answer)
    return line


def after(*answers, ratio=0.6, **others):
    """What is kept after these steps, levels and answers."""
    kept = Forecasts(ratio)
    for index, level, answer in answers:
        run(kept, at(index, level, **others), answer)
    return kept


def test_a_forecast_goes_on_in_the_direction_of_the_last_change():
    kept = after(*KNOWN)
    forecast = predicted(kept, at(2, 1.0), ONE)
    # The last change was over 2, the forecast is over 3, of which 0.7 is taken.
    assert torch.allclose(forecast, ONE + CHANGE * (1 + 0.7 * 1.5), atol=1e-6)
    assert kept.forecast_steps == {2}
    assert predicted(kept, at(3, 1.5), ONE) is None


def test_the_model_runs_in_the_step_after_the_scale_of_guidance_jumps():
    kept = Forecasts(1.0, sees_guidance=True)
    for (index, level, answer), scale in zip(KNOWN, (1.0, 4.0), strict=True):
        run(kept, at(index, level), answer)
        kept.note_guided(answer, Guidance(scale, CHANGE))
    run(kept, at(2, 1.0), ONE + 2 * CHANGE)
    kept.note_guided(ONE + 2 * CHANGE, Guidance(4.0, CHANGE))
    assert kept.reason == reasons.CHANGES
    assert predicted(kept, at(3, 2.0), ONE) is not None


def test_a_step_that_runs_after_all_was_not_forecast():
    kept = Forecasts(1.0, sees_guidance=True)
    for index, level, answer in KNOWN:
        run(kept, at(index, level), answer)
        kept.note_guided(answer, Guidance(1.0, CHANGE))
    assert predicted(kept, at(2, 1.0), ONE) is not None and kept.jumps_to(4.0)
    kept.take_back()
    kept.observe(ONE)
    assert not kept.forecast_steps and kept.reason == reasons.CHANGES
    assert torch.equal(kept.note_guided(ONE, Guidance(4.0, CHANGE)), ONE)
    assert predicted(kept, at(3, 2.0), ONE) is None


def guided_otherwise(answer):
    """By what no scale does."""
    return answer * answer.norm()


def test_guidance_that_is_no_scale_is_forecast_as_a_whole():
    """What it makes of forecasts is not what it would make of answers."""
    kept = Forecasts(0.6, sees_guidance=True)
    for index, level, answer in KNOWN:
        run(kept, at(index, level), answer)
        assert kept.note_guided(guided_otherwise(answer)) is not None
    found = predicted(kept, at(2, 1.0), ONE)
    first, last = (guided_otherwise(answer) for *_, answer in KNOWN)
    expected = last + (last - first) * 0.7 * 1.5
    assert torch.allclose(kept.note_guided(guided_otherwise(found)), expected, atol=1e-4)


@pytest.mark.parametrize("scales", [(2.0, 2.0, 2.0), (2.0, 6.0, 6.0), (2.0, 2.0, 6.0)])
def test_a_guided_answer_makes_up_for_forecasts_by_the_scale_that_each_had(scales):
    kept, (before, in_forecast, now) = Forecasts(0.6, sees_guidance=True), scales
    sampled = {"latent_share": 0.5, "count": 6}

    def guided(scale, pair):
        return kept.note_guided(
            torch.lerp(pair[1], pair[0], scale), Guidance(scale, pair[0] - pair[1])
        )

    pairs = [torch.stack([ONE + index**2 * CHANGE, ONE * index]) for index in range(4)]
    for index in (0, 1):
        assert predicted(kept, at(index, index * 2.0, **sampled), ONE) is None
        # The answers to conditions are not corrected.
        assert torch.equal(kept.observe(pairs[index]), pairs[index])
        guided(before, pairs[index])
    forecast = predicted(kept, at(2, 4.0, **sampled), ONE)
    used = guided(in_forecast, forecast)
    assert torch.equal(used, torch.lerp(forecast[1], forecast[0], in_forecast))
    assert predicted(kept, at(3, 6.0, **sampled), ONE) is None
    assert torch.equal(kept.observe(pairs[3]), pairs[3])
    corrected = guided(now, pairs[3])
    should = torch.lerp(pairs[1], pairs[3], 0.5)
    lacking = 0.5 * (torch.lerp(should[1], should[0], in_forecast) - used)
    times = 0.5 / 0.5 + STRAIGHT.response
    expected = torch.lerp(pairs[3][1], pairs[3][0], now) + times * lacking
    assert torch.allclose(corrected, expected, atol=1e-4)


def test_a_forecast_adds_at_most_three_times_the_last_change():
    forecast = predicted(after(*KNOWN), at(2, 90.0), ONE)
    assert torch.allclose(forecast, ONE + CHANGE * 4, atol=1e-5)


def test_two_answers_too_close_in_noise_count_as_one():
    last = ONE + 2 * CHANGE
    kept = after((0, -4.0, latent(3)), (1, -3.99, ONE), (2, -2.0, last), count=7, ratio=1)
    forecast = predicted(kept, at(3, 0.0, 7), ONE)
    assert torch.allclose(forecast, torch.lerp(ONE, last, 1 + 0.7 * 2 / 1.99), atol=1e-5)
    alone = after((0, -2.0, ONE), (1, -2.0, last))
    assert predicted(alone, at(2, 0.0), ONE) is None


@pytest.mark.parametrize(("change", "forecast"), [(0.1, "FRFRF"), (0.2, "RFRRF")])
def test_a_run_is_settled_if_its_first_answers_hardly_differ(change, forecast):
    kept = after((0, -4.0, ONE), (1, -3.0, ONE / (1 - change)), count=8)
    # A larger change later does not count.
    steps = [(at(index, index - 4.0, 8), index * ONE) for index in range(2, 7)]
    assert letters(kept, steps) == forecast


@pytest.mark.parametrize(
    ("count", "from_noise", "is_forecast"), [(5, True, False), (6, True, True), (5, False, True)]
)
def test_short_edits_are_not_forecast(count, from_noise, is_forecast):
    kept = after(*KNOWN, ratio=1.0, count=count, from_noise=from_noise)
    forecast = predicted(kept, at(2, 1.0, count, from_noise=from_noise), ONE)
    assert (forecast is not None) == is_forecast
    assert is_forecast or kept.reason == reasons.EDIT


@pytest.mark.parametrize(
    ("answers", "count"),
    [
        (((0, -9.0, ONE), (1, -8.0, ONE + CHANGE)), 8),
        (KNOWN, 16),
        (((0, -4.0, ONE), (1, -2.0, torch.cat([ONE[:1], 1.3 * ONE[1:]]))), 8),
    ],
    ids=["much noise", "a long run", "one sample"],
)
def test_such_a_run_is_not_settled(answers, count):
    for fewer in (8, 15):
        assert predicted(after(*KNOWN, count=fewer), at(2, 1.0, fewer), ONE) is not None
    assert predicted(after(*answers, count=count), at(2, 1.0, count), ONE) is None


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
    *levels, last = (-1.0, 0.0, 2.0)[-len(shares) :]
    others = {"count": 3 + len(levels), "from_noise": False}
    kept, lacking = after(*KNOWN, ratio=1.0, **others), 0.0
    for index, (level, share) in enumerate(zip(levels, shares, strict=False), start=2):
        forecast = predicted(kept, at(index, level, latent_share=share, **others), ONE)
        # The second answer is at a level of -2, this one at 2.
        between = ONE + CHANGE * (1 + (level + 2) / 4)
        lacking = share * lacking + (1 - share) * (between - forecast)
    now = at(2 + len(levels), last, latent_share=shares[-1], **others)
    answer = ONE + 2 * CHANGE
    expected = answer + (weight + 0.7) * lacking
    assert torch.allclose(run(kept, now, answer), expected, atol=1e-6)


@pytest.mark.parametrize(("share", "holds"), [(0.0, 0.0), (0.5, 0.0), (24 / 35, 0.4), (0.9, 0.7)])
def test_an_answer_that_hardly_changed_holds_less_of_an_error(share, holds):
    """The first sample goes on by a share of the last change, the second by all of it."""
    others = {"count": 4, "from_noise": False}
    kept = after(*KNOWN, **others)
    forecast = predicted(kept, at(2, 0.0, latent_share=0.2, **others), ONE)
    change = torch.tensor([share, 1.0]).view(2, 1, 1) * CHANGE
    # The forecast is half way between two answers, and 0.8 of its error is in the latent.
    lacking = 0.8 * (ONE + CHANGE + change / 2 - forecast)
    answer = ONE + CHANGE + change
    expected = answer + torch.tensor([holds, 0.7]).view(2, 1, 1) * lacking
    corrected = run(kept, at(3, 2.0, latent_share=0.0, **others), answer)
    assert torch.allclose(corrected, expected, atol=1e-6)


def test_an_answer_makes_up_for_a_forecast_once():
    kept = after(*KNOWN, count=8, from_noise=False)
    answers = [ONE + share * CHANGE for share in (3, 4)]
    assert predicted(kept, at(2, 1.0, 8, latent_share=0.8, from_noise=False), ONE) is not None
    first = run(kept, at(3, 2.0, 8, latent_share=0.7, from_noise=False), answers[0])
    assert not torch.equal(first, answers[0])
    # The step that was to be forecast runs, as another node takes part.
    other = at(4, 3.0, 8, latent_share=0.6, from_noise=False, is_active=False)
    assert run(kept, other, answers[1]) is answers[1]


@pytest.mark.parametrize(
    ("share", "last_share", "index", "level"),
    [
        (0.8, None, 3, 2.0),
        (None, 0.8, 3, 2.0),
        (0.8, 0.5, 5, 2.0),
        (0.8, 0.5, 3, -1.99),
    ],
    ids=["its share", "the forecast's share", "steps left out", "hardly less noise"],
)
def test_an_answer_stays_as_it_is_where_nothing_is_known_of(share, last_share, index, level):
    kept = after(*KNOWN)
    assert predicted(kept, at(2, min(level, 1.0), latent_share=share), ONE) is not None
    answer = ONE + 2 * CHANGE
    assert run(kept, at(index, level, latent_share=last_share), answer) is answer


def test_what_was_answered_is_kept_even_if_the_host_changes_it():
    answer = ONE + CHANGE
    kept = after(KNOWN[0], (1, -2.0, answer))
    answer.zero_()
    expected = predicted(after(*KNOWN), at(2, 1.0), ONE)
    assert torch.equal(predicted(kept, at(2, 1.0), ONE), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"conditions": "another prompt"},
        {"index": 4},
        {"log_snr": -3.0},
        {"is_active": False},
        {"is_even": False},
    ],
    ids=str,
)
def test_the_model_runs_where_the_course_changes(change):
    assert predicted(after(*KNOWN), at(2, 1.0), ONE) is not None
    assert predicted(after(*KNOWN), replace(at(2, 1.0), **change), ONE) is None


@pytest.mark.parametrize("other", [ONE[:1], ONE.double()], ids=["batch", "dtype"])
def test_the_model_runs_where_the_latent_changes(other):
    assert predicted(after(*KNOWN), at(2, 1.0), other) is None


def test_after_a_change_two_steps_run_before_the_next_forecast():
    kept = after(*KNOWN, count=7, ratio=1.0)
    assert predicted(kept, at(2, -1.0, 7), ONE) is not None
    for index in (3, 4):
        run(kept, at(index, float(index), 7, conditions="another prompt"), ONE + index * CHANGE)
    forecast = predicted(kept, at(5, 5.0, 7, conditions="another prompt"), ONE)
    assert torch.allclose(forecast, ONE + 4.7 * CHANGE, atol=1e-5)


@pytest.mark.parametrize(("back", "is_forecast"), [(-0.6, False), (-0.4, True), (0.1, True)])
def test_the_model_runs_where_answers_take_back_half_of_a_change(back, is_forecast):
    """In one sample of two: a small share that is negative is no turn."""
    change = latent(1)
    third = ONE + (1 + torch.tensor([0.3, back]).view(2, 1, 1)) * change
    answers = (ONE, ONE + change, third)
    kept = after(*((index, index - 4.0, answer) for index, answer in enumerate(answers)), count=8)
    step = at(3, 0.0, 8)
    assert (predicted(kept, step, ONE) is not None) == is_forecast
    assert is_forecast or kept.reason == reasons.TURNS


STREAMS = slice(0, 250), slice(250, 256)
"""A large and a small one, in the numbers of a sample."""


@pytest.mark.parametrize(("streams", "is_forecast"), [((), True), (STREAMS, False)])
def test_the_model_runs_where_a_small_stream_takes_back_half_of_its_change(streams, is_forecast):
    """In one sample of two, while the large one goes on."""
    change = latent(1)
    third = ONE + 1.5 * change
    third[1].view(-1)[250:] = (ONE + 0.4 * change)[1].flatten()[250:]
    kept = Forecasts(0.6, streams)
    for index, answer in enumerate((ONE, ONE + change, third)):
        guided_run(kept, at(index, index - 4.0, 8), answer)
    forecast = predicted(kept, at(3, 0.0, 8), ONE)
    assert (forecast is not None) == is_forecast
    assert is_forecast or kept.reason == reasons.TURNS


@pytest.mark.parametrize(("streams", "forecast"), [((), "FRFRF"), (STREAMS, "RFRRF")])
def test_a_run_is_settled_only_if_all_streams_are(streams, forecast):
    first = ONE.clone()
    first.flatten(1)[:, 250:] *= 0.8
    kept = Forecasts(0.6, streams)
    guided_run(kept, at(0, -4.0, 8), first)
    guided_run(kept, at(1, -3.0, 8), ONE)
    steps = [(at(index, index - 4.0, 8), index * ONE) for index in range(2, 7)]
    assert letters(kept, steps) == forecast


@pytest.mark.parametrize(("count", "is_forecast"), [(15, False), (16, True)])
def test_a_short_run_whose_answers_turned_is_left_alone(count, is_forecast):
    change = latent(1)
    answers = (ONE, ONE + change, ONE, *(ONE + index * change for index in range(1, 9)))
    kept = Forecasts(0.6)
    letters(kept, ((at(index, float(index), count), now) for index, now in enumerate(answers)))
    assert bool(kept.forecast_steps) == is_forecast
    assert is_forecast or kept.reason == reasons.TURNS


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"count": 3}, reasons.too_short(3, 4)),
        ({"count": 1}, reasons.too_short(1, 4)),
        ({"is_active": False}, reasons.FORECAST_PERCENTS),
        ({"conditions": int}, reasons.CHANGES),
        ({"log_snr": lambda index: -float(index)}, reasons.NOISE_RISES),
    ],
    ids=["too short", "one step", "percents", "changes", "noise rises"],
)
def test_a_run_says_why_nothing_was_forecast(others, why):
    kept = Forecasts(0.6)
    for index in range(others.get("count", 6)):
        given = {name: value(index) if callable(value) else value for name, value in others.items()}
        run(kept, replace(at(index, float(index)), **given), ONE * index)
    assert kept.reason == why


@pytest.mark.parametrize(
    ("uneven", "inactive", "why"),
    [
        ({3, 18}, (), reasons.TURNS),
        (range(1, 18), (), reasons.UNEVEN),
        # The steps between the percents say what is in the way.
        ((), range(9), reasons.TURNS),
        ((), range(3, 19), reasons.FORECAST_PERCENTS),
    ],
    ids=["one is uneven", "one turns back", "half outside of the percents", "all outside"],
)
def test_the_reason_is_that_of_most_steps(uneven, inactive, why):
    """Every second answer goes back."""
    kept = Forecasts(0.6)
    for index in range(20):
        others = {"is_even": index not in uneven, "is_active": index not in inactive}
        run(kept, at(index, float(index), 20, **others), ONE + index % 2 * CHANGE)
    assert not kept.forecast_steps and kept.reason == why


def test_a_run_in_which_another_node_leaves_out_the_steps_says_so():
    kept = after(*((index, float(index), ONE * index) for index in (0, 1, 3, 5)))
    assert kept.reason == reasons.LEFT_OUT


def test_nothing_is_forecast_while_gradients_are_computed_and_answers_are_not_kept():
    with torch.enable_grad():
        kept = after(*KNOWN)
        assert predicted(kept, at(2, 1.0), ONE) is None
    assert kept.reason == reasons.GRADIENTS
    assert predicted(kept, at(2, 1.0), ONE) is None


def two_calls(kept, index, *answers, count=6):
    """A step of several calls; whether they were forecast."""
    step, are_forecast = at(index, 2.0 * index - 4, count), []
    for call, answer in enumerate(answers):
        are_forecast.append(predicted(kept, step, answer, call) is not None)
        if not are_forecast[-1]:
            kept.observe(answer, call)
    return are_forecast


def test_after_a_change_as_many_steps_run_as_at_the_start():
    steps = [
        (at(index, float(index), 12, conditions=index >= 5), index**1.5 * ONE)
        for index in range(12)
    ]
    assert letters(Forecasts(1.0), steps) == "RRRFFRRRFFFR"


def test_the_calls_of_a_step_are_forecast_together_or_not_at_all():
    kept = Forecasts(1.0)
    calls = [two_calls(kept, index, ONE * index, CHANGE * index, count=8) for index in range(8)]
    assert calls == [[False] * 2] * 3 + [[True] * 2] * 4 + [[False] * 2]


def test_the_host_is_asked_before_every_call_and_may_have_the_model_run():
    kept, asked = Forecasts(0.6), []

    def refuse(may):
        asked.append(may)
        return False

    for index in range(6):
        step = at(index, index)
        kept.begin(step, ONE)
        assert kept.predict(agree=refuse) is None
        kept.observe(ONE + index * CHANGE)
    assert asked == [False, False, True, False, True, False]
    assert kept.reason == reasons.OTHER_RANKS


def test_a_call_that_ended_is_not_continued_from_long_ago():
    kept = Forecasts(1.0)
    for index in range(3):
        two_calls(kept, index, ONE * index, CHANGE * index, count=9)
    assert two_calls(kept, 3, ONE, count=9) == [True]
    assert two_calls(kept, 4, ONE, CHANGE, count=9) == [False, False]
    # It has answered only once since.
    assert two_calls(kept, 5, ONE, CHANGE, count=9) == [False, False]


def test_each_call_has_its_own_line():
    kept = Forecasts(0.6)
    for index in range(2):
        two_calls(kept, index, ONE * index, CHANGE * index)
    step = at(2, 0.0)
    assert torch.allclose(predicted(kept, step, ONE, 0), ONE * 1.7, atol=1e-6)
    assert torch.allclose(predicted(kept, step, ONE, 1), CHANGE * 1.7, atol=1e-6)


@pytest.mark.parametrize(
    ("noise", "is_flow", "expected"),
    [
        *((0.5, True, 0.0), (0.1, True, 2 * math.log(9)), (2.0, False, -2 * math.log(2))),
        # Pure noise of a flow.
        *((noise, True, -2 * math.log(99)) for noise in (0.99, 1.0)),
    ],
)
def test_the_logarithm_of_signal_to_noise(noise, is_flow, expected):
    assert log_snr(noise, is_flow) == pytest.approx(expected)


@pytest.mark.parametrize("faster", [FASTER, SAMPLERS["dpmpp_2m"].faster])
def test_levels_without_noise_keep_their_place_and_steps_around_them_run(faster):
    noises = [4.0, 3.0, 2.0, 0.0, 2.0, 1.5, 1.0, 0.7]
    levels = log_snrs(noises, is_flow=False)
    assert [*map(math.isinf, levels)] == [noise == 0 for noise in noises]
    assert not any(is_even(levels, index, faster) for index in (2, 4))


@pytest.mark.parametrize(
    ("levels", "index", "expected"),
    [
        ([-4, -2, 0, 2, 4], 2, True),
        ([-4, -2, 0, 5, 6], 2, False),
        ([-4, -3, -2, 4, 6], 3, False),
        ([-4, -2, 0, 2, 9], 4, True),
        ([-4, -2, 0, 5, 6, *range(7, 28)], 2, False),
    ],
    ids=["even", "faster next", "faster", "the last", "a long run"],
)
def test_no_step_is_forecast_where_noise_falls_unevenly(levels, index, expected):
    assert is_even(levels, index) == expected


def test_samplers_that_look_back_need_noise_that_falls_more_evenly():
    levels = [-4, -2, 0, 3, 5]
    assert is_even(levels, 2) and not is_even(levels, 2, SAMPLERS["dpmpp_2m"].faster)


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
