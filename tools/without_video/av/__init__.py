"""Stands where PyAV is not: ComfyUI imports its names, and only video files need what they do.

PyAV is at https://github.com/PyAV-Org/PyAV; its wheel is too large to be carried.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Names(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(MetaPathFinder, Loader):
    """Finds all modules below this one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Any module of the package."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("av.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """One with all names."""
        return Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(Finder())
sys.modules[__name__].__class__ = Names
