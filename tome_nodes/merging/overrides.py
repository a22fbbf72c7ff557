"""Put other methods on modules for one evaluation, and take them off again."""

from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

Forward = Callable[..., Any]

Override = tuple[nn.Module, str, Forward]
"""A module, the name of its method, such as ``forward``, and what the module runs instead."""

_codes: WeakKeyDictionary[nn.Module, dict[str, CodeType]] = WeakKeyDictionary()
"""A code object for every override. Blocks may be compiled one by one, and torch.compile keeps only
a few graphs of a code object."""


class Overrides:
    """What modules run instead of their own methods, in one thread, while it is on.

    Overrides are made once and used again, unless other code has changed what a module runs.
    """

    def __init__(self, make: Callable[[], Iterable[Override]]):
        """``make`` returns the overrides; the first goes on first."""
        self._make = make
        self._placed: list[_Placed] = []
        self._classes: dict[tuple[type, str], Any] = {}
        self._thread: int | None = None

    def put_on(self) -> None:
        """Put the overrides on. The caller has to take them off again."""
        if not self._still_fit():
            self._place()
        self._thread = get_ident()
        for placed in self._placed:
            # nn.Module.__setattr__ is slow, and SDXL has hundreds of these.
            placed.attributes[placed.name] = placed.method

    def take_off(self) -> None:
        """Take off the overrides that are still on."""
        self._thread = None
        for placed in self._placed:
            attributes, name = placed.attributes, placed.name
            if name not in attributes or attributes[name] is not placed.method:
                continue
            if placed.before is None:
                del attributes[name]
            else:
                attributes[name] = placed.before

    def _place(self) -> None:
        """Make the overrides for what the modules run now."""
        all_placed, classes = [], {}
        for module, name, own in self._make():
            attributes, kind, children = vars(module), type(module), module._modules
            classes[kind, name] = getattr(kind, name)
            method = self._in_this_thread(module, name, own)
            before, now = attributes.get(name), [*children.values()]
            all_placed.append(_Placed(attributes, name, method, before, children, now))
        self._placed, self._classes = all_placed, classes

    def _still_fit(self) -> bool:
        """Whether all modules run what they ran when the overrides were made."""
        for placed in self._placed:
            attributes, name = placed.attributes, placed.name
            # A call of dict.get takes longer, and SDXL has hundreds of these, too.
            now = attributes[name] if name in attributes else None  # noqa: SIM401
            if now is not placed.before:
                return False
            if [*placed.children.values()] != placed.children_before:
                return False
        classes = self._classes.items()
        return bool(classes) and all(getattr(*place) is method for place, method in classes)

    def _in_this_thread(self, module: nn.Module, name: str, own: Forward) -> Forward:
        """An override that applies in one thread, since others may run an unpatched clone."""
        plain = getattr(module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            is_here = torch.compiler.is_compiling() or get_ident() == self._thread
            return own(*args, **kwargs) if is_here else plain(*args, **kwargs)

        # Always the same code object, so that torch.compile finds its graph again.
        codes = _codes.setdefault(module, {})
        run.__code__ = codes.setdefault(name, run.__code__.replace())

        return run


class _Placed(NamedTuple):
    """An override, with what it replaces.

    Attributes:
        attributes: the attributes of the module that gets it.
        name: the method that it replaces.
        method: what the module is to run.
        before: what the module itself had under this name; None if only its class had it.
        children: the submodules of the module by name.
        children_before: what these were.
    """

    attributes: dict[str, Any]
    name: str
    method: Forward
    before: Any
    children: Mapping[str, nn.Module | None]
    children_before: list[nn.Module | None]
