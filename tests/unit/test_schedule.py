"""Which step of a run an evaluation belongs to."""

import pytest

from tome_nodes.merging.schedule import step_index


@pytest.mark.parametrize(
    ("schedule", "evaluated", "steps"),
    [
        # A sampler that goes back up on its own repeats the steps.
        ([10.0, 5.0, 2.0, 0.0], [10.0, 5.0, 2.0, 7.0, 5.0, 2.0], [0, 1, 2, 0, 1, 2]),
        ([5.0], [5.0, 3.0], [0, 0]),
        ([5.0, 5.0, 0.0], [5.0, 5.0, 2.0], [0, 0, 1]),
    ],
)
def test_steps_of_schedules_that_rise(schedule, evaluated, steps):
    passed = [0]
    for sigma in evaluated:
        passed.append(step_index(schedule, sigma, passed[-1]))
    assert passed[1:] == steps
