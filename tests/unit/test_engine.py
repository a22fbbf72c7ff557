"""From which size on merging is worth it."""

import pytest
import torch

from tome_nodes.patching.engine import make_engine
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.strategies import make_strategy


@pytest.mark.parametrize(
    ("device", "settings", "places", "expected"),
    [
        ("cpu", {}, {}, (256, 256)),
        ("cpu", {}, {"at_calls": True}, (256, 256)),
        # Any device without Triton counts as a GPU; this one needs no hardware.
        ("meta", {}, {}, (4096, 4096)),
        ("meta", {}, {"in_blocks": True}, (768, 4096)),
        ("meta", {}, {"at_calls": True}, (3072, 3072)),
        ("meta", {"strategy": "bipartite"}, {"at_calls": True}, (4096, 4096)),
        ("meta", {"min_tokens": 7}, {"in_blocks": True}, (7, 7)),
    ],
)
def test_the_smallest_map_that_merges(device, settings, places, expected):
    config = ToMeConfig(**{"strategy": "window", **settings})
    engine = make_engine(config, make_strategy, torch.device(device), torch.float32, **places)
    assert (engine.least_tokens, engine.least_in_attention) == expected
