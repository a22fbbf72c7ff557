"""Put other methods on modules for one evaluation, and take them off again."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import CodeType
from typing import Any
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
    """What modules run instead of their own methods, in one thread, while it is installed.

    Overrides are made once and used again, unless other code has changed what a module runs.
    """

    def __init__(self, make: Callable[[], Iterable[Override]]):
        """``make`` returns the overrides, in the order in which they go on."""
        self._make = make
        self._placed: list[_Placed] = []
        self._thread: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the overrides on; uses must not be nested."""
        try:
            self._put_on()
            yield
        finally:
            self._take_off()

    def _put_on(self) -> None:
        if not (self._placed and all(map(_still_fits, self._placed))):
            self._placed = [
                _placed(module, name, self._in_this_thread(module, name, own))
                for module, name, own in self._make()
            ]
        self._thread = get_ident()
        for placed in self._placed:
            # nn.Module.__setattr__ is slow, and SDXL has hundreds of these.
            vars(placed.module)[placed.name] = placed.method

    def _take_off(self) -> None:
        self._thread = None
        for placed in self._placed:
            attributes = vars(placed.module)
            if attributes.get(placed.name) is not placed.method:
                continue
            if placed.before is None:
                del attributes[placed.name]
            else:
                attributes[placed.name] = placed.before

    def _in_this_thread(self, module: nn.Module, name: str, own: Forward) -> Forward:
        """An override that applies in one thread; others may run an unpatched clone."""
        plain = getattr(module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            is_here = torch.compiler.is_compiling() or get_ident() == self._thread
            return own(*args, **kwargs) if is_here else plain(*args, **kwargs)

        # Always the same code object, so that torch.compile finds its graph again.
        codes = _codes.setdefault(module, {})
        run.__code__ = codes.setdefault(name, run.__code__.replace())

        return run


@dataclass(frozen=True, eq=False)
class _Placed:
    """An override, with what it replaces.

    Attributes:
        module: the module that gets it.
        name: the method that it replaces.
        method: what the module is to run.
        before: what the module itself had under this name; None if only its class had it.
        of_class: the method of the module's class.
        children: the submodules of the module.
    """

    module: nn.Module
    name: str
    method: Forward
    before: Any
    of_class: Any
    children: tuple[nn.Module | None, ...]


def _placed(module: nn.Module, name: str, method: Forward) -> _Placed:
    before, of_class = vars(module).get(name), getattr(type(module), name)
    return _Placed(module, name, method, before, of_class, tuple(module._modules.values()))


def _still_fits(placed: _Placed) -> bool:
    """Whether the module runs what it ran when the override was made."""
    module, name = placed.module, placed.name
    return (
        vars(module).get(name) is placed.before
        and getattr(type(module), name) is placed.of_class
        and tuple(module._modules.values()) == placed.children
    )
