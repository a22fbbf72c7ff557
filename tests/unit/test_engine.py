"""From which size on merging is worth it."""

import pytest
import torch

from tome_nodes.config import ToMeConfig
from tome_nodes.core.engine import make_engine
from tome_nodes.strategies import make_strategy


@pytest.mark.parametrize(
    ("device", "settings", "at_calls", "expected"),
    [
        ("cpu", {}, False, 256),
        ("cpu", {}, True, 256),
        # Any device without Triton counts as a GPU; this one needs no hardware.
        ("meta", {}, False, 4096),
        ("meta", {"scope": "stack"}, False, 768),
        ("meta", {}, True, 3072),
        ("meta", {"scope": "stack"}, True, 3072),
        ("meta", {"strategy": "bipartite"}, True, 4096),
        ("meta", {"min_tokens": 7}, True, 7),
    ],
)
def test_the_smallest_map_that_merges(device, settings, at_calls, expected):
    config = ToMeConfig(**{"strategy": "window", **settings})
    engine = make_engine(config, make_strategy, torch.device(device), torch.float32, at_calls)
    assert engine.least_tokens == expected
