"""What a study adds to ultrabench: its commands, its figure, and modules that the core asks for by their name.

A study is a folder of `analysis/studies/`. Its `study.py` holds constants only, so that `ultrabench --help` need not
import the study itself. The command line, `ultrabench plot`, the page and `sweep launch` find studies by listing that
folder; nothing else knows their names, so a deleted folder is a deleted study.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

STUDIES_FOLDER = Path(__file__).parent / "studies"
"""The folder whose sub-folders are the studies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a study, which a function of its module `command.py` runs."""

    name: str
    """The name of the command, such as `history`."""
    help: str
    """The text of its --help, whose first sentence stands in the list of commands."""
    group: str = ""
    """The group of the command, such as `sweep`; empty for a command of `ultrabench` itself."""
    after: str = ""
    """The command of the core behind which it is listed; empty for a place at the end."""
    function: str = ""
    """The name of the function; empty if it is that of the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a kind of figure of `ultrabench plot` shows, and over which axes it can be drawn."""

    name: str
    """The name of the kind, such as `largest-batch`."""
    summary: str
    """What the figure shows, for `ultrabench plot --list`."""
    after: str = ""
    """For the figure of a study, the kind of the core behind which it is listed; empty for a place at the end."""
    axes: tuple[str, ...] = ()
    """Values of --axis, the default first; empty for a figure without a choice of axis."""
    default_column: str = ""
    """The column of the y axis when --by is not given; empty for a figure without a choice of column."""
    takes_any_axis: bool = False
    """Whether the x axis can be any axis that varied in the results; its name follows that of the
    kind in the command."""
    shows_layout: bool = False
    """Whether the figure shows a layout, given as NAME=VALUE; results are then optional, or not allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One study, as its `study.py` describes it."""

    name: str
    """The name of its folder."""
    commands: tuple[Command, ...] = ()
    """COMMANDS of study.py, in the order of --help."""
    kind: Kind | None = None
    """KIND of study.py: the figure of `ultrabench plot` that the module `figure.py` of the study draws."""

    def module(self, name: str) -> ModuleType | None:
        """A module of the study, imported; None if the study has none of this name."""
        if not (STUDIES_FOLDER / self.name / f"{name}.py").exists():
            return None
        return import_module(f"ultrabench.analysis.studies.{self.name}.{name}")


@functools.cache
def studies() -> tuple[Study, ...]:
    """All studies in the order of their names; of each only its constants are imported."""
    names = sorted(path.parent.name for path in STUDIES_FOLDER.glob("*/study.py"))
    constants = ((name, import_module(f"ultrabench.analysis.studies.{name}.study")) for name in names)
    return tuple(
        Study(name=name, commands=getattr(module, "COMMANDS", ()), kind=getattr(module, "KIND", None))
        for name, module in constants
    )


def modules(name: str) -> list[ModuleType]:
    """The modules of this name of all studies that have one, such as `page_table`."""
    return [module for study in studies() if (module := study.module(name)) is not None]


class Placed(Protocol):
    """An entry of a list that names the entry behind which it stands: a command or a figure."""

    @property
    def name(self) -> str:
        """The name of the entry."""

    @property
    def after(self) -> str:
        """The name of the entry before it."""


def names_in_order(core_names: Iterable[str], additions: Sequence[Placed]) -> list[str]:
    """The names of the core, each followed by the additions that stand behind it; the other additions come last."""
    core = [*core_names]
    ordered = [
        name for before in core for name in (before, *(a.name for a in additions if a.after == before))
    ]
    return [*ordered, *(addition.name for addition in additions if addition.after not in core)]
