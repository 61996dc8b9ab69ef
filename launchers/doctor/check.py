"""The result of a check; `ultrabench doctor` prints one row for each."""

from dataclasses import dataclass, replace
from enum import StrEnum


class CheckStatus(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"  # some sweeps do not run, or do not run as well as they could
    FAIL = "fail"
    SKIP = "skip"  # left out, because an earlier check failed
    UNKNOWN = "unknown"  # what would tell it is missing


FAIL, WARN = CheckStatus.FAIL, CheckStatus.WARN


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check, and what the user can do about a problem."""

    name: str = ""
    """The name in the output, which the tables of examine.py and run_acceptance.py give."""
    status: CheckStatus
    finding: str
    """What the check found, with the numbers."""
    remedy: str | None = None
    """What the user can do; every check that warns or fails has a remedy."""

    def named(self, name: str) -> "Check":
        """A copy of the check with a name."""
        return replace(self, name=name)


def success(finding: str) -> Check:
    """A check that found no problem."""
    return Check(status=CheckStatus.PASS, finding=finding)


def failure(finding: str, remedy: str) -> Check:
    """A check that found a problem which makes sweeps impossible."""
    return Check(status=FAIL, finding=finding, remedy=remedy)


def warning(finding: str, remedy: str) -> Check:
    """A check that found a problem with which some sweeps run, or run less well than they could."""
    return Check(status=WARN, finding=finding, remedy=remedy)


def skip(name: str, finding: str) -> Check:
    """A check that was left out because another check failed."""
    return Check(name=name, status=CheckStatus.SKIP, finding=finding)


def unknown_check(finding: str) -> Check:
    """A check whose facts cannot be read."""
    return Check(status=CheckStatus.UNKNOWN, finding=finding)


Problem = tuple[object, CheckStatus, str] | tuple[object, CheckStatus, str, str]
"""Whether the problem exists, how serious it is, its remedy, and optional text to add to the findings."""


def first_problem(finding: str, *problems: Problem) -> Check:
    """A check that reports the first problem that exists; a passed check if none does."""
    for exists, status, remedy, *details in problems:
        if exists:
            return Check(status=status, finding="; ".join([finding, *details]), remedy=remedy)
    return success(finding)
