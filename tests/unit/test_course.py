"""How answers go on as noise falls."""

import math
from dataclasses import replace

import pytest
import torch

from tome_nodes.skipping.course import CURVED, STRAIGHT, Shares, course_of
from tome_nodes.skipping.forecasts import Forecasts
from tome_nodes.skipping.plan import adds_noise
from tome_nodes.skipping.samplers import SAMPLERS
from tome_nodes.skipping.schedule import Schedule
from tome_nodes.skipping.steps import ForecastStep, log_snr


def at(noise, index=0, count=8, **others):
    return ForecastStep(index=index, count=count, log_snr=log_snr(noise, is_flow=True), **others)


def guess(power, step):
    """The best guess of a Gaussian picture of this power, on the way of a flow without error."""
    share = 1 / (1 + math.exp(step.log_snr / 2))
    return (1 - share) * power / math.sqrt((1 - share) ** 2 * power + share**2)


STEPS = [at(noise) for noise in (0.9, 0.8, 0.6, 0.3)]


def test_answers_go_on_as_those_for_a_gaussian_picture():
    first, last, between, now = STEPS
    by_power = {}
    for name in ("fine", "coarse", "whole"):
        power = math.exp(getattr(CURVED, name))
        by_power[name] = [guess(power, step) for step in STEPS]
    shares = replace(CURVED, most=9.0).shares(first, last, between)
    for share, (one, two, three, _) in zip(
        (shares.fine, shares.coarse), (by_power["fine"], by_power["coarse"]), strict=True
    ):
        assert share == pytest.approx(0.7 * (three - two) / (two - one))
    _, two, three, four = by_power["whole"]
    assert CURVED.place(last, between, now) == pytest.approx((three - two) / (four - two))


def test_a_straight_course_goes_by_the_logarithm():
    first, last, between, now = STEPS
    logs = [step.log_snr for step in STEPS]
    share = 0.7 * (logs[2] - logs[1]) / (logs[1] - logs[0])
    assert STRAIGHT.shares(first, last, between) == Shares(share, share)
    place = (logs[2] - logs[1]) / (logs[3] - logs[1])
    assert STRAIGHT.place(last, between, now) == pytest.approx(place)


@pytest.mark.parametrize("course", [STRAIGHT, CURVED])
def test_a_forecast_adds_at_most_so_many_times_the_last_change(course):
    shares = course.shares(at(0.99), at(0.989), at(0.5))
    assert shares == Shares(course.most, course.most)


def test_what_has_arrived_goes_on_no_more():
    ends = [replace(STEPS[0], log_snr=level) for level in (90.0, 91.0, 92.0)]
    assert CURVED.shares(*ends) == Shares(0.0, 0.0) and CURVED.place(*ends) == 0.0


@pytest.mark.parametrize("form", [(2, 3, 8, 12), (2, 1, 3, 5, 8, 8), (1, 2, 7, 10), (1, 1, 2, 1)])
def test_the_coarse_part_of_a_change_has_a_share_of_its_own(form):
    shares, flat = Shares(fine=0.5, coarse=0.25), torch.full(form, 3.0)
    assert torch.allclose(shares.of(flat), 0.25 * flat)
    change = torch.randn(form, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Shares(0.5, 0.5).of(change), 0.5 * change)
    assert torch.allclose(shares.of(change + flat), shares.of(change) + 0.25 * flat, atol=1e-6)
    parts = [Shares(fine=1.0).of(change), Shares(coarse=1.0).of(change)]
    assert torch.allclose(sum(parts), change, atol=1e-6)
    assert torch.allclose(shares.of(change), 0.5 * parts[0] + 0.25 * parts[1], atol=1e-6)


def test_what_is_fine_has_the_share_of_the_fine_part():
    row = torch.tensor([1.0, -1.0, -1.0, 1.0])
    change = (row * row[:, None]).repeat(1, 2, 3, 2)
    assert torch.allclose(Shares(fine=0.5, coarse=0.1).of(change), 0.5 * change)


@pytest.mark.parametrize(
    ("count", "form", "is_settled", "expected"),
    [
        (15, (1, 4, 8, 8), False, CURVED),
        (15, (1, 4, 1, 8, 8), False, CURVED),
        (15, (1, 4, 3, 8, 8), False, STRAIGHT),
        (15, (1, 4, 8, 8), True, STRAIGHT),
        (16, (1, 4, 8, 8), False, STRAIGHT),
        (15, (1, 64, 4), False, STRAIGHT),
    ],
    ids=["a picture", "one frame", "a video", "a settled run", "a long run", "tokens"],
)
def test_courses_are_curved_in_short_runs_of_pictures(count, form, is_settled, expected):
    assert course_of(at(0.5, count=count), torch.zeros(form), is_settled) is expected


@pytest.mark.parametrize("name", SAMPLERS)
def test_courses_are_straight_where_the_sampler_adds_noise(name):
    schedule = Schedule([0.9, 0.5, 0.2, 0.0], True, SAMPLERS[name], True, adds_noise(name))
    step = schedule.step(1, 0.5, None, is_active=True, follows=None)
    is_straight = course_of(step, torch.zeros(1, 4, 8, 8), is_settled=False) is STRAIGHT
    assert is_straight == adds_noise(name)


@torch.no_grad()
def test_a_short_run_of_pictures_goes_along_the_curves_and_makes_up_for_them():
    """One call, with guided answers, as in ComfyUI."""
    generator = torch.Generator().manual_seed(0)
    one, two, four = torch.randn(3, 2, 4, 8, 8, generator=generator).unbind()
    four = two + (two - one) + 0.1 * four
    steps = [
        replace(at(noise, index, count=4), latent_share=share)
        for index, (noise, share) in enumerate(((0.9, 0.9), (0.8, 0.75), (0.6, 0.5), (0.3, 0.0)))
    ]
    kept = Forecasts(0.6)
    for step, answer in zip(steps, (one, two), strict=False):
        assert not kept.begin(step, one)
        kept.observe(answer)
    assert kept.begin(steps[2], one)
    shares = CURVED.shares(*steps[:3])
    assert shares.fine != shares.coarse
    forecast = kept.predict()
    assert torch.allclose(forecast, two + shares.of(two - one), atol=1e-6)
    assert not kept.begin(steps[3], one)
    between = torch.lerp(two, four, CURVED.place(*steps[1:]))
    lacking = 0.5 * (between - forecast)
    corrected = kept.observe(four)
    assert torch.allclose(corrected, four + CURVED.response * lacking, atol=1e-5)
