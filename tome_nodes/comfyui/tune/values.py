"""A text that stands for what other nodes have put on a model, by value and not only by name."""

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

_FEW = 10_000
"""Tensors of at most this many numbers, such as a model's noise levels, count by their values.
Larger ones, such as pictures and weights, count by their shape."""

_MOST = 200_000
"""The most values that are looked at."""


def described(*values: Any) -> str:
    """A text that is the same for the same values, whenever the program runs.

    Functions count by their names, defaults and enclosed variables, and other objects by their
    classes and attributes. Models count by their classes. If a value has changed in a run, such as
    a counter, the text changes, too.
    """
    words, queue, seen = list[str](), deque(values), dict[int, Any]()
    while queue and len(seen) < _MOST:
        value = queue.popleft()
        parts = [] if id(value) in seen else [*_parts(value)]
        # Kept, so that no other value gets its id.
        seen[id(value)] = value
        words.append(f"{_word(value)} {len(parts)}")
        queue.extend(parts)
    return "\n".join(words)


def _word(value: Any) -> str:
    """A value without its parts."""
    if value is None or isinstance(value, bool | int | float | str | torch.device | torch.dtype):
        return repr(value)
    if isinstance(value, Tensor):
        is_plain = value.numel() <= _FEW and not (value.is_nested or value.is_meta)
        return f"{value.dtype} {[*value.shape]} {value.flatten().tolist() if is_plain else ''}"
    named = value if isinstance(value, type | FunctionType | BuiltinFunctionType) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _parts(value: Any) -> Iterable[Any]:
    """What a value is made of."""
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, FunctionType):
        return value.__defaults__, value.__kwdefaults__, value.__closure__
    if isinstance(value, CellType):
        try:
            return (value.cell_contents,)
        except ValueError:
            # Its variable has no value yet.
            return ()
    return () if _has_only_a_name(value) else getattr(value, "__dict__", {}).items()


def _has_only_a_name(value: Any) -> bool:
    if isinstance(value, Tensor | type | BuiltinFunctionType | ModuleType | ModelPatcher):
        return True
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None
