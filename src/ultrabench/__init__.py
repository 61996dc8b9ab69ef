"""ultrabench measures which parallel layout trains a model fastest on a cluster.

`ultrabench.read`, `ultrabench.best` and `ultrabench.plot` are for notebooks (docs/guide/results.md); they are imported
when they are first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_FOR_NOTEBOOKS = ("read", "best", "plot")


def __getattr__(name: str) -> Any:
    """A function for notebooks; pandas and matplotlib are imported only here."""
    if name in _FOR_NOTEBOOKS:
        return getattr(import_module("ultrabench.analysis.notebook"), name)
    raise AttributeError(f"module 'ultrabench' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names that a notebook completes."""
    return sorted((*globals(), *_FOR_NOTEBOOKS))
