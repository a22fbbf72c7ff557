"""Steps, noise ranges and the line at the end of a run."""

import pytest

from tome_nodes.config import ToMeConfig
from tome_nodes.schedule import NoiseRange, ratio_at, step_index
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


def test_summary_of_a_changing_ratio_tells_its_range():
    statistics = RunStatistics()
    statistics.blocks_present = statistics.total_steps = 3
    for step, after in enumerate((40, 50, 60)):
        statistics.merged(step, "a", 100, after)
    statistics.merged(0, "b", 400, 160)
    assert statistics.summary() == (
        "merged 2/3 blocks (400 -> 160 tokens x1, 100 -> 40-60 tokens x1), 3/3 steps"
    )


@pytest.mark.parametrize(
    ("ratio_end", "total", "expected"),
    [(0.4, 3, [0.6, 0.5, 0.4]), (-1.0, 3, [0.6, 0.6, 0.6]), (0.0, 1, [0.6])],
)
def test_ratio_moves_to_its_end_in_equal_parts(ratio_end, total, expected):
    config = ToMeConfig(ratio=0.6, ratio_end=ratio_end)
    assert [ratio_at(config, step, total) for step in range(total)] == pytest.approx(expected)


def test_the_reason_told_is_the_most_common_one():
    statistics = RunStatistics()
    assert statistics.obstacle(1, 2).startswith("max_downsample=1 leaves out every")
    for reason in ("few", "many", "many"):
        statistics.skipped(reason)
    assert statistics.obstacle(1, 2) == "many"
    assert not statistics.merged_anything
