"""What the demo says of a run on the real server."""

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


@pytest.mark.parametrize(
    ("graph", "levels"),
    [(merging_graph(), SHARES), (txt2img(steps=1, side=64), [])],
    ids=["merging", "plain"],
)
def test_each_level_that_merged_is_listed_with_its_tokens_and_their_share(server, graph, levels):
    comparison = Comparison(graph)
    comparison.measure(server, repeats=1)
    assert comparison.levels() == levels
    assert comparison.has_plain_pass() == (not levels)
    assert comparison.warnings() == []
    head, _, one, whole = comparison.table().splitlines()
    assert head.split("|")[2].strip() == "blocks"
    assert "KSampler sampler" in one and "whole run" in whole
