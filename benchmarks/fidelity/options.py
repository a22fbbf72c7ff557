"""Everything that a user could pick to save time on a model of some kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from comfy_extras.nodes_hypertile import HyperTile
from comfy_extras.nodes_model_downscale import PatchModelAddDownscale
from comfy_extras.nodes_tomesd import TomePatchModel

from benchmarks.fidelity import page, rivals, shares
from benchmarks.others import ONCE, ToDoStrategy, TomesdStrategy
from benchmarks.patches import Patch, node
from tome_nodes.comfyui.attachment import attach
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of

FEWER: dict[int, Sequence[int]] = {
    20: (16, 13, 10, 8, 6),
    16: (14, 12, 10, 8, 6),
    12: (10, 9, 8, 7, 6),
    8: (7, 6, 5, 4, 3),
    4: (3, 2),
}
"""The fewer steps to which a run can be cut, by its number of steps."""

MERGED_FEWER: dict[int, Sequence[int]] = {20: (10, 9), 16: (8, 7), 12: (7, 6), 8: (6, 5)}
"""The same for runs that merge as *fast* does, with about the work of *fast* with shallow steps."""

ON_TRANSFORMERS = {"fast": (0.3, 0.5, 0.6, 0.75)}
"""Ratios to judge on transformers, where preset balanced is the same as fast."""

_THRESHOLDS = (0.1, 0.2, 0.4)
"""Thresholds of the caches; 0.2 is the default of each."""


_INTERVALS = (2, 3, 5)
"""Intervals of DeepCache: the whole UNet runs in one step of this many."""


@dataclass(frozen=True)
class Option:
    """Something that a user could pick.

    Attributes:
        name: its name in tables.
        kind: one of :data:`benchmarks.fidelity.shares.KINDS`.
        patch: makes the patched clone of a model.
        steps: number of steps; None for as many as the plain run has.
        keys: the share of keys and values that the attention of a transformer keeps.
    """

    name: str
    kind: str
    patch: Patch = field(default=lambda model: model)
    steps: int | None = None
    keys: float = 1.0


def of_unet(steps: int) -> list[Option]:
    """Options on a UNet in place of a run of that many steps."""
    return [
        *_without_merging(steps),
        *_merged_fewer(steps),
        *_peers_on_unets(),
        _keys(page.KEYS75, 0.75),
        Option(shares.PAPER, shares.MERGING, ours(**ONCE)),
        *_merging(),
        *_presets({"balanced": (0.6, 0.75), "fast": (0.3, 0.5, 0.6)}),
    ]


def of_other_runs(steps: int) -> list[Option]:
    """The few options that are asked under other guidance."""
    return [
        *_fewer(steps, slice(1, 4)),
        *_merged_fewer(steps),
        _tomesd(),
        *_presets({"balanced": (0.6,), "fast": (0.6,)}),
    ]


def of_stickers(steps: int) -> list[Option]:
    """Options on a UNet whose steps may be shallow, among them shallow steps without merging."""
    alone = {
        ratio: partial(attach, config=ToMeConfig(ratio=ratio, forecast=True, merge_attn=False))
        for ratio in (0.225, 0.3, 0.45, 0.5, 0.6)
    }
    return [
        *_fewer(steps),
        *_merged_fewer(steps),
        *(
            Option(f"DeepCache {each}", shares.CACHE, rivals.deep_cache(each))
            for each in _INTERVALS
        ),
        _tomesd(),
        *_presets({"balanced": (0.3, 0.6), "fast": (0.3, 0.6, 0.75)}),
        *(
            Option(f"shallow {ratio:g}, nothing merged", shares.OURS, patch)
            for ratio, patch in alone.items()
        ),
    ]


def of_high_resolution(steps: int) -> list[Option]:
    """Options on a UNet in place of a second pass of that many steps at high resolution."""
    # Its default end, 0.35, is before a second pass begins.
    shrink = {"downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 0.75}
    methods = {"downscale_method": "bicubic", "upscale_method": "bicubic"}
    deep_shrink = node(
        PatchModelAddDownscale, block_number=2, downscale_after_skip=True, **shrink, **methods
    )
    return [
        *_fewer(steps, slice(1, 4)),
        *_merged_fewer(steps),
        *_peers_on_unets(),
        _todo(),
        _keys(page.KEYS75, 0.75),
        Option("Deep Shrink to 0.75", shares.SIZE, deep_shrink),
        *_presets({"balanced": (0.6, 0.75), "fast": (0.6,)}),
    ]


def of_transformer(steps: int) -> list[Option]:
    """Options on a transformer in place of a run of that many steps."""
    return [
        *_without_merging(steps),
        *_merging(),
        _keys("k,v 0.6, window 4x2", 0.6),
        _keys(page.KEYS75, 0.75),
        *_presets(ON_TRANSFORMERS),
    ]


def of_edit(steps: int) -> list[Option]:
    """Options in place of an edit of that many steps; beside references, nothing merges."""
    return [*_without_merging(steps), *_presets(ON_TRANSFORMERS)]


def _without_merging(steps: int) -> list[Option]:
    found = _fewer(steps)
    found += _caches("EasyCache", rivals.easy_cache)
    found += _caches("LazyCache", rivals.lazy_cache)
    found.append(Option("forecast", shares.FORECAST, rivals.forecast()))
    if steps >= 8:
        found.append(Option("forecast, more skipped", shares.FORECAST, rivals.forecast(4)))
    return found


def _fewer(steps: int, picked: slice = slice(None)) -> list[Option]:
    """Runs of fewer steps, as :data:`FEWER` has them."""
    return [Option(f"{fewer} steps", shares.STEPS, steps=fewer) for fewer in FEWER[steps][picked]]


def _merged_fewer(steps: int) -> list[Option]:
    """Runs that merge as *fast* does, with fewer steps in place of shallow ones."""
    merged = preset("fast", forecast=False)
    return [
        Option(f"fast 0.6, {fewer} steps", shares.MERGED_STEPS, merged, steps=fewer)
        for fewer in (steps, *MERGED_FEWER[steps])
    ]


def _caches(name: str, cache: Callable[[float], Patch]) -> list[Option]:
    """A cache at each threshold."""
    return [Option(f"{name} {each:g}", shares.CACHE, cache(each)) for each in _THRESHOLDS]


def _peers_on_unets() -> list[Option]:
    """What others have published for UNets."""
    tile = {"tile_size": 256, "swap_size": 2, "max_depth": 0, "scale_depth": False}
    return [
        _tomesd(),
        Option("core q 0.5", shares.MERGING, node(TomePatchModel, ratio=0.5)),
        Option("HyperTile", shares.MERGING, node(HyperTile, **tile)),
    ]


def _tomesd() -> Option:
    return Option(shares.TOMESD, shares.MERGING, ours(TomesdStrategy, **ONCE))


def _todo() -> Option:
    """ToDo, which runs on any model."""
    todo = ours(ToDoStrategy, ratio=0.75, attn_tokens="k,v", **ONCE)
    return Option(shares.TODO, shares.MERGING, todo, keys=0.25)


def _merging() -> list[Option]:
    """Methods that others have published for any model, and parts of such methods."""
    return [
        _todo(),
        Option("k,v 0.5, unweighted", shares.MERGING, ours(attn_tokens="k,v", **ONCE), keys=0.5),
    ]


def _presets(ratios: Mapping[str, Sequence[float]]) -> list[Option]:
    """Presets at some ratios."""
    return [
        Option(f"{name} {ratio:g}", shares.OURS, preset(name, ratio))
        for name, each in ratios.items()
        for ratio in each
    ]


def _keys(name: str, ratio: float) -> Option:
    """Merging keys and values, as *balanced* does in a UNet."""
    merged = ours(ratio=ratio, attn_tokens="k,v", strategy="window", sx=4)
    return Option(name, shares.MERGING, merged, keys=1 - ratio)


def ours(other: Callable[..., Any] | None = None, /, **settings: Any) -> Patch:
    """Our patch with these settings, on maps of any size; ``other`` makes another strategy."""
    own: dict[str, Any] = {} if other is None else {"make_strategy": other}
    config = ToMeConfig(**{"ratio": 0.5, **settings, "min_tokens": 1})
    return partial(attach, config=config, **own)


def preset(name: str, ratio: float = 0.6, **others: Any) -> Patch:
    """Our patch with a preset, apart from ``others``."""
    return partial(attach, config=ToMeConfig(**settings_of(name, {"ratio": ratio}) | others))
