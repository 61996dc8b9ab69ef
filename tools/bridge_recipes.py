"""Reads the recipes of pretraining of a checkout of Megatron-Bridge without installing it.

A recipe is a function that sets attributes of a configuration. Here it runs on records that keep what is set; all
modules but those of recipes are replaced by ones whose classes are such records.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("megatron.bridge.perf_recipes", "megatron.bridge.recipes")
"""Recipes for performance, then those of models without one."""
REAL_MODULES = (*PACKAGES, "megatron.bridge.training.mixed_precision")
"""Modules that are imported from the checkout, with those below them."""
REPLACED_PACKAGES = ("megatron", "torch", "transformers", "omegaconf", "datasets", "nvidia_resiliency_ext")
NAME = re.compile(
    r"(?P<model>\w+)_pretrain_(?P<gpus>\d+)gpu_(?P<gpu>[a-z0-9]+)_(?P<precision>[a-z0-9]+)_config"
)
"""The name of a recipe: model, number of GPUs, GPU and precision."""


class Settings:
    """Keeps attributes; one that was not set is None, or in a whole configuration another Settings."""

    def __init__(self, *args: Any, **values: Any) -> None:
        self.__dict__["values"] = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_section = type(self).__name__ == "ConfigContainer" and name != "comm_overlap"
        if is_section and name not in self.values:
            self.values[name] = Settings()
        return self.values.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.values[name] = value

    def __call__(self, *args: Any, **values: Any) -> "Settings":
        """Other settings, as a function of a replaced module returns them."""
        return Settings(**values)


class _ReplacedClass(type):
    """A class whose unknown attributes are functions that return a model."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name)


class _Name(str):
    """A value of a replaced module, such as torch.bfloat16, which is also a function."""

    def __call__(self, *args: Any, **values: Any) -> "_Model":
        return _Model()


class _Model(Settings):
    """A model of a hub; each of its functions returns its settings."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name.startswith("_") else lambda *args, **values: Settings()


class _ReplacedModule(types.ModuleType):
    """A module that has any class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = (
            _Name(name)
            if self.__name__ == "torch" and name[0].islower()
            else _ReplacedClass(name, (Settings,), {})
        )
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of recipes in the checkout, and replaces all others of these packages."""

    def __init__(self, source: Path) -> None:
        self.source = source

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The module in the checkout if it is one of recipes, else a replaced one."""
        if name.startswith(REAL_MODULES):
            module = self.source.joinpath(*name.split("."))
            file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            if file.exists():
                places = [str(module)] if module.is_dir() else None
                return importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)
        if name.partition(".")[0] in REPLACED_PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A replaced module."""
        return _ReplacedModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """A replaced module has no code."""
        module.__path__ = []


def flat(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name of each setting with its value."""
    for name, value in settings.values.items():
        if isinstance(value, Settings):
            yield from flat(value, f"{prefix}{name}.")
        elif value.__class__.__name__ == "MixedPrecisionConfig":
            yield from ((f"{prefix}{name}.{key}", item) for key, item in vars(value).items())
        else:
            yield f"{prefix}{name}", str(value) if isinstance(value, _Name) else value


def read_recipes(checkout: Path) -> dict[str, dict[str, Any]]:
    """Name of each recipe of pretraining -> its settings by dotted name; recipes of other kinds of models are left out.

    It replaces packages such as torch in this process.
    """
    source, recipes = checkout / "src", dict[str, dict[str, Any]]()
    sys.meta_path.insert(0, _Finder(source))
    for package in PACKAGES:
        for file in sorted((source / package.replace(".", "/")).glob("*/*/*.py")):
            module_name = ".".join(file.relative_to(source).with_suffix("").parts)
            for name, settings in recipes_of(importlib.import_module(module_name)):
                recipes.setdefault(name, settings)
    return recipes


def recipes_of(module: types.ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each recipe that a module defines, with its settings."""
    for name, recipe in vars(module).items():
        if NAME.fullmatch(name) and recipe.__module__ == module.__name__:
            try:
                yield name, dict(flat(recipe()))
            except (AttributeError, TypeError, ValueError):
                continue  # a recipe of images reads what is not set here


def main() -> None:
    """Prints all recipes as JSON."""
    import json

    json.dump(read_recipes(Path(sys.argv[1])), sys.stdout, default=str)


if __name__ == "__main__":
    main()
