"""Steps, noise ranges and the ratio on its way."""

import pytest

from tome_nodes.patching.blocks import deepest_level
from tome_nodes.patching.schedule import NoiseRange, is_noise_alone, ratio_at, step_index
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


def test_noise_range_holds_its_start_and_not_its_end():
    noise = NoiseRange(start=5.0, end=1.0)
    assert 5.0 in noise and 1.5 in noise
    assert 1.0 not in noise and 5.1 not in noise
    assert 1.0 not in NoiseRange(start=1.0, end=1.0)


def test_noise_range_of_settings_is_that_of_the_model():
    noise = NoiseRange.of(ToMeConfig(start_percent=0.25, end_percent=0.5), lambda p: 10 * (1 - p))
    assert (noise.start, noise.end) == (7.5, 5.0)


@pytest.mark.parametrize(
    ("ratio_end", "expected"), [(0.4, [0.6, 0.5, 0.4]), (-1.0, [0.6] * 3), (0.0, [0.6, 0.3, 0.0])]
)
def test_ratio_moves_to_its_end_in_a_straight_line(ratio_end, expected):
    config = ToMeConfig(ratio=0.6, ratio_end=ratio_end)
    assert [ratio_at(config, progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx(expected)


def test_of_levels_with_as_many_blocks_the_shallowest_is_enough():
    stable_diffusion_1 = {1: 2, 2: 2, 4: 2, 8: 1}
    assert deepest_level(ToMeConfig(scope="stack"), stable_diffusion_1) == 1
