"""What the demo says of a run on the real server."""

import re

import pytest
from test_server import patch, txt2img

from tools.comparison import compare

MERGING = {"preset": "custom", "max_downsample": "4", "min_tokens": 1, "ratio": 0.5}


def merging_graph():
    graph = txt2img(["tome", 0], {"tome": patch(**MERGING)}, steps=1, side=320)
    graph["loader"]["inputs"]["ckpt_name"] = "sdxl.ckpt"
    return graph


def skipping_graph():
    return txt2img(["tome", 0], {"tome": patch(preset="balanced", ratio=0.6)}, steps=20, side=64)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (merging_graph(), r"\[ToMe\] .*merged 17/17 blocks \(400 -> 200 .*x5, 100 -> 50 .*x12\).*"),
        (skipping_graph(), r"\[ToMe\] .*shallow 6/20 steps.*"),
        (txt2img(steps=1, side=64), "without ToMe, the same off and on"),
    ],
    ids=["merging", "skipping", "plain"],
)
def test_off_and_on_are_timed_and_the_log_of_on_is_shown(server, graph, said):
    comparison = compare(server, graph)
    (line,) = comparison.said()
    assert re.fullmatch(f"KSampler sampler: {said}", line)
    head, _, one, whole = comparison.table().splitlines()
    assert head.split("|")[2].strip() == "off"
    assert "KSampler sampler" in one and "whole run" in whole
    assert comparison.off.image is not None and comparison.on.image is not None
