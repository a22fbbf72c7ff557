"""From which size on merging is worth it."""

import pytest
import torch

from tome_nodes.patching.engine import make_engine
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy


@pytest.mark.parametrize(
    ("device", "settings", "merges_in", "expected"),
    [
        ("cpu", {}, "modules", (256, 256)),
        # Any device without Triton counts as a GPU; this one needs no hardware.
        ("meta", {}, "modules", (4096, 4096)),
        ("meta", {}, "blocks", (768, 4096)),
        ("meta", {"strategy": "cluster"}, "modules", (8192, 8192)),
        ("meta", {"min_tokens": 7}, "blocks", (7, 7)),
    ],
)
def test_the_smallest_map_that_merges(device, settings, merges_in, expected):
    config = ToMeConfig(**{"strategy": "window", **settings})
    engine = make_engine(config, make_strategy, torch.device(device), torch.float32, merges_in)
    assert (engine.least_tokens, engine.least_in_attention) == expected
