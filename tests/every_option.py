"""Every option of merging, for the tests of all hosts that go through them."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """What tests know of an option.

    Attributes:
        other: a value besides the default of the node and of the editor.
        is_free: whether no preset decides it.
        is_seen: whether one call of a small UNet on a CPU depends on it.
    """

    default: Any
    other: Any
    limits: tuple[float, float] | None = None
    is_free: bool = False
    is_seen: bool = True


EVERY_OPTION = {
    "ratio": Case(0.6, 0.25, (0.0, 0.95), is_free=True),
    "start_percent": Case(0.0, 0.9, (0.0, 1.0), is_free=True),
    "end_percent": Case(1.0, 0.1, (0.0, 1.0), is_free=True),
    "seed": Case(0, 7, (0, 2**64 - 1), is_free=True),
    "backend": Case("auto", "torch", is_free=True, is_seen=False),
    "strategy": Case("bipartite", "window"),
    "scope": Case("module", "stack"),
    "attn_tokens": Case("q,k,v", "k,v"),
    "max_downsample": Case("auto", 2),
    "merge_attn": Case(True, False),
    "merge_crossattn": Case(False, True),
    "merge_mlp": Case(False, True),
    "ratio_end": Case(-1.0, 0.1, (0.0, 0.95)),
    "sx": Case(2, 4, (1, 8)),
    "sy": Case(2, 4, (1, 8)),
    "use_rand": Case(True, False),
    "min_tokens": Case(0, 1000, (0, 2**20)),
    "proportional_attn": Case(True, False),
    # Forecasts are of transformers.
    "forecast": Case(False, True, is_seen=False),
}
"""The options in the order of the node's inputs, which saved workflows go by."""
