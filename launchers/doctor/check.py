"""What a check found; each is a row of `ultrabench doctor`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

Say = Callable[[str], None]
"""Shows the user one line of progress."""


def when_new(say: Say) -> Say:
    """`say`, but silent when it is given the same line again."""
    said: list[str] = []

    def tell(line: str) -> None:
        if said[-1:] != [line]:
            said.append(line)
            say(line)

    return tell


class CheckStatus(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"  # sweeps run, but not as well or not all of them
    FAIL = "fail"
    SKIP = "skip"  # not looked at, because something before it failed


FAIL, WARN = CheckStatus.FAIL, CheckStatus.WARN


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question, its answer, and what to do about it."""

    name: str = ""
    """The tables of examine.py and acceptance.py name the checks."""
    status: CheckStatus
    told: str
    """What was found, with its numbers."""
    remedy: str | None = None
    """What to do; every check that warns or fails has one."""

    def named(self, name: str) -> "Check":
        """The same check under a name."""
        return replace(self, name=name)


def passed(told: str) -> Check:
    """A check that found nothing wrong."""
    return Check(status=CheckStatus.PASS, told=told)


def failed(told: str, remedy: str) -> Check:
    """A check that found what makes sweeps impossible."""
    return Check(status=FAIL, told=told, remedy=remedy)


def skipped(name: str, told: str) -> Check:
    """A check that was left out, because another failed."""
    return Check(name=name, status=CheckStatus.SKIP, told=told)


Problem = tuple[object, CheckStatus, str] | tuple[object, CheckStatus, str, str]
"""Whether a problem is there, how serious it is, its remedy, and what it adds to what was found."""


def first_problem(told: str, *problems: Problem) -> Check:
    """The check of the first problem that is there; a passed one where none is."""
    for there, status, remedy, *more in problems:
        if there:
            return Check(status=status, told="; ".join([told, *more]), remedy=remedy)
    return passed(told)
