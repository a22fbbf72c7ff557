"""Our patch with given settings, as a function that makes a patched clone of a ComfyUI model."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tome_nodes.comfyui.attachment import attach
from tome_nodes.settings.config import ToMeConfig
from tome_nodes.settings.presets import settings_of

Patch = Callable[[Any], Any]


def ours(other: Callable[..., Any] | None = None, /, **settings: Any) -> Patch:
    """Our patch with some settings, on maps of any size; ``other`` makes another strategy."""
    own: dict[str, Any] = {} if other is None else {"make_strategy": other}
    config = ToMeConfig(**{"ratio": 0.5, **settings, "min_tokens": 1})
    return partial(attach, config=config, **own)


def preset(name: str, ratio: float = 0.6, **others: Any) -> Patch:
    """Our patch with a preset; ``others`` are settings that it decides otherwise."""
    return ours(**{**settings_of(name, {"ratio": ratio}), **others})
