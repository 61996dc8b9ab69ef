"""Faults that are planted into the kernel of a process: their list, where each is planted, and what must see it."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What takes the place of the attribute `name` of a module or class; a call plants it."""

    owner: Any
    name: str
    instead: Callable[..., Any]
    """Gets what is right; where that is a function, also the arguments of each call."""
    cases_by_check: dict[str, list[str]]
    """Check of tests/mutations.py that must see the fault -> the layouts, models or tests with which it does."""

    def __call__(self) -> None:
        setattr(self.owner, self.name, self.wrong(getattr(self.owner, self.name)))

    def wrong(self, right: Any) -> Any:
        """What takes the place of `right`."""
        if not callable(right):
            return self.instead(right)
        return lambda *args, **kwargs: self.instead(right, *args, **kwargs)

    @property
    def place(self) -> str:
        """The module and the name in it, such as `cp._visits`."""
        owner = self.owner
        full = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        return f"{full}.{self.name}".removeprefix("ultrabench.kernel.")

    @property
    def text(self) -> str:
        """What is wrong, in one line without its full stop."""
        return (self.instead.__doc__ or "").splitlines()[0].rstrip(".")


FAULTS: dict[str, Fault] = {}


def planted(owner: Any, name: str, **cases: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the function to FAULTS, as `instead` of the attribute `name`; `cases` is check="case, case"."""

    def add(instead: Callable[..., Any]) -> Callable[..., Any]:
        places = {check: where.split(", ") for check, where in cases.items()}
        FAULTS[instead.__name__] = Fault(owner, name, instead, places)
        return instead

    return add


def changed(module: ModuleType, **names: Any) -> SimpleNamespace:
    """A module with other values for some names."""
    return SimpleNamespace(**{**vars(module), **names})
