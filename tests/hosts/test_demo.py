"""What the demo says of a run on the real server."""

import re

import pytest
from test_server import patch, txt2img

from tools.comparison import Comparison

MERGING = {"preset": "custom", "max_downsample": "4", "min_tokens": 1, "ratio": 0.5}
SHARES = [
    "KSampler sampler: 50% of 400 tokens merge in 5 blocks",
    "KSampler sampler: 50% of 100 tokens merge in 12 blocks",
]


def merging_graph():
    graph = txt2img(["tome", 0], {"tome": patch(**MERGING)}, steps=1, side=320)
    graph["loader"]["inputs"]["ckpt_name"] = "sdxl.ckpt"
    return graph


def skipping_graph():
    return txt2img(["tome", 0], {"tome": patch(preset="balanced", ratio=0.6)}, steps=20, side=64)


@pytest.mark.parametrize(
    ("graph", "levels"),
    [
        (merging_graph(), SHARES),
        (skipping_graph(), ["KSampler sampler: some of 20 steps are skipped"]),
        (txt2img(steps=1, side=64), []),
    ],
    ids=["merging", "skipping", "plain"],
)
def test_levels_that_merged_and_steps_that_were_skipped_are_listed(server, graph, levels):
    comparison = Comparison(graph)
    comparison.measure(server, repeats=1)
    # How many steps of random weights are skipped depends on their answers.
    listed = [re.sub(r"[1-9] of 20", "some of 20", line) for line in comparison.levels()]
    assert listed == levels
    assert comparison.has_plain_pass() == (not levels)
    assert comparison.warnings() == []
    head, _, one, whole = comparison.table().splitlines()
    assert head.split("|")[2].strip() == "blocks"
    assert "KSampler sampler" in one and "whole run" in whole
