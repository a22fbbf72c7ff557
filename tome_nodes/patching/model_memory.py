"""What a model keeps from one evaluation to the next, and how to undo it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has."""

_PLAIN = (bool, int, float, str)


class Memory:
    """Remembers what the modules of a model that have submodules hold in addition to weights."""

    def __init__(self, model: nn.Module):
        holders = [vars(module) for module in model.modules() if module._modules]
        self._before = [
            (attributes, name, value, _content(value))
            for attributes in holders
            for name, value in attributes.items()
            if not isinstance(value, _PLAIN) and name not in _OF_MODULES
        ]
        self._names = [(attributes, set(attributes)) for attributes in holders]

    def restore(self) -> bool:
        """Remove what the model has kept since, and return whether there was anything.

        Only values that hold tensors count: hosts note on modules what is loaded of them.
        """
        keeps = False
        for attributes, name, value, content in self._before:
            now = attributes.get(name)
            if now is not value:
                if _holds_tensors(now):
                    attributes[name], keeps = value, True
            elif content is not None and _holds_tensors(_new_in(content, _content(value))):
                _refill(value, content)
                keeps = True
        for attributes, names in self._names:
            for name in set(attributes) - names:
                if _holds_tensors(attributes[name]):
                    del attributes[name]
                    keeps = True
        return keeps


def _content(value: Any) -> list[Any] | dict[Any, Any] | None:
    """A copy of the content of a list or a dict, or of an object's attributes; else None."""
    if isinstance(value, list | dict):
        return value.copy()
    is_object = hasattr(value, "__dict__") and not isinstance(value, nn.Module | type | Tensor)
    return dict(vars(value)) if is_object and not callable(value) else None


def _new_in(before: Any, now: Any) -> list[Any]:
    """The values of a list or a dict that it did not hold before."""
    known = {id(each) for each in (before.values() if isinstance(before, dict) else before)}
    values = now.values() if isinstance(now, dict) else now
    return [each for each in values if id(each) not in known]


def _refill(value: Any, content: Any) -> None:
    """Give a list, a dict or an object its earlier content."""
    if isinstance(value, list):
        value[:] = content
        return
    held = value if isinstance(value, dict) else vars(value)
    held.clear()
    held.update(content)


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Whether a value is a tensor or holds any."""
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, nn.Module | type):
        return False
    if isinstance(value, Mapping):
        return any(_holds_tensors(each, depth - 1) for each in value.values())
    if isinstance(value, list | tuple | set):
        return any(_holds_tensors(each, depth - 1) for each in value)
    return hasattr(value, "__dict__") and _holds_tensors(vars(value), depth - 1)
