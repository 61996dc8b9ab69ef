"""Faults that are planted into the kernel of a process: their list, and where each is planted."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What takes the place of the attribute `name` of a module or class; a call plants it."""

    owner: Any
    name: str
    instead_of: Callable[[Any], Any]

    def __call__(self) -> None:
        setattr(self.owner, self.name, self.instead_of(getattr(self.owner, self.name)))

    @property
    def place(self) -> str:
        """The module and the name in it, such as `cp._meet`."""
        owner = self.owner
        full = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        return f"{full}.{self.name}".removeprefix("ultrabench.kernel.")

    @property
    def text(self) -> str:
        """What is wrong, in one line."""
        return (self.instead_of.__doc__ or "").splitlines()[0]


FAULTS: dict[str, Fault] = {}


def planted(owner: Any, name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Adds the function to FAULTS, planted in the attribute `name` of a module or class."""

    def add(instead_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        FAULTS[instead_of.__name__] = Fault(owner, name, instead_of)
        return instead_of

    return add


def changed(module: ModuleType, **names: Any) -> SimpleNamespace:
    """A module with other values for some names."""
    return SimpleNamespace(**{**vars(module), **names})
