"""ultrabench measures which parallel layout trains a model fastest on a cluster.

`ultrabench.read`, `ultrabench.best` and `ultrabench.plot` are for notebooks (docs/guide/results.md); they are imported
when they are first used.
"""

__version__ = "0.2.0"

_FOR_NOTEBOOKS = ("read", "best", "plot")


def __getattr__(name: str) -> object:
    """A function for notebooks; pandas and matplotlib are imported only here.

    The module imports nothing at its top: until the command has set its handler, Ctrl-C would give a traceback.
    """
    if name in _FOR_NOTEBOOKS:
        from importlib import import_module

        return getattr(import_module("ultrabench.analysis.notebook"), name)
    raise AttributeError(f"module 'ultrabench' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names that a notebook completes."""
    return sorted((*globals(), *_FOR_NOTEBOOKS))
