"""The counts of a run, and the lines that report them."""

import pytest
import torch

from tome_nodes.merging.plan import Plan
from tome_nodes.patching.blocks import Evaluated, Outcome
from tome_nodes.report import log_line
from tome_nodes.report.counts import Counts
from tome_nodes.settings.config import ToMeConfig


def merged(block, before, after, **more):
    plan = Plan.from_slots(torch.arange(after)[None], after)
    return Outcome(block, before, plan, **more)


def left_alone(block, tokens, reason=None):
    return Outcome(block, tokens, reason=reason)


def counts_of(*evaluations, total_steps=0, blocks=16):
    """The counts of evaluations, each a step and its outcomes."""
    counts = Counts(total_steps)
    for step, outcomes in evaluations:
        counts.evaluated(Evaluated(step, blocks, outcomes))
    return counts


def line(counts, config=None, backend=()):
    return log_line.log_line(counts, config or ToMeConfig(ratio=0.5), [*backend])


def test_the_line_of_several_levels_names_each():
    outcomes = [*(merged(block, 1024, 512) for block in "abc"), merged("d", 4096, 2048)]
    counts = counts_of((0, outcomes), total_steps=4)
    assert line(counts, backend=["triton"]) == (
        "merged 4/16 blocks (4096 -> 2048 tokens x1, 1024 -> 512 tokens x3), 1/4 steps, "
        "ratio 0.50, triton"
    )


def test_each_deviation_from_the_settings_is_reported_once():
    outcomes = [
        merged(block, 64, 32, fell_back="that are patched", unweighted="so it is") for block in "ab"
    ]
    counts = counts_of((0, outcomes), (1, outcomes))
    assert line(counts, ToMeConfig(ratio=0.5, scope="stack")).endswith(
        "stack scope, module scope in 2 that are patched, merged keys weigh as one token (so it is)"
    )


def test_the_most_common_reason_is_reported():
    counts = counts_of((0, [left_alone("a", 64, "few")]))
    assert log_line.obstacle(Counts(), 1, 2).startswith("max_downsample=1 leaves out every")
    for _ in range(2):
        counts.evaluated(Evaluated(1, 1, reason="many"))
    assert log_line.obstacle(counts, 1, 2) == "many"
    assert not counts.merged


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([left_alone("a", 64)], "all tokens, step 3/9"),
        ([left_alone("a", 64, "few")], "all tokens, step 3/9: few"),
        (
            [merged("a", 64, 32), merged("b", 256, 64), merged("c", 64, 32), left_alone("d", 16)],
            "3/4 blocks, 256→64, 64→32 tokens, step 3/9",
        ),
    ],
)
def test_the_live_line_shows_one_step(outcomes, expected):
    assert log_line.live_line(Evaluated(2, 4, outcomes), 9) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ratio": 0.9}, ["ratio 0.90 capped at 0.75"]),
        ({"ratio": 0.5, "ratio_end": 0.9}, ["ratio 0.50 to 0.90 capped at 0.75"]),
        ({"strategy": "window", "scope": "stack"}, ["ratio 0.50", "window", "stack scope"]),
    ],
)
def test_settings_are_told_as_they_take_effect(options, expected):
    assert log_line.settings(ToMeConfig(**{"ratio": 0.5, **options})) == expected
