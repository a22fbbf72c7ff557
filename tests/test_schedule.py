"""Steps, noise ranges and the line at the end of a run."""

import pytest

from tome_nodes.schedule import NoiseRange, step_index
from tome_nodes.statistics import RunStatistics


@pytest.mark.parametrize(
    ("sigma", "step"),
    [(14.6, 0), (20.0, 0), (9.0, 1), (8.0, 1), (5.0, 2), (4.9, 2), (0.1, 2)],
)
def test_step_of_an_evaluation(sigma, step):
    assert step_index([14.6, 9.0, 5.0, 0.0], sigma) == step


def test_noise_range_holds_its_start_and_not_its_end():
    noise = NoiseRange(start=5.0, end=1.0)
    assert 5.0 in noise and 1.5 in noise
    assert 1.0 not in noise and 5.1 not in noise
    assert 1.0 not in NoiseRange(start=1.0, end=1.0)


def test_summary_of_one_level():
    statistics = RunStatistics()
    statistics.blocks_present, statistics.total_steps = 16, 2
    for step in (0, 1):
        for block in "abc":
            statistics.merged(step, block, 4096, 2048)
    assert statistics.merged_anything
    assert statistics.summary() == "merged 3/16 blocks (4096 -> 2048 tokens), 2/2 steps"


def test_summary_of_several_levels_names_each():
    statistics = RunStatistics()
    statistics.blocks_present, statistics.total_steps = 16, 4
    for block in "abc":
        statistics.merged(0, block, 1024, 512)
    statistics.merged(0, "d", 4096, 2048)
    assert statistics.summary() == (
        "merged 4/16 blocks (4096 -> 2048 tokens x1, 1024 -> 512 tokens x3), 1/4 steps"
    )


def test_the_reason_told_is_the_most_common_one():
    statistics = RunStatistics()
    assert statistics.most_common_reason is None
    for reason in ("few", "many", "many"):
        statistics.skipped(reason)
    assert statistics.most_common_reason == "many"
    assert not statistics.merged_anything
