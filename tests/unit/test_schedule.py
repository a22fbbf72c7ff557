"""Steps, noise ranges and the ratio on its way."""

import pytest

from tome_nodes.patching.blocks import deepest_level
from tome_nodes.patching.schedule import is_active, is_noise_alone, ratio_at, step_index
from tome_nodes.settings.config import ToMeConfig


@pytest.mark.parametrize(
    ("sigma", "step"),
    [(14.6, 0), (20.0, 0), (9.0, 1), (8.0, 1), (5.0, 2), (4.9, 2), (0.1, 2)],
)
@pytest.mark.parametrize("since", range(3))
def test_step_of_an_evaluation(sigma, step, since):
    assert step_index([14.6, 9.0, 5.0, 0.0], sigma, since) == step


@pytest.mark.parametrize(
    ("schedule", "evaluated", "steps"),
    [
        ([0.1, 1.0, 5.0, 14.6], [0.1, 0.1, 1.0, 3.0, 5.0, 20.0], [0, 0, 1, 1, 2, 2]),
        (
            [10.0, 5.0, 2.0, 5.0, 2.0, 0.0],
            [10.0, 5.0, 3.0, 2.0, 5.0, 3.0, 2.0],
            [0, 1, 1, 2, 3, 3, 4],
        ),
        # A sampler that goes back up on its own repeats the steps.
        ([10.0, 5.0, 2.0, 0.0], [10.0, 5.0, 2.0, 7.0, 5.0, 2.0], [0, 1, 2, 0, 1, 2]),
        ([5.0], [5.0, 3.0], [0, 0]),
        ([5.0, 5.0, 0.0], [5.0, 5.0, 2.0], [0, 0, 1]),
    ],
)
def test_steps_of_schedules_that_rise(schedule, evaluated, steps):
    found = [0]
    for sigma in evaluated:
        found.append(step_index(schedule, sigma, found[-1]))
    assert found[1:] == steps


def test_noise_alone_is_at_the_highest_level():
    assert is_noise_alone(14.6, 14.6) and is_noise_alone(20.0, 14.6)
    assert not is_noise_alone(11.0, 14.6) and not is_noise_alone(0.75, 1.0)


@pytest.mark.parametrize(
    ("noise", "expected"), [(7.6, False), (7.5, True), (5.1, True), (5.0, False), (1.0, False)]
)
def test_merging_is_on_from_the_noise_level_of_its_start_and_off_at_that_of_its_end(
    noise, expected
):
    config = ToMeConfig(start_percent=0.25, end_percent=0.5)
    assert is_active(config, noise, lambda percent: 10 * (1 - percent)) is expected


def test_merging_that_ends_where_it_starts_is_never_on():
    config = ToMeConfig(start_percent=0.5, end_percent=0.5)
    assert not is_active(config, 5.0, lambda percent: 10 * (1 - percent))


@pytest.mark.parametrize(
    ("ratio_end", "expected"), [(0.4, [0.6, 0.5, 0.4]), (-1.0, [0.6] * 3), (0.0, [0.6, 0.3, 0.0])]
)
def test_ratio_moves_to_its_end_in_a_straight_line(ratio_end, expected):
    config = ToMeConfig(ratio=0.6, ratio_end=ratio_end)
    assert [ratio_at(config, progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx(expected)


def test_of_levels_with_as_many_blocks_the_shallowest_is_enough():
    stable_diffusion_1 = {1: 2, 2: 2, 4: 2, 8: 1}
    assert deepest_level(ToMeConfig(scope="stack"), stable_diffusion_1) == 1
