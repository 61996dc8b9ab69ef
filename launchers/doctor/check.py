"""What a check found; each is a row of `ultrabench doctor`."""

from dataclasses import dataclass
from enum import StrEnum


class CheckStatus(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"  # sweeps run, but not as well or not all of them
    FAIL = "fail"
    SKIP = "skip"  # not looked at, because something before it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question, its answer, and what to do about it."""

    name: str
    status: CheckStatus
    told: str
    """What was found, with its numbers."""
    remedy: str | None = None
    """What to do; every check that warns or fails has one."""


def passed(name: str, told: str) -> Check:
    """A check that found nothing wrong."""
    return Check(name=name, status=CheckStatus.PASS, told=told)


def warned(name: str, told: str, remedy: str) -> Check:
    """A check that found what will disturb some sweeps."""
    return Check(name=name, status=CheckStatus.WARN, told=told, remedy=remedy)


def failed(name: str, told: str, remedy: str) -> Check:
    """A check that found what makes sweeps impossible."""
    return Check(name=name, status=CheckStatus.FAIL, told=told, remedy=remedy)


def skipped(name: str, told: str) -> Check:
    """A check that was left out, because another failed."""
    return Check(name=name, status=CheckStatus.SKIP, told=told)
