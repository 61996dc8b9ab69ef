"""Modules in place of packages that are not installed, for parsers that import more than they need."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection


class ReplacedModule(types.ModuleType):
    """A module that has any class."""

    __version__ = "999.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})


class Replacements(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of some packages if nothing else finds them."""

    def __init__(self, packages: Collection[str]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A replaced module."""
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module of any class."""
        return ReplacedModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """It has no code."""


def replace_missing(packages: Collection[str]) -> None:
    """Lets imports of these packages succeed where they are not installed."""
    sys.meta_path.append(Replacements(packages))
